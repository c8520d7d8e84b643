//! The errors of a configuration.

use std::path::PathBuf;

use thiserror::Error;
use zeropp_core::field_error::FieldError;

use super::options::OPTIONS;

/// Bad input, found before any rank starts.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// A setting cannot be what it is.
    #[error(transparent)]
    Value(#[from] FieldError),
    /// The file has a key that no setting has.
    #[error("line {line}: unknown key `{key}`; {help}")]
    UnknownKey {
        /// The key.
        key: String,
        /// Line of the file, from 1.
        line: usize,
        /// The nearest key, or where to find them all.
        help: String,
    },
    /// The file is not TOML, or a value has another type than its setting.
    #[error("{0}")]
    Toml(String),
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// An error in a file that is known by name.
    #[error("{}: {error}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// The problem in it.
        error: Box<ConfigError>,
    },
}

impl ConfigError {
    /// A setting that cannot be what it is. A value of another setting is named behind that one.
    pub fn value(
        field: &str,
        value: impl ToString,
        problem: impl Into<String>,
        help: impl Into<String>,
    ) -> Self {
        let option = OPTIONS.iter().find(|option| option.key == field);
        let shown = option.and_then(|option| option.part_of).unwrap_or(field);
        FieldError::new(shown, value, problem, help).into()
    }
}
