//! Groups of ranks that exchange buffers without blocking, and the engines behind them.
//!
//! The trainer sees [`Communicator`] only. Every call returns at once with a [`Pending`]; buffers
//! move in, results come out of it. All ranks of a group issue the same sequence of collectives,
//! which the engine checks by signature. Sums run in rank order in `f32`, so every engine gives
//! the same bits. The first error is final for the whole world: nothing is retried.

mod buffers;
mod checks;
mod codec;
pub mod flight;
pub mod groups;
pub mod hybrid;
mod kernels;
pub mod launch;
pub mod mesh;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod nccl;
pub mod placement;
mod progress;
pub mod recorded;
pub mod rendezvous;
mod signature;
mod slot;
mod stats;
mod subgroup;
pub mod threads;

use std::sync::Arc;
use std::time::{Duration, Instant};

pub use signature::Operation;
pub use stats::{CommStats, OpCount};

use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

/// What goes wrong between ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
pub enum CommError {
    /// Some ranks did not take part in time.
    #[error(
        "{group}: {operation} #{sequence} timed out after {after_s} s; missing ranks {missing:?}"
    )]
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
        "{group}: rank {rank} called {mine} as operation #{sequence}, but rank {peer} called {theirs}"
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
        /// What it said.
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
        /// What was looked for, and where.
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

impl CommError {
    /// The error that `rank` ends with where `first` failed the world with this one.
    fn as_seen_by(&self, rank: usize, first: usize) -> CommError {
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

/// The engine's side of a [`Pending`].
pub trait InFlight<T>: Send {
    /// Whether `wait` would return at once (with a result or an error).
    fn is_done(&mut self) -> bool;
    /// Blocks until the result is there, the operation fails, or it times out.
    fn wait(self: Box<Self>) -> CommResult<T>;
    /// Blocks until `is_done`, or `deadline`; returns `is_done`. Fails nothing.
    fn wait_until(&mut self, deadline: Instant) -> bool {
        while !self.is_done() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(POLL_PAUSE);
        }
        true
    }
    /// World ranks that have not taken part so far, as far as the engine can find out in a few
    /// seconds. For engines that are built on another one, which has no time limits of its own.
    fn missing(&mut self) -> Vec<usize> {
        Vec::new()
    }
}

/// Between two looks at an operation of an engine that has nothing better than looking.
const POLL_PAUSE: Duration = Duration::from_micros(200);

/// An operation under way. Dropping it detaches: the engine keeps the buffers until it is done.
#[must_use = "an operation is complete only once it has been waited for"]
pub struct Pending<T>(State<T>);

enum State<T> {
    Ready(CommResult<T>),
    InFlight(Box<dyn InFlight<T>>),
}

impl<T> Pending<T> {
    /// An operation that is already complete, or failed.
    pub fn ready(result: CommResult<T>) -> Self {
        Self(State::Ready(result))
    }

    /// An operation the engine is working on.
    pub fn in_flight(op: Box<dyn InFlight<T>>) -> Self {
        Self(State::InFlight(op))
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_done(&mut self) -> bool {
        match &mut self.0 {
            State::Ready(_) => true,
            State::InFlight(op) => op.is_done(),
        }
    }

    /// Blocks until [`is_done`](Self::is_done), or `deadline`; returns `is_done`. Fails nothing.
    pub fn wait_until(&mut self, deadline: Instant) -> bool {
        match &mut self.0 {
            State::Ready(_) => true,
            State::InFlight(op) => op.wait_until(deadline),
        }
    }

    /// World ranks that have not taken part so far, as far as the engine can find out.
    pub fn missing(&mut self) -> Vec<usize> {
        match &mut self.0 {
            State::Ready(_) => Vec::new(),
            State::InFlight(op) => op.missing(),
        }
    }

    /// Blocks until the operation is complete.
    ///
    /// # Errors
    /// The operation's error, or the world's first one.
    pub fn wait(self) -> CommResult<T> {
        match self.0 {
            State::Ready(result) => result,
            State::InFlight(op) => op.wait(),
        }
    }
}

/// A group of ranks.
///
/// Buffers are flat plain tensors (`f32` or `bf16`) on the rank's device. Once a collective has
/// been waited for, the engine holds no reference to the buffer that this rank passed in, so a
/// clone that the rank kept can be written in place. Results may be shared with other ranks or
/// with the engine: writing to one copies it. Off the CPU nothing copies by itself: there what an
/// all-gather gives is only to be read, and a rank that kept a clone of what it passed in may let
/// an operation write to it once it has used the result ([`zeropp_core::device::hand_over`] says why).
/// `rank` and `size` are within the group; errors name world ranks.
pub trait Communicator: Send + Sync {
    /// Name for messages: `world`, `zero3[0]`, …
    fn name(&self) -> &str;
    /// This rank's place in the group.
    fn rank(&self) -> usize;
    /// Ranks in the group.
    fn size(&self) -> usize;

    /// Concatenates every rank's `shard` (equal lengths) in rank order: `[n]` to `[size * n]`.
    /// Ranks of one process may be handed views of one shared buffer.
    fn all_gather(&self, shard: Tensor<1>) -> Pending<Tensor<1>>;
    /// Sums the ranks' buffers in rank order in `f32` and keeps this rank's part: `[size * n]` to `[n]`.
    fn reduce_scatter(&self, full: Tensor<1>) -> Pending<Tensor<1>>;
    /// Sums the ranks' buffers in rank order in `f32`: `[n]` to `[n]`.
    fn all_reduce(&self, buffer: Tensor<1>) -> Pending<Tensor<1>>;
    /// Every rank gets `root`'s buffer; the others pass one of the same length and type.
    fn broadcast(&self, root: usize, buffer: Tensor<1>) -> Pending<Tensor<1>>;
    /// Every rank gets every rank's bytes, in rank order. For small things: norms, flags, names.
    fn exchange(&self, bytes: Vec<u8>) -> Pending<Vec<Vec<u8>>>;

    /// Sends to rank `to` of the group; matches its receive with the same tag, in order.
    fn send(&self, to: usize, tag: u64, buffer: Tensor<1>) -> Pending<()>;
    /// Receives `len` elements of `dtype` from rank `from` of the group.
    fn recv(&self, from: usize, tag: u64, len: usize, dtype: DType) -> Pending<Tensor<1>>;

    /// Blocks until all ranks of the group are here.
    ///
    /// # Errors
    /// A timeout, or the world's first error.
    fn barrier(&self) -> CommResult<()>;
    /// Makes a sub-group of the ranks that give one `color`, ordered by `key`. All ranks of this
    /// group call it, in the same order; blocks until they have.
    ///
    /// # Errors
    /// A timeout, or the world's first error.
    fn split(&self, name: &str, color: usize, key: usize) -> CommResult<Arc<dyn Communicator>>;
    /// Ends every operation of the whole world with `Aborted`, now and from now on. Never blocks;
    /// the first reason wins.
    fn abort(&self, reason: &str);
    /// The error that every operation of this rank ends with from now on, once the world has
    /// failed. Never blocks.
    fn failure(&self) -> Option<CommError> {
        None
    }

    /// Operations and bytes of this rank on this communicator so far.
    fn stats(&self) -> CommStats {
        CommStats::default()
    }
}
