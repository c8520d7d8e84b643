//! Several sources of data with their weights, and the split of each.

use std::path::{Path, PathBuf};

use super::validate::{VOCAB_MAX, check, number};
use super::{Config, ConfigError};

impl Config {
    /// The sources of `data-mix`, with their weights; none where that is not given.
    ///
    /// # Errors
    /// A part that is no `PATH=WEIGHT`.
    pub fn sources(&self) -> Result<Vec<(PathBuf, f64)>, ConfigError> {
        let Some(mix) = &self.data_mix else { return Ok(Vec::new()) };
        let source = |part: &str| {
            let pair = part.rsplit_once('=').filter(|(path, _)| !path.is_empty());
            let weight = |text: &str| text.trim().parse().ok().filter(|w: &f64| w.is_finite());
            let parsed = pair.and_then(|(path, text)| Some((path, weight(text)?)));
            match parsed.filter(|(_, weight)| *weight > 0.0) {
                Some((path, weight)) => Ok((PathBuf::from(path), weight)),
                None => {
                    let problem = format!("{part:?} is not a path with a weight above 0");
                    let help = "write each source as PATH=WEIGHT, such as a.bin=0.7,b.bin=0.3";
                    Err(ConfigError::value("data-mix", mix, problem, help))
                }
            }
        };
        mix.split(',').map(source).collect()
    }

    /// The same text with the paths of its sources changed.
    pub(super) fn mix_with(mix: &str, change: impl Fn(&str) -> String) -> String {
        let source = |part: &str| match part.rsplit_once('=') {
            Some((path, weight)) => format!("{}={weight}", change(path)),
            None => part.to_owned(),
        };
        mix.split(',').map(source).collect::<Vec<_>>().join(",")
    }

    /// Shares of each source to train on and to validate on; none where all is trained on.
    ///
    /// # Errors
    /// Text that is not two whole numbers, the first at least 1.
    pub(super) fn split_shares(&self) -> Result<Option<(u64, u64)>, ConfigError> {
        let Some(text) = &self.split else { return Ok(None) };
        let share = |text: &str| text.trim().parse::<u32>().ok().map(u64::from);
        let shares = text.split_once(',').and_then(|(a, b)| Some((share(a)?, share(b)?)));
        match shares.filter(|(training, _)| *training > 0) {
            Some(shares) => Ok(Some(shares)),
            None => {
                let problem = "is not two shares, of training and of validation";
                Err(ConfigError::value("split", text, problem, "use whole numbers, such as 98,2"))
            }
        }
    }

    /// Settings of the validation loss that come to nothing by themselves.
    fn check_validation(&self) -> Result<(), ConfigError> {
        let kept = self.split_shares()?.is_some_and(|(_, validation)| validation > 0);
        if let Some(path) = &self.eval_data {
            let refused = |problem: &str, help: &str| {
                Err(ConfigError::value("eval-data", path.display(), problem, help))
            };
            if self.eval_every == 0 {
                let help = "say how often with eval-every, such as 100, or leave it out";
                return refused("eval-every is 0: nothing would be measured on it", help);
            }
            if kept {
                return refused("split also keeps data for validation", "leave one of them out");
            }
        }
        check(!self.keep_best || self.eval_every > 0, || {
            let problem = "eval-every is 0: there is no validation loss to be the lowest";
            ConfigError::value("keep-best", true, problem, "give eval-every, or leave it out")
        })?;
        check(self.patience == 0 || self.eval_every > 0, || {
            let problem = "eval-every is 0: there is no validation loss to wait for";
            let help = "set eval-every, or leave it out";
            ConfigError::value("patience", self.patience, problem, help)
        })?;
        check(!self.keep_best || self.save.is_some(), || {
            let help = "name a folder with save, or leave it out";
            ConfigError::value("keep-best", true, "save has no folder", help)
        })
    }

    /// Checks the settings of the texts that a model writes while it is trained.
    fn check_samples(&self) -> Result<(), ConfigError> {
        let n = self.sample_every;
        let temperature = self.sample_temperature;
        number("sample-temperature", temperature, temperature >= 0.0, "0 or more, such as 0.8")?;
        match &self.prompt {
            Some(prompt) if prompt.is_empty() => {
                let help = "give a word to go on from";
                Err(ConfigError::value("prompt", "\"\"", "the text is empty", help))
            }
            Some(prompt) if n == 0 => {
                let help = "set sample-every, or leave it out";
                Err(ConfigError::value("prompt", prompt, "sample-every is 0", help))
            }
            _ if n == 0 => Ok(()),
            None => {
                let problem = "there is no text to go on from";
                Err(ConfigError::value("sample-every", n, problem, "give it with prompt"))
            }
            Some(_) => Ok(()),
        }
    }

    /// Checks the settings that hide documents.
    fn check_masks(&self) -> Result<(), ConfigError> {
        let Some(id) = self.document_end else { return Ok(()) };
        check(self.document_mask, || {
            let problem = "document-mask is false: nothing is kept apart";
            let help = "set document-mask, or leave it out";
            ConfigError::value("document-end", id, problem, help)
        })?;
        check(id < VOCAB_MAX, || {
            let help = format!("use 0 to {}", VOCAB_MAX - 1);
            ConfigError::value("document-end", id, "is too large for a token id", help)
        })
    }

    pub(super) fn check_sources(&self) -> Result<(), ConfigError> {
        self.check_masks()?;
        self.split_shares()?;
        self.check_validation()?;
        self.check_samples()?;
        let sources = self.sources()?;
        check(sources.is_empty() || self.data.is_none(), || {
            let data = self.data.as_deref().unwrap_or(Path::new("")).display();
            let problem = "data-mix also names the data";
            ConfigError::value("data", data, problem, "leave one of them out")
        })
    }
}
