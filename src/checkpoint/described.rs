//! The settings of a model by its weights: a checkpoint's own, or a Hugging Face folder's.

use std::path::Path;

use toml::Table;

use crate::Error;
use crate::checkpoint::located::checkpoint_at;
use crate::config::{Config, ConfigError, OPTIONS};

/// The settings of the model whose weights lie at `path`, a checkpoint, a folder of them (for the
/// newest) or a Hugging Face folder, with `init-from` naming them; everything else has its default.
///
/// # Errors
/// A path where no model lies, or one that cannot be read.
pub fn config_of(path: &Path) -> Result<Config, Error> {
    let mut settings = Table::new();
    let vocab;
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
    } else if path.join("config.json").is_file() {
        // With a slash it is a path, whatever its name.
        settings.insert("model".into(), path.join("config.json").display().to_string().into());
        vocab = None;
    } else {
        let problem = "is neither a checkpoint nor a folder with a config.json";
        let help = "name a checkpoint, a folder of them, or a Hugging Face folder";
        return Err(ConfigError::value("weights", path.display(), problem, help).into());
    }
    let config = Config::default().with(settings)?;
    Ok(Config { vocab: vocab.or(config.vocab), init_from: Some(path.to_path_buf()), ..config })
}
