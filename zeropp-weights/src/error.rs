//! The errors of files of weights.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// A file or folder of weights that cannot be used, and what would work.
#[derive(Debug, Error)]
#[error("{}: {problem}; {help}", path.display())]
pub struct WeightsError {
    /// The file or folder.
    pub path: PathBuf,
    /// The problem with it.
    pub problem: String,
    /// Advice: what would work.
    pub help: String,
}

/// The most characters of a problem: names and values of files stand in it.
const PROBLEM_MAX: usize = 400;

fn beginning(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text.into(),
        Some((end, _)) => format!("{} … ({} bytes)", &text[..end], text.len()),
    }
}

pub(crate) type Checked<T> = Result<T, WeightsError>;

/// An error of the file `path`.
pub(crate) fn wrong(
    path: &Path,
    problem: impl Into<String>,
    help: impl Into<String>,
) -> WeightsError {
    let problem = beginning(&problem.into(), PROBLEM_MAX);
    WeightsError { path: path.into(), problem, help: help.into() }
}

/// A file that is not what its writer left.
pub(crate) fn damaged(path: &Path, problem: impl Into<String>) -> WeightsError {
    wrong(path, problem, "it is damaged or truncated; get it again")
}

/// The system's refusal to read `path`.
pub(crate) fn unreadable(path: &Path) -> impl FnOnce(io::Error) -> WeightsError {
    move |e| wrong(path, format!("cannot be read ({e})"), "name a file or folder you may read")
}

/// The system's refusal to write `path`.
pub(crate) fn unwritable(path: &Path) -> impl FnOnce(io::Error) -> WeightsError {
    move |e| wrong(path, format!("cannot be written ({e})"), "name a folder you may write to")
}
