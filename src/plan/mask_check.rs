//! Whether data, loss and settings agree on what is hidden of the samples.

use zeropp_core::data::Dataset;

use crate::config::{Config, ConfigError};

/// What a program brings of its own beside the settings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owns {
    /// Samples in place of data.
    pub(crate) samples: bool,
    /// A loss in place of the head's.
    pub(crate) loss: bool,
}

/// Refuses documents that nobody knows the beginnings of, and a loss that knows of no mask.
///
/// # Errors
/// The setting, and what would work.
pub(crate) fn check(config: &Config, data: &Dataset, owns: Owns) -> Result<(), ConfigError> {
    if config.document_mask {
        check_documents(config, data, !owns.samples)?;
    }
    let by_mask = config.loss_mask && !owns.samples && data.has_loss_mask();
    if !owns.loss || !(config.document_mask || by_mask) {
        return Ok(());
    }
    let (field, help) = match config.document_mask {
        true => ("document-mask", "leave it out, or use the loss of the model's head"),
        false => ("loss-mask", "use false, or the loss of the model's head"),
    };
    let problem = "a loss of the program's own is not told which tokens are scored";
    Err(ConfigError::value(field, true, problem, help))
}

/// Refuses documents whose beginnings `data` does not say, of which an index may do so where it is
/// looked at.
///
/// # Errors
/// The setting, and what would work.
pub(crate) fn check_documents(
    config: &Config,
    data: &Dataset,
    by_index: bool,
) -> Result<(), ConfigError> {
    if config.document_end.is_some() || by_index && data.has_documents() {
        return Ok(());
    }
    let problem = format!("{} does not say where documents begin", data.origin());
    let help = "name the token that ends one with document-end, or use a .bin with its .idx";
    Err(ConfigError::value("document-mask", true, problem, help))
}
