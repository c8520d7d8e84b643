//! Whether data, loss and settings agree on what is hidden of the samples.

use zeropp_core::data::Dataset;

use crate::config::{Config, ConfigError};

/// Token ids of text as bytes.
const BYTES: usize = 256;

/// What a program brings of its own beside the settings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owns {
    /// Samples in place of data.
    pub(crate) samples: bool,
    /// A loss in place of the head's.
    pub(crate) loss: bool,
}

/// Refuses documents whose beginnings are not known, and a loss that knows of no mask.
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
    if let Some(id) = config.document_end {
        let ids = if data.is_bytes() { Some(BYTES) } else { config.vocab };
        return match ids.filter(|ids| id >= *ids) {
            None => Ok(()),
            Some(ids) => {
                let problem = format!("no token of {} is that", data.origin());
                let help = format!("use 0 to {}", ids - 1);
                Err(ConfigError::value("document-end", id, problem, help))
            }
        };
    }
    if by_index && data.has_documents() {
        return Ok(());
    }
    let problem = format!("{} does not say where documents begin", data.origin());
    let help = "name the token that ends one with document-mask:end, or use a .bin with its .idx";
    Err(ConfigError::value("document-mask", true, problem, help))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_documents_end_is_a_token_that_the_data_can_have() {
        let data = Dataset::from_bytes(b"text\nof lines".to_vec());
        let ends_in = |id: usize| {
            let config =
                Config { document_mask: true, document_end: Some(id), ..Config::default() };
            check(&config, &data, Owns { samples: false, loss: false })
        };
        ends_in(10).unwrap();
        ends_in(255).unwrap();
        let error = ends_in(999).unwrap_err().to_string();
        assert!(
            error.contains(
                "document-mask:end = 999: no token of bytes in memory is that; use 0 to 255"
            ),
            "{error}"
        );
    }
}
