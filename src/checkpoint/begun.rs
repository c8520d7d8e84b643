//! The model of a run that goes on from a checkpoint or begins with the weights of another: taken
//! from where they lie, or held against what lies there.

use std::collections::BTreeSet;
use std::path::Path;

use toml::Table;
use tracing::warn;
use zeropp_core::model::decoder::Decoder;
use zeropp_core::model::hf_written::config_json;
use zeropp_zero3::checkpoint::CheckpointError;

use crate::Error;
use crate::checkpoint::described::{config_of, config_then, is_described};
use crate::checkpoint::identity;
use crate::checkpoint::saved_cut::goes_on_from;
use crate::config::{Config, ConfigError, OPTIONS, is_path};

/// Settings that make the model that weights are of; a run may have samples of another length.
const OF_WEIGHTS: [&str; 16] = [
    "model",
    "layers",
    "hidden",
    "heads",
    "kv-heads",
    "head-dim",
    "intermediate",
    "experts",
    "experts-per-token",
    "tied",
    "activation",
    "vocab",
    "vocab-multiple",
    "lora-rank",
    "lora-alpha",
    "lora-targets",
];

/// Settings beside those of a model that a resumed run takes from a checkpoint that has them.
const OF_RUN: [&str; 2] = ["split", "vocab"];

/// The settings with the model, the tokens and the split of the checkpoint that the run goes on
/// from; those among the keys that were `given` stay, and are held against it later. None where it
/// goes on from none, or its model is given by another file.
///
/// # Errors
/// Another family or preset was given; the checkpoint's model is described by a file that is not
/// there.
pub fn with_model_of_checkpoint(
    config: &Config,
    given: &BTreeSet<String>,
) -> Result<Option<Config>, Error> {
    let Some(checkpoint) = goes_on_from(config) else { return Ok(None) };
    let manifest = checkpoint.manifest();
    let theirs = match config_then(checkpoint.path(), manifest) {
        Ok(theirs) if !given.contains("model") || theirs.model == config.model => theirs,
        // A file may have moved.
        Ok(theirs) if !is_path(&config.model) && !is_path(&theirs.model) => {
            let (now, then) = (&config.model, theirs.model);
            let problem = format!("model = {now}: was {then}; leave model out, or use {then}");
            let path = checkpoint.path().to_path_buf();
            return Err(CheckpointError::Mismatch { path, problem }.into());
        }
        Err(error) if !given.contains("model") => return Err(error.into()),
        _ => return Ok(None),
    };
    let mut overrides = Table::new();
    for option in OPTIONS.iter().filter(|option| !given.contains(option.key)) {
        let value = match option.of_model {
            true => theirs.get(option.key),
            // Data of its own for validation stands in place of a part that was kept.
            false if option.key == "split" && given.contains("eval-data") => None,
            false if OF_RUN.contains(&option.key) => {
                let text = identity::typed(&manifest.settings, option.key);
                text.and_then(|text| option.kind.parse(text).ok())
            }
            // What does not train is not in the checkpoint.
            false if option.key == "init-from" && trains_in_part(&theirs) => {
                let mut places = identity::places(&manifest.settings, option.key).into_iter();
                places.find(|place| Path::new(place).exists()).map(Into::into)
            }
            false => None,
        };
        overrides.extend(value.map(|value| (option.key.to_owned(), value)));
    }
    Ok(Some(config.with(overrides)?))
}

/// Whether a run of these settings needs the weights that it began with.
fn trains_in_part(config: &Config) -> bool {
    config.lora_rank > 0 || config.freeze.is_some()
}

/// The settings with the model of the weights that `init-from` names, a checkpoint, a Hugging Face
/// folder or a GGUF file, where `model` is not among the keys that were `given`. Of its settings
/// those that were given stay. Weights of which nothing there says what model they are of change
/// nothing.
///
/// # Errors
/// A description that cannot be read.
pub fn with_model_of_weights(config: Config, given: &BTreeSet<String>) -> Result<Config, Error> {
    let Some(path) = config.init_from.as_ref().filter(|_| !given.contains("model")) else {
        return Ok(config);
    };
    let Some(theirs) = described(path)? else { return Ok(config) };
    let mut overrides = Table::new();
    for key in OF_WEIGHTS.into_iter().chain(["seq"]) {
        let from = if given.contains(key) { &config } else { &theirs };
        overrides.extend(from.get(key).map(|value| (key.to_owned(), value)));
    }
    Ok(config.with(overrides)?)
}

/// The settings of the model at `path`, if anything there says them.
fn described(path: &Path) -> Result<Option<Config>, Error> {
    is_described(path)?.then(|| config_of(path)).transpose()
}

/// Why the weights at `path` do not fit the model of `vocabulary` ids that the settings make: the
/// first setting that says otherwise than what lies there.
pub(crate) fn contradiction(config: &Config, path: &Path, vocabulary: usize) -> Option<Error> {
    let theirs = described(path).ok()??;
    let own = config.decoder(vocabulary).ok()?;
    let theirs = theirs.decoder(theirs.vocab?).ok()?;
    let sizes = |d: &Decoder| {
        [
            ("layers", d.layers),
            ("hidden", d.hidden),
            ("heads", d.heads),
            ("kv-heads", d.kv_heads),
            ("head-dim", d.head_dim),
            ("intermediate", d.intermediate),
            ("experts", d.moe.map_or(0, |moe| moe.experts)),
            ("experts-per-token", d.moe.map_or(0, |moe| moe.chosen)),
            ("vocab", d.vocabulary),
        ]
    };
    let both = sizes(&own).into_iter().zip(sizes(&theirs));
    let size = both.into_iter().find(|(now, was)| now != was);
    let size = size.map(|((key, now), (_, was))| (key, now.to_string(), was.to_string()));
    let tied =
        (own.tied != theirs.tied).then(|| ("tied", own.tied.to_string(), theirs.tied.to_string()));
    let (key, now, was) = size.or(tied)?;
    let problem = format!("was {was} where the weights of init-from = {} lie", path.display());
    let help = format!("leave {key} and model out, or begin with other weights");
    Some(ConfigError::value(key, now, problem, help).into())
}

/// Says what of the model is otherwise than where its weights lie, though these fit: positions that
/// turn otherwise, a window, the norms' eps.
pub(crate) fn warn_of_differences(config: &Config, path: &Path, vocabulary: usize) {
    let theirs = match described(path) {
        Ok(Some(theirs)) => theirs,
        Ok(None) => return,
        Err(error) => {
            let model = &config.model;
            warn!("init-from: {error}; the weights are taken for those of model = {model}");
            return;
        }
    };
    let fields = |config: &Config| {
        let decoder = config.decoder(vocabulary).ok()?;
        // How long texts may be is not the weights'.
        config_json(&Decoder { vocabulary_multiple: 1, context: 1, ..decoder })
    };
    let (Some(own), Some(theirs)) = (fields(config), fields(&theirs)) else { return };
    for (key, now) in own.iter().filter(|(key, now)| theirs.get(*key) != Some(now)) {
        let was = theirs.get(key).map_or("nothing".to_owned(), |was| was.to_string());
        warn!("{key} = {now}, was {was} where the weights of init-from = {} lie", path.display());
    }
}
