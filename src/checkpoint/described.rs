//! The settings of a model by its weights: a checkpoint's own, those of a Hugging Face folder or of
//! a GGUF file; and where else something lies that belongs to the model.

use std::path::{Path, PathBuf};

use toml::Table;

use zeropp_checkpoint::checkpoint_at;
use zeropp_core::data::Dataset;
use zeropp_zero3::checkpoint::Manifest;

use crate::Error;
use crate::checkpoint::identity;
use crate::config::{Config, ConfigError, OPTIONS, is_gguf};

/// The settings of the model whose weights lie at `path`, a checkpoint, a folder of them (for the
/// newest), a Hugging Face folder or a GGUF file, with `init-from` naming them; everything else has
/// its default.
///
/// # Errors
/// A path where no model lies, or one that cannot be read.
pub fn config_of(path: &Path) -> Result<Config, Error> {
    let config = if let Some(checkpoint) = checkpoint_at(path)? {
        config_then(path, checkpoint.manifest())?
    } else if path.join("config.json").is_file() {
        // With a slash it is a path, whatever its name.
        with_model(Table::new(), path.join("config.json").display().to_string())?
    } else if is_gguf(path) && path.is_file() {
        with_model(Table::new(), path.display().to_string())?
    } else {
        let problem = "is no checkpoint, no folder with a config.json and no GGUF file";
        let help = "name a checkpoint, a folder of them, a Hugging Face folder or a .gguf file";
        return Err(ConfigError::value("weights", path.display(), problem, help).into());
    };
    Ok(Config { init_from: Some(path.to_path_buf()), ..config })
}

/// How the run whose checkpoint lies at `path` split its data, where it did and `data` is that.
///
/// # Errors
/// A checkpoint that cannot be read.
pub fn split_of(path: &Path, data: &Dataset) -> Result<Option<String>, Error> {
    let Some(checkpoint) = checkpoint_at(path)? else { return Ok(None) };
    let manifest = checkpoint.manifest();
    let is_its = manifest.data.as_ref() == Some(data.fingerprint());
    Ok(identity::typed(&manifest.settings, "split").filter(|_| is_its).map(str::to_owned))
}

/// Whether a model lies at `path` that is no checkpoint: a Hugging Face folder, or a file such as a
/// GGUF file.
pub fn is_model(path: &Path) -> bool {
    path.is_file() || path.join("config.json").is_file()
}

/// Whether what lies at `path` says of which model its weights are: a checkpoint, a Hugging Face
/// folder or a GGUF file.
///
/// # Errors
/// A checkpoint that cannot be read.
pub(crate) fn is_described(path: &Path) -> Result<bool, Error> {
    let is_folder = path.join("config.json").is_file();
    Ok(is_folder || is_gguf(path) && path.is_file() || checkpoint_at(path)?.is_some())
}

fn with_model(mut settings: Table, model: String) -> Result<Config, ConfigError> {
    settings.insert("model".into(), model.into());
    Config::default().with(settings)
}

/// The settings that the checkpoint at `path` was trained with. A file that its model is described
/// by may have moved with it, or stayed where it was.
pub(crate) fn config_then(path: &Path, manifest: &Manifest) -> Result<Config, ConfigError> {
    let kept = &manifest.settings;
    let mut settings = Table::new();
    for option in OPTIONS.iter().filter(|option| option.of_model) {
        let Some(text) = identity::typed(kept, option.key) else { continue };
        let value = option.kind.parse(text).map_err(|problem| {
            let problem =
                format!("it is a setting of the checkpoint {}: {problem}", path.display());
            ConfigError::value(option.key, text, problem, "use the build that wrote it")
        })?;
        settings.insert(option.key.into(), value);
    }
    if let Some(tokens) = kept.get(identity::TOKENS) {
        settings.insert("tokenizer".into(), tokens.as_str().into());
    }
    let found = |model: String| {
        let config = with_model(settings.clone(), model)?;
        let (then, now) = (kept.get(identity::MODEL_DIGEST), identity::digest(&config));
        if then.is_some() && now.is_some() && now.as_ref() != then {
            let path = path.display();
            let problem =
                format!("describes another model than the one that {path} has the weights of");
            return Err(ConfigError::value("model", &config.model, problem, "restore it"));
        }
        Ok(config)
    };
    let mut tried = identity::places(kept, "model").into_iter().map(found);
    // A checkpoint without the setting is of the default model.
    let first = tried.next().unwrap_or_else(|| Config::default().with(settings.clone()));
    let config = first.or_else(|error| tried.find_map(Result::ok).ok_or(error))?;
    Ok(Config { vocab: Some(manifest.vocabulary), ..config })
}

/// Where files may lie that belong to the model at `path`, such as its tokenizer, the likeliest
/// first: there, where the run of a checkpoint took weights to begin with, what `model` of its
/// settings `config` names, and beside a GGUF file.
pub fn belongings_of(path: &Path, config: &Config) -> Vec<PathBuf> {
    // The reader of the checkpoint reports damage.
    let run = checkpoint_at(path).ok().flatten();
    let began = run.map(|run| identity::places(&run.manifest().settings, "init-from"));
    let began = began.into_iter().flatten().map(PathBuf::from);
    let named = std::iter::once(path.to_path_buf()).chain(began).chain(config.model_place());
    let mut places: Vec<PathBuf> = named.collect();
    let files = places.iter().filter(|place| is_gguf(place));
    let folders: Vec<_> = files.filter_map(|file| Some(file.parent()?.to_path_buf())).collect();
    places.extend(folders);
    places
}
