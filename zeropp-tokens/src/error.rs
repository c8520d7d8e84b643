//! The errors of text, tokenizers and their output.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// A file that cannot be used, and what would work.
#[derive(Debug, Error)]
#[error("{}: {problem}; {help}", path.display())]
pub struct TokensError {
    /// The file or folder.
    pub path: PathBuf,
    /// The problem with it.
    pub problem: String,
    /// Advice: what would work.
    pub help: String,
}

pub(crate) type Checked<T> = Result<T, TokensError>;

/// An error of the file `path`.
pub(crate) fn wrong(
    path: &Path,
    problem: impl Into<String>,
    help: impl Into<String>,
) -> TokensError {
    TokensError { path: path.into(), problem: problem.into(), help: help.into() }
}

/// The system's refusal to read `path`.
pub(crate) fn unreadable(path: &Path) -> impl FnOnce(io::Error) -> TokensError {
    move |e| wrong(path, format!("cannot be read ({e})"), "name a file or folder you may read")
}

/// The system's refusal to write `path`.
pub(crate) fn unwritable(path: &Path) -> impl FnOnce(io::Error) -> TokensError {
    move |e| wrong(path, format!("cannot be written ({e})"), "name a file you may write")
}
