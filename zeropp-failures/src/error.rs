//! Errors between ranks.

use serde::{Deserialize, Serialize};

/// An error between ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
pub enum CommError {
    /// Some ranks did not take part in time.
    #[error("{group}: {operation} #{sequence} timed out after {after_s} s; {}", late(missing))]
    Timeout {
        /// Name of the group.
        group: String,
        /// The operation that was waited for.
        operation: String,
        /// Its number in the group's sequence (for a receive: its tag).
        sequence: u64,
        /// Seconds waited.
        after_s: f64,
        /// World ranks that did not arrive.
        missing: Vec<usize>,
    },
    /// Ranks of a group called different operations, types or lengths.
    #[error(
        "{group}: rank {rank} called {mine} as operation #{sequence}, but rank {peer} called \
         {theirs}"
    )]
    Mismatch {
        /// Name of the group.
        group: String,
        /// Number in the group's sequence.
        sequence: u64,
        /// World rank that saw the difference.
        rank: usize,
        /// Its operation, type and length.
        mine: String,
        /// World rank it differs from.
        peer: usize,
        /// The other rank's operation, type and length.
        theirs: String,
    },
    /// A rank ended the run.
    #[error("aborted by rank {rank}: {reason}")]
    Aborted {
        /// World rank that failed first.
        rank: usize,
        /// Its message.
        reason: String,
    },
    /// A rank is gone.
    #[error("{group}: lost rank {rank} during {operation}")]
    PeerLost {
        /// Name of the group.
        group: String,
        /// World rank that is gone.
        rank: usize,
        /// The operation under way.
        operation: String,
    },
    /// A call that no group could carry out.
    #[error("{group}: rank {rank} called {operation} with {problem}")]
    Invalid {
        /// Name of the group.
        group: String,
        /// World rank that called.
        rank: usize,
        /// The operation.
        operation: String,
        /// The argument, its value, and what would work.
        problem: String,
    },
    /// The engine cannot be used here.
    #[error("engine {engine} is not available: {reason}")]
    Unavailable {
        /// `mpi` or `nccl`.
        engine: String,
        /// The device or library that was looked for, and where.
        reason: String,
    },
    /// An error code of the engine's library.
    #[error("{engine} error {code} in {operation}: {text}")]
    Backend {
        /// `threads`, `mpi` or `nccl`.
        engine: String,
        /// The operation that failed.
        operation: String,
        /// The library's code.
        code: i64,
        /// The library's text.
        text: String,
    },
}

/// Ranks that have not arrived, in words: they may compute, and so are not missing.
fn late(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
    match ranks {
        [] => "who has not arrived is not known".into(),
        [rank] => format!("rank {rank} has not arrived"),
        _ => format!("ranks {} have not arrived", numbers.join(", ")),
    }
}

impl CommError {
    /// Whether another rank's failure caused this one: it names no other culprit.
    pub fn is_echo(&self) -> bool {
        matches!(self, CommError::Aborted { .. })
    }

    /// The error that `rank` ends with where `first` failed the world with this one.
    pub fn as_seen_by(&self, rank: usize, first: usize) -> CommError {
        match self {
            // What only the rank that saw it can say in the first person.
            CommError::Timeout { .. } | CommError::Invalid { .. } if first != rank => {
                CommError::Aborted { rank: first, reason: self.to_string() }
            }
            _ => self.clone(),
        }
    }
}

/// Result of an operation between ranks.
pub type CommResult<T> = Result<T, CommError>;
