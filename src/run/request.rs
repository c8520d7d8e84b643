//! Requests of the program to all ranks between two steps: weights, or a validation loss.

use crate::run::stop::StopRequest;

/// Answer of rank 0's process to a step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StepAnswer {
    /// The wish for the next step.
    Follows(StopRequest),
    /// Something first; another answer comes after it.
    First(StepRequest),
}

/// Something that all ranks do together at the end of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepRequest {
    /// To bring the weights to rank 0.
    Weights,
    /// To measure the validation loss.
    Evaluation,
}

/// First byte of a message that is no request.
pub(crate) const NO_REQUEST: u8 = 0;

impl StepRequest {
    /// As the first byte of a message.
    pub(crate) fn to_byte(self) -> u8 {
        match self {
            StepRequest::Weights => 1,
            StepRequest::Evaluation => 2,
        }
    }

    /// Reads what [`to_byte`](Self::to_byte) gave; none where no request comes first.
    pub(crate) fn from_byte(byte: u8) -> Option<StepRequest> {
        [StepRequest::Weights, StepRequest::Evaluation].into_iter().find(|r| r.to_byte() == byte)
    }
}
