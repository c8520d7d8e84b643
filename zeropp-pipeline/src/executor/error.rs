//! Why an action could not be done.

use std::io;

use zeropp_comm::CommError;
use zeropp_core::data::DataError;

/// The faults of a step.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// Something between ranks.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// Tokens that the model cannot be given, as an id that it has no row for.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Activations that could not be copied out, or in again.
    #[error(
        "activations cannot be copied out of memory and back ({0}); give recompute:out a folder \
         with more room"
    )]
    Copy(#[from] io::Error),
    /// A layer whose output is not what the next one takes.
    #[error(
        "layer {layer} gives {found:?}, and {expected:?} is what follows it takes: [samples, \
         tokens, hidden] of a layer, [1] of a head; give that"
    )]
    Shape {
        /// Its name.
        layer: String,
        /// Shape of its output.
        found: Vec<usize>,
        /// The one that is asked for.
        expected: Vec<usize>,
    },
}

impl StepError {
    /// The fault between ranks, if that is what it was.
    pub fn between_ranks(&self) -> Option<&CommError> {
        match self {
            StepError::Comm(error) => Some(error),
            StepError::Data(_) | StepError::Copy(_) | StepError::Shape { .. } => None,
        }
    }
}
