//! `zeropp inspect`: what a checkpoint or a file of weights holds.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use zeropp::weights::{Container, GgufValue, StoredTensor, Weights};
use zeropp_checkpoint::{Checkpoint, checkpoint_at};

use crate::failure::Failure;
use crate::figures::{bytes, count, say, scaled, table};

const ABOUT: &str = "Show what a checkpoint, a Hugging Face folder, a safetensors or a GGUF file \
holds\n\n\
Reads and checks the tables of tensors and the sizes of files; with --verify also all that is in \
them. Of a folder of checkpoints it takes the newest.";

/// Numbers that are looked at at a time.
const CHUNK: usize = 1 << 20;

/// The arguments of `zeropp inspect`.
pub(crate) fn command() -> Command {
    Command::new("inspect")
        .about("Show what a checkpoint or a file of weights holds")
        .long_about(ABOUT)
        .arg(
            Arg::new("path")
                .value_name("PATH")
                .required(true)
                .value_parser(value_parser!(PathBuf))
                .help("A checkpoint, a folder of checkpoints, a model folder or a file of weights"),
        )
        .arg(Arg::new("verify").long("verify").action(ArgAction::SetTrue).help(
            "Read all of it: compare a checkpoint's files with their digests, and look for numbers \
             that are not finite in other weights",
        ))
}

/// Prints it.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let path = matches.get_one::<PathBuf>("path").expect("required");
    let verify = matches.get_flag("verify");
    let (text, checked) = match checkpoint_at(path).map_err(Failure::bad_input)? {
        Some(checkpoint) => {
            let checked = check_checkpoint(&checkpoint, verify)?;
            (describe_checkpoint(&checkpoint), checked.to_owned())
        }
        None => {
            let weights = Weights::open(path).map_err(Failure::bad_input)?;
            let checked = check_weights(&weights, verify)?;
            (describe_weights(&weights), checked)
        }
    };
    say(format!("{text}\n\n{checked}"));
    Ok(())
}

/// Checks sizes, with `verify` all bytes, and says what was checked and what was not.
fn check_checkpoint(checkpoint: &Checkpoint, verify: bool) -> Result<&'static str, Failure> {
    if verify {
        checkpoint.check_whole().map_err(Failure::bad_input)?;
        return Ok("checked: the manifest, and every byte of all files by their digests");
    }
    checkpoint.check_sizes().map_err(Failure::bad_input)?;
    Ok("checked: the manifest and the files' sizes; not checked: what is in them (--verify does)")
}

/// Checks, with `verify`, that numbers are finite, and says what was checked and what was not.
fn check_weights(weights: &Weights, verify: bool) -> Result<String, Failure> {
    if !verify {
        let not = "not checked: the numbers in them (--verify does)";
        return Ok(format!("checked: the tables of tensors; {not}"));
    }
    let mut skipped = Vec::new();
    for tensor in weights.tensors() {
        // An encoding that is not read, as quantised ones are.
        match weights.read(tensor, 0, &mut []) {
            Ok(()) => check_numbers(weights, tensor)?,
            Err(_) => skipped.push(tensor.name.as_str()),
        }
    }
    let checked = "checked: the tables of tensors, and that all numbers are finite";
    Ok(match skipped.as_slice() {
        [] => checked.into(),
        [first, ..] => {
            let number = count(skipped.len(), "tensor");
            format!("{checked}; not checked: {number} of types that are not read, such as {first}")
        }
    })
}

fn check_numbers(weights: &Weights, tensor: &StoredTensor) -> Result<(), Failure> {
    let mut values = vec![0.0; CHUNK.min(tensor.elements())];
    for start in (0..tensor.elements()).step_by(CHUNK) {
        let values = &mut values[..CHUNK.min(tensor.elements() - start)];
        weights.read(tensor, start, values).map_err(Failure::bad_input)?;
        if let Some(at) = values.iter().position(|x: &f32| !x.is_finite()) {
            let (file, name) = (tensor.path().display(), &tensor.name);
            let problem = format!("element {} of its tensor {name} is not finite", start + at);
            return Err(Failure::bad_input(format!("{file}: {problem}; get it again")));
        }
    }
    Ok(())
}

/// Names as people count: `layers.2` before `layers.10`.
fn by_number(name: &str) -> Vec<(Option<u64>, &str)> {
    // None comes first, so that words stand before numbers.
    name.split('.').map(|part| (part.parse().ok(), part)).collect()
}

fn describe_checkpoint(checkpoint: &Checkpoint) -> String {
    let manifest = checkpoint.manifest();
    let mut rows = vec![["parameter", "shape", "pieces"].map(String::from).to_vec()];
    let mut elements = 0;
    let mut parameters: Vec<_> = manifest.parameters.iter().collect();
    parameters.sort_by_key(|&(name, _)| by_number(name));
    for (name, parameter) in parameters {
        elements += parameter.shape.iter().product::<usize>();
        let pieces = parameter.pieces.len().to_string();
        rows.push(vec![name.clone(), shape(&parameter.shape), pieces]);
    }
    let on_disk: u64 = manifest.files.values().map(|file| file.bytes).sum();
    let mut text = format!(
        "{}: a checkpoint after step {} ({} updates), {} of {} parameters, {} token ids, {} in {}",
        checkpoint.path().display(),
        manifest.step,
        manifest.updates,
        count(manifest.parameters.len(), "tensor"),
        scaled(elements as f64),
        manifest.vocabulary,
        bytes(on_disk),
        count(manifest.files.len(), "file"),
    );
    if let Some(base) = &manifest.base {
        let of = base.path.as_ref().unwrap_or(&base.fingerprint);
        text.push_str(&format!("\nwhat it did not train is that of {of}"));
    }
    text.push_str(&format!("\n\n{}\n\nsettings", table(&rows)));
    for (key, value) in &manifest.settings {
        text.push_str(&format!("\n  {key} = {value}"));
    }
    text
}

fn describe_weights(weights: &Weights) -> String {
    let kind = match weights.container() {
        Container::Folder => "a Hugging Face folder",
        Container::Safetensors => "a safetensors file",
        Container::Gguf => "a GGUF file",
    };
    let mut rows = vec![["tensor", "shape", "type", "bytes"].map(String::from).to_vec()];
    let (mut elements, mut on_disk) = (0, 0);
    let mut types: BTreeMap<String, usize> = BTreeMap::new();
    let mut tensors: Vec<_> = weights.tensors().collect();
    tensors.sort_by_key(|&tensor| by_number(&tensor.name));
    for tensor in tensors {
        let kind = tensor.encoding.to_string();
        let size = tensor.bytes();
        (elements, on_disk) = (elements + tensor.elements(), on_disk + size as u64);
        *types.entry(kind.clone()).or_default() += 1;
        rows.push(vec![tensor.name.clone(), shape(&tensor.shape), kind, bytes(size as u64)]);
    }
    let types: Vec<String> = types.iter().map(|(kind, n)| format!("{n} {kind}")).collect();
    let mut text = format!(
        "{}: {kind}, {} of {} parameters, {}, {}\n\n{}",
        weights.path().display(),
        count(rows.len() - 1, "tensor"),
        scaled(elements as f64),
        bytes(on_disk),
        types.join(", "),
        table(&rows)
    );
    for (key, value) in weights.gguf_values() {
        text.push_str(&format!("\n  {key} = {}", value_text(value)));
    }
    if let Err(error) = weights.gguf_config() {
        text.push_str(&format!("\n\nno model that can be trained or evaluated: {error}"));
    }
    text
}

fn shape(shape: &[usize]) -> String {
    let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
    format!("[{}]", sizes.join(", "))
}

fn value_text(value: &GgufValue) -> String {
    const SHOWN: usize = 100;
    match value {
        GgufValue::Text(text) if text.chars().count() > SHOWN => {
            format!("{:?} …", text.chars().take(SHOWN).collect::<String>())
        }
        value => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_listed_in_the_order_of_their_numbers() {
        let mut names = ["a.10.w", "a.2.w", "b", "a.1.w", "a.w", "a.2.b"];
        names.sort_by_key(|&name| by_number(name));
        assert_eq!(names, ["a.w", "a.1.w", "a.2.b", "a.2.w", "a.10.w", "b"]);
    }
}
