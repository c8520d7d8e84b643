//! Groups of ranks that exchange buffers without blocking, and the engines behind them.
//!
//! The trainer sees [`Communicator`] only. Every call returns at once with a [`Pending`]; buffers
//! move in, results come out of it. All ranks of a group issue the same sequence of collectives,
//! which the engine checks by signature. Sums run in rank order in `f32`, so every engine gives
//! the same bits. The first error is final for the whole world: nothing is retried.

mod buffers;
mod checks;
mod codec;
mod communicator;
mod front;
pub mod groups;
mod handshake;
pub mod hybrid;
mod kernels;
pub mod launch;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod nccl;
pub mod patience;
mod pending;
pub mod placement;
mod progress;
pub mod recorded;
pub mod rendezvous;
mod sealed;
mod signature;
mod slot;
mod stats;
mod subgroup;
mod sync;
pub mod threads;
mod timed;

pub use communicator::{AllBytes, Communicator};
pub use pending::{InFlight, Pending};
pub use stats::{CommStats, OpCount};
pub use zeropp_failures::{CommError, CommResult, Operation, flight, mesh};

/// The beginning of the names of threads that engines start.
pub const THREADS: &str = "comm";
