//! The settings of a model by its weights: a checkpoint's own, those of a Hugging Face folder or of
//! a GGUF file; and where else something lies that belongs to the model.

use std::path::{Path, PathBuf};

use toml::Table;

use zeropp_checkpoint::checkpoint_at;

use crate::Error;
use crate::checkpoint::{MODEL_DIGEST, model_digest};
use crate::config::{Config, ConfigError, OPTIONS, is_gguf};

/// The settings of the model whose weights lie at `path`, a checkpoint, a folder of them (for the
/// newest), a Hugging Face folder or a GGUF file, with `init-from` naming them; everything else has
/// its default.
///
/// # Errors
/// A path where no model lies, or one that cannot be read.
pub fn config_of(path: &Path) -> Result<Config, Error> {
    let mut settings = Table::new();
    let vocab;
    let mut then = None;
    if let Some(checkpoint) = checkpoint_at(path)? {
        let manifest = checkpoint.manifest();
        for option in OPTIONS.iter().filter(|option| option.of_model) {
            // Earlier builds kept text with its quotes.
            let text = manifest.settings.get(option.key).map(|text| text.trim_matches('"'));
            if let Some(value) = text.and_then(|text| option.kind.parse(text).ok()) {
                settings.insert(option.key.into(), value);
            }
        }
        vocab = Some(manifest.vocabulary);
        then = manifest.settings.get(MODEL_DIGEST).cloned();
    } else if path.join("config.json").is_file() {
        // With a slash it is a path, whatever its name.
        settings.insert("model".into(), path.join("config.json").display().to_string().into());
        vocab = None;
    } else if is_gguf(path) && path.is_file() {
        settings.insert("model".into(), path.display().to_string().into());
        vocab = None;
    } else {
        let problem = "is no checkpoint, no folder with a config.json and no GGUF file";
        let help = "name a checkpoint, a folder of them, a Hugging Face folder or a .gguf file";
        return Err(ConfigError::value("weights", path.display(), problem, help).into());
    }
    let config = Config::default().with(settings)?;
    let now = then.as_ref().and_then(|_| model_digest(&config));
    if now.is_some() && now != then {
        let problem = format!(
            "describes another model than the one that {} has the weights of",
            path.display()
        );
        return Err(ConfigError::value("model", &config.model, problem, "restore it").into());
    }
    Ok(Config { vocab: vocab.or(config.vocab), init_from: Some(path.to_path_buf()), ..config })
}

/// Where files may lie that belong to the model at `path`, such as its tokenizer, the likeliest
/// first: there, where the run of a checkpoint took weights to begin with, what `model` of its
/// settings `config` names, and beside a GGUF file.
pub fn belongings_of(path: &Path, config: &Config) -> Vec<PathBuf> {
    // Who reads the checkpoint tells of damage.
    let run = checkpoint_at(path).ok().flatten();
    let began = run.and_then(|run| run.manifest().settings.get("init-from").map(PathBuf::from));
    let named = [Some(path.to_path_buf()), began, config.model_place()];
    let mut places: Vec<PathBuf> = named.into_iter().flatten().collect();
    let files = places.iter().filter(|place| is_gguf(place));
    let folders: Vec<_> = files.filter_map(|file| Some(file.parent()?.to_path_buf())).collect();
    places.extend(folders);
    places
}
