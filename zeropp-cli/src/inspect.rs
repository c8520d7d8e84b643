//! `zeropp inspect`: what a checkpoint or a file of weights holds.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::{Arg, ArgMatches, Command, value_parser};
use zeropp::weights::{Container, GgufValue, Weights};
use zeropp_checkpoint::{Checkpoint, checkpoint_at};

use crate::Failure;
use crate::figures::{bytes, count, say, scaled, table};

const ABOUT: &str = "Show what a checkpoint, a Hugging Face folder, a safetensors or a GGUF file \
holds\n\n\
Reads and checks the tables of tensors, not the tensors themselves. Of a folder of checkpoints it \
takes the newest.";

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
}

/// Prints it.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let path = matches.get_one::<PathBuf>("path").expect("required");
    let text = match checkpoint_at(path).map_err(Failure::bad_input)? {
        Some(checkpoint) => describe_checkpoint(&checkpoint),
        None => describe_weights(&Weights::open(path).map_err(Failure::bad_input)?),
    };
    say(text);
    Ok(())
}

fn describe_checkpoint(checkpoint: &Checkpoint) -> String {
    let manifest = checkpoint.manifest();
    let mut rows = vec![["parameter", "shape", "pieces"].map(String::from).to_vec()];
    let mut elements = 0;
    for (name, parameter) in &manifest.parameters {
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
    for tensor in weights.tensors() {
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
    text
}

fn shape(shape: &[usize]) -> String {
    let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
    format!("[{}]", sizes.join(", "))
}

fn value_text(value: &GgufValue) -> String {
    const SHOWN: usize = 100;
    match value {
        GgufValue::Whole(n) => n.to_string(),
        GgufValue::Number(x) => x.to_string(),
        GgufValue::Truth(on) => on.to_string(),
        GgufValue::Text(text) if text.chars().count() > SHOWN => {
            format!("{:?} …", text.chars().take(SHOWN).collect::<String>())
        }
        GgufValue::Text(text) => format!("{text:?}"),
        GgufValue::Array(_, n) => format!("{n} values"),
    }
}
