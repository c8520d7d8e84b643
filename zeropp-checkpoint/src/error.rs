//! The errors of a checkpoint or its folder.

use std::io;
use std::path::{Path, PathBuf};

/// Why a checkpoint was not read or written.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// There is nothing to go on from.
    #[error(
        "save = {}: no complete checkpoint to resume from{passed_over}; start without resume, or \
         name another folder",
        folder.display()
    )]
    NotFound {
        /// The folder that was searched.
        folder: PathBuf,
        /// Incomplete ones that were passed over, in words; empty if there were none.
        passed_over: String,
    },
    /// The folder belongs to another run, or cannot be used.
    #[error("save = {}: {problem}", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The problem, and what would work.
        problem: String,
    },
    /// The folder is not the one any more that this run took for its own.
    #[error(
        "save = {}: the folder was removed or replaced while this run saves there, so nothing \
         more is written to it; put it back, or name another one, and start the run again with \
         resume",
        folder.display()
    )]
    Replaced {
        /// The folder.
        folder: PathBuf,
    },
    /// A file is not what was written.
    #[error("checkpoint file {} is damaged: {problem}; {help}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The problem in it.
        problem: String,
        /// Advice: what would work.
        help: String,
    },
    /// The checkpoint is whole, but of another model or run.
    #[error("{problem} (checkpoint {})", path.display())]
    Mismatch {
        /// The checkpoint's folder.
        path: PathBuf,
        /// Both sides, and what would work.
        problem: String,
    },
    /// A checkpoint that was to be written and is not.
    #[error("the checkpoint of step {step} is not written: {problem}")]
    NotWritten {
        /// The step it was to follow.
        step: u64,
        /// Why, with the file.
        problem: String,
    },
    /// The file system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// `read`, `write`, …
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Result of an operation on checkpoints.
pub type Checked<T> = Result<T, CheckpointError>;

/// For `map_err`: the file system's error while doing `action` to `path`.
pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    move |source| CheckpointError::Io { action, path: path.to_path_buf(), source }
}

/// For `map_err`: a file of a checkpoint cannot be read, which is as bad as a wrong byte in it.
pub(crate) fn unreadable(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    move |e| damaged(path, format!("it cannot be read ({e})"))
}

pub(crate) fn damaged(path: &Path, problem: impl Into<String>) -> CheckpointError {
    CheckpointError::Damaged {
        path: path.to_path_buf(),
        problem: problem.into(),
        help: "restore it, or name another checkpoint".into(),
    }
}
