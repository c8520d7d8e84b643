//! The errors of a configuration.

use std::path::PathBuf;

use thiserror::Error;
use zeropp_core::field_error::FieldError;

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
    /// A setting that cannot be what it is.
    pub fn value(
        field: &str,
        value: impl ToString,
        problem: impl Into<String>,
        help: impl Into<String>,
    ) -> Self {
        FieldError::new(field, value, problem, help).into()
    }
}
