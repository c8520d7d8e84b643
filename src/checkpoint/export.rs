//! A checkpoint as a folder that Hugging Face's tools read, whatever layout wrote it.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use zeropp_checkpoint::checkpoint_at;
use zeropp_core::files::read_text;
use zeropp_core::model::decoder::{Decoder, Positions};
use zeropp_core::model::hf_config::{HfConfigError, parse};
use zeropp_core::model::hf_written::{config_json, write_rope};
use zeropp_weights::{Family, ParameterShape, StoreAs, Tensor, Weights, export, write_folder};
use zeropp_zero3::checkpoint::{Checkpoint, Manifest};

use crate::Error;
use crate::checkpoint::described::{config_of, is_described, is_model};
use crate::checkpoint::export_error::{ExportError, ReadWhole};
use crate::checkpoint::identity;
use crate::checkpoint::merged::Merged;

/// The most bytes of one file of weights.
const FILE_BYTES_MAX: usize = 5_000_000_000;
/// The longest file of settings that is read.
const TEXT_BYTES_MAX: u64 = 64 << 20;

/// The fields of a `config.json`.
type Fields = Map<String, Value>;

/// How a model is exported.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// How numbers are written.
    pub store_as: StoreAs,
    /// A model whose `config.json` and tokenizer this one has: a folder, or a GGUF file for the
    /// former. Default: what the run began with, if that is still there.
    pub like: Option<PathBuf>,
    /// Whether the moving average of the weights (EMA) is written in their place.
    pub ema: bool,
}

/// The result of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportReport {
    /// Steps that the checkpoint has behind it; none where it was a model of other tools.
    pub step: Option<u64>,
    /// Tensors.
    pub tensors: usize,
    /// Elements of all of them.
    pub parameters: usize,
    /// Files that were copied from the model that this one is like.
    pub copied: Vec<String>,
    /// Facts that a reader of the files has to know, in sentences.
    pub notes: Vec<String>,
}

/// Writes the parameters of a checkpoint (its folder, or that of checkpoints for the newest), of a
/// Hugging Face folder or of a GGUF file into the new folder `to`: safetensors of at most 5 GB
/// each, `config.json`, and the files of the tokenizer of the model that it is like. One tensor is
/// in memory at a time. What the run did not train is its base's, and adapters are merged into it.
///
/// # Errors
/// A checkpoint that is damaged or not there, a model that no `config.json` is known for, a folder
/// that is not empty.
pub fn export_checkpoint(
    from: &Path,
    to: &Path,
    options: &ExportOptions,
) -> Result<ExportReport, Error> {
    let wrong = |problem: &str, help: &str| Error::Export {
        path: from.to_path_buf(),
        problem: problem.into(),
        help: help.into(),
    };
    let source = ExportSource::open(from, options.ema)?;
    let (manifest, shapes, vocabulary) = (source.manifest(), source.shapes(), source.vocabulary());
    let Some(family) = Family::of(shapes.iter().map(|p| p.name.as_str())) else {
        return Err(wrong(
            "its parameters have no names that files of weights have",
            "train a \
             built-in model",
        ));
    };
    let began_with = match manifest {
        // It may have begun with another checkpoint.
        Some(manifest) => identity::places(&manifest.settings, "init-from")
            .into_iter()
            .map(PathBuf::from)
            .find(|path| is_model(path)),
        None => Some(from.to_path_buf()),
    };
    let like = options.like.clone().or(began_with);
    let digest = manifest.and_then(|manifest| manifest.settings.get(identity::MODEL_DIGEST));
    let config = config(from, vocabulary, digest, like.as_deref(), options.like.is_some())?;
    let config = as_stored(config, vocabulary, options.store_as);
    let plan = export::tensors(family, &shapes, vocabulary, options.store_as);
    let tensors: Vec<Tensor> = plan.iter().map(|e| e.tensor.clone()).collect();
    let mut others = vec![("config.json", format!("{config:#}\n").into_bytes())];
    let companions = like.map(|path| companions(&path));
    others.extend(companions.transpose()?.into_iter().flatten());
    let write = |read: &mut ReadWhole<'_>| {
        let values = |i: usize| -> Result<Vec<f32>, ExportError> {
            let mut values = vec![0.0; plan[i].elements()];
            read(&plan[i].parameter, plan[i].first, &mut values)?;
            Ok(plan[i].arranged(values))
        };
        write_folder(to, &tensors, FILE_BYTES_MAX, &others, values)
    };
    let read = source.write(from, options.ema, write)?;
    whole_or_gone(read, to)?;
    Ok(ExportReport {
        step: manifest.map(|manifest| manifest.step),
        tensors: tensors.len(),
        parameters: plan.iter().map(|e| e.elements()).sum(),
        copied: others.iter().skip(1).map(|(name, _)| (*name).to_owned()).collect(),
        notes: Vec::new(),
    })
}

/// Where the parameters are that are exported.
enum ExportSource {
    /// A checkpoint that has all of them.
    Whole(Checkpoint),
    /// A model of other tools, or a checkpoint that has a part of the parameters.
    Merged(Box<Merged>, Option<Checkpoint>),
}

impl ExportSource {
    /// Opens what lies at `from`, for the moving average of the weights if `ema`.
    fn open(from: &Path, ema: bool) -> Result<ExportSource, Error> {
        let wrong = |problem: &str, help: &str| {
            let (problem, help) = (problem.into(), help.into());
            Err(Error::Export { path: from.to_path_buf(), problem, help })
        };
        let checkpoint = checkpoint_at(from)?;
        if ema && checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.means().is_none()) {
            let help = "leave --ema out, or train with ema";
            return wrong("it has no moving average of the weights", help);
        }
        if checkpoint.is_none() && !is_described(from)? {
            let help = "name a checkpoint, a folder of them, a Hugging Face folder or a GGUF file";
            return wrong("it is no checkpoint, has none in it, and is no model", help);
        }
        match checkpoint {
            Some(checkpoint) if checkpoint.manifest().base.is_none() => {
                Ok(ExportSource::Whole(checkpoint))
            }
            checkpoint => Ok(ExportSource::Merged(Box::new(Merged::open(from, ema)?), checkpoint)),
        }
    }

    /// That of a checkpoint.
    fn manifest(&self) -> Option<&Manifest> {
        match self {
            ExportSource::Whole(checkpoint) => Some(checkpoint.manifest()),
            ExportSource::Merged(_, checkpoint) => checkpoint.as_ref().map(Checkpoint::manifest),
        }
    }

    fn shapes(&self) -> Vec<ParameterShape> {
        match self {
            ExportSource::Whole(checkpoint) => shapes(checkpoint.manifest()),
            ExportSource::Merged(merged, _) => merged.shapes(false),
        }
    }

    fn vocabulary(&self) -> usize {
        match self {
            ExportSource::Whole(checkpoint) => checkpoint.manifest().vocabulary,
            ExportSource::Merged(merged, _) => merged.vocabulary(),
        }
    }

    /// Calls `write` with what reads elements of a parameter: its error, and whether what
    /// it read was whole.
    fn write(
        &self,
        from: &Path,
        ema: bool,
        mut write: impl FnMut(&mut ReadWhole<'_>) -> Result<(), ExportError>,
    ) -> Result<Result<(), ExportError>, ExportError> {
        match self {
            ExportSource::Whole(checkpoint) => {
                let means = checkpoint.means().filter(|_| ema);
                let mut reader = means.unwrap_or_else(|| checkpoint.parameters());
                write(&mut |name, first, out| Ok(reader.read(name, first, out)?))?;
                Ok(reader.finish().map_err(ExportError::from))
            }
            ExportSource::Merged(merged, _) => merged.write(from, write),
        }
    }
}

/// Removes what was written where reading failed, as it came from a damaged file.
pub(crate) fn whole_or_gone(read: Result<(), ExportError>, to: &Path) -> Result<(), Error> {
    read.map_err(|e| {
        let _ = fs::remove_dir_all(to);
        e.into()
    })
}

fn shapes(manifest: &Manifest) -> Vec<ParameterShape> {
    let all = manifest.parameters.iter();
    all.map(|(name, p)| ParameterShape { name: name.clone(), shape: p.shape.clone() }).collect()
}

/// The tokenizer's files and the like.
fn companions(model: &Path) -> Result<Vec<(&'static str, Vec<u8>)>, Error> {
    // Those of a file of weights lie beside it.
    let folder = if model.is_dir() { model } else { model.parent().unwrap_or(model) };
    let there = zeropp_weights::COMPANIONS.into_iter().filter(|name| folder.join(name).is_file());
    let read = |name: &'static str| {
        let path = folder.join(name);
        let bytes = fs::read(&path).map_err(|source| Error::Output { path, source })?;
        Ok((name, bytes))
    };
    there.map(read).collect()
}

/// The `config.json`: that of the model that this one is like where it describes this model, else
/// by the checkpoint's settings.
///
/// # Errors
/// A model that was named for it and is another one; none that is known.
fn config(
    from: &Path,
    vocabulary: usize,
    digest: Option<&String>,
    like: Option<&Path>,
    is_named: bool,
) -> Result<Fields, Error> {
    let wrong = |problem: String, help: &str| {
        Err(Error::Export { path: from.to_path_buf(), problem, help: help.into() })
    };
    let theirs = like.map(config_like).transpose()?.flatten();
    let own = config_of(from).and_then(|config| Ok(config.decoder(vocabulary)?));
    let unknown = "no config.json is known for it";
    let help = "name a model that it is like, with --like";
    let other = |problem: String| {
        let like = like.unwrap_or(Path::new("")).display();
        let problem = format!("--like {like} is another model ({problem})");
        wrong(problem, "leave it out, or name a model that it is like")
    };
    match (theirs, own) {
        (Some(theirs), Ok(own)) => match (differing(&theirs, &own), config_json(&own)) {
            (None, _) => Ok(theirs),
            (Some(_), Some(own)) if !is_named => Ok(own),
            (Some(problem), _) => other(problem),
        },
        // What the checkpoint knows of its model is this, if anything.
        (Some(theirs), Err(error)) if is_named => {
            let now = match read_fields(&theirs) {
                Ok(theirs) => identity::digest_of(&theirs),
                Err(theirs) => return other(theirs.to_string()),
            };
            match digest.is_none_or(|then| now.as_ref() == Some(then)) {
                true => Ok(theirs),
                false => other(error.to_string()),
            }
        }
        (None, Ok(own)) => config_json(&own).map_or_else(|| wrong(unknown.into(), help), Ok),
        (_, Err(error)) => wrong(format!("{unknown} ({error})"), help),
    }
}

/// The `config.json` of a folder, or what a GGUF file says.
fn config_like(path: &Path) -> Result<Option<Fields>, Error> {
    if !path.is_dir() {
        let config = Weights::open(path).and_then(|weights| weights.gguf_config());
        let config = config.map_err(ExportError::from)?;
        return Ok(config.and_then(|config| config.as_object().cloned()));
    }
    let path = path.join("config.json");
    let wrong = |problem: String| Error::Export {
        path: path.clone(),
        problem,
        help: "restore it, or name another model with --like".into(),
    };
    let text = read_text(&path, TEXT_BYTES_MAX);
    let text = text.map_err(|error| wrong(format!("it cannot be read ({error})")))?;
    let fields = serde_json::from_str(&text);
    fields.map(Some).map_err(|error| wrong(format!("it is not a JSON object ({error})")))
}

/// The field of a `config.json` that describes another model than `own`, in a word; apart from the
/// vocabulary and the length of texts.
fn differing(theirs: &Fields, own: &Decoder) -> Option<String> {
    let read = match read_fields(theirs) {
        Ok(read) => read,
        Err(error) => return Some(error.to_string()),
    };
    let Decoder { vocabulary, vocabulary_multiple, context, .. } = *own;
    let theirs = Decoder { vocabulary, vocabulary_multiple, context, ..read };
    if theirs == *own {
        return None;
    }
    let fields = |decoder| config_json(decoder).unwrap_or_default();
    let (theirs, own) = (fields(&theirs), fields(own));
    let other = own.keys().chain(theirs.keys()).find(|key| own.get(*key) != theirs.get(*key));
    Some(other.map_or("its config.json".into(), |field| format!("its {field} differs")))
}

fn read_fields(fields: &Fields) -> Result<Decoder, HfConfigError> {
    let text = Value::Object(fields.clone()).to_string();
    parse(&text, Path::new("config.json")).map(|read| read.decoder)
}

/// With the numbers of the file that is written.
fn as_stored(mut config: Fields, vocabulary: usize, store_as: StoreAs) -> Value {
    let dtype = match store_as {
        StoreAs::F32 => "float32",
        StoreAs::Bf16 => "bfloat16",
    };
    // The words of transformers 5 and of 4.
    for key in ["dtype", "torch_dtype"] {
        config.insert(key.into(), json!(dtype));
    }
    config.insert("vocab_size".into(), json!(vocabulary));
    if let Ok(Decoder { positions: Positions::Rotary(rotary), .. }) = read_fields(&config) {
        write_rope(&mut config, &rotary);
    }
    Value::Object(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both were reported as a damaged manifest.
    #[test]
    fn a_folder_without_checkpoints_is_distinguished_from_a_damaged_one() {
        let dir = tempfile::tempdir().unwrap();
        let options = ExportOptions { like: None, store_as: StoreAs::F32, ema: false };
        for from in [dir.path().to_path_buf(), dir.path().join("none")] {
            let to = dir.path().join("to");
            let said = export_checkpoint(&from, &to, &options).unwrap_err().to_string();
            let starts = format!(
                "{}: it is no checkpoint, has none in it, and is no model; name a check",
                from.display()
            );
            assert!(said.starts_with(&starts), "{said}");
        }
    }
}
