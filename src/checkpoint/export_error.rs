//! Why a checkpoint is not exported.

use std::path::{Path, PathBuf};

use zeropp_weights::WeightsError;
use zeropp_zero3::checkpoint::CheckpointError;

use crate::Error;
use crate::error::RankError;

/// Reads elements of a parameter from a number on.
pub(crate) type ReadWhole<'a> = dyn FnMut(&str, usize, &mut [f32]) -> Result<(), ExportError> + 'a;

/// Why a checkpoint was not exported.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExportError {
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("{}: {problem}", path.display())]
    Base { path: PathBuf, problem: String },
}

/// Why the weights of the checkpoint at `path` were not read.
pub(crate) fn of_rank(path: &Path, error: &RankError) -> ExportError {
    ExportError::Base { path: path.to_path_buf(), problem: error.to_string() }
}

impl From<ExportError> for Error {
    fn from(error: ExportError) -> Error {
        match error {
            ExportError::Weights(e) => {
                Error::Export { path: e.path, problem: e.problem, help: e.help }
            }
            ExportError::Checkpoint(e) => e.into(),
            ExportError::Base { path, problem } => {
                Error::Export { path, problem, help: "restore it, or name another".into() }
            }
        }
    }
}
