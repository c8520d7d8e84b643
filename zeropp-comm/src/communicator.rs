//! The interface between ranks, the same for every engine.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};

use crate::pending::Pending;
use crate::stats::CommStats;
use zeropp_failures::{CommError, CommResult};

/// Every rank's bytes, in rank order. The ranks of a process share them.
pub type AllBytes = Arc<[Vec<u8>]>;

/// A group of ranks.
///
/// Buffers are flat plain tensors (`f32` or `bf16`) on the rank's device. Once a collective has
/// been waited for, the engine holds no reference to the buffer that this rank passed in, so a
/// clone that the rank kept can be written in place. Results may be shared with other ranks or
/// with the engine: writing to one copies it. Off the CPU nothing copies by itself: there what an
/// all-gather gives is only to be read, and a rank that kept a clone of what it passed in may let
/// an operation write to it once it has used the result ([`zeropp_core::device::hand_over`] says
/// why).
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
    /// Sums the ranks' buffers in rank order in `f32` and keeps this rank's part: `[size * n]` to
    /// `[n]`.
    fn reduce_scatter(&self, full: Tensor<1>) -> Pending<Tensor<1>>;
    /// Sums the ranks' buffers in rank order in `f32`: `[n]` to `[n]`.
    fn all_reduce(&self, buffer: Tensor<1>) -> Pending<Tensor<1>>;
    /// Every rank gets `root`'s buffer; the others pass one of the same length and type.
    fn broadcast(&self, root: usize, buffer: Tensor<1>) -> Pending<Tensor<1>>;
    /// Says that the next `n` of these belong together: all ranks say the same, and the engine may
    /// begin them in one call of its library.
    fn together(&self, _n: usize) {}
    /// Every rank gets every rank's bytes, in rank order. For small things: norms, flags, names.
    fn exchange(&self, bytes: Vec<u8>) -> Pending<AllBytes>;
    /// Rank `root` gets every rank's bytes, in rank order; the others get none, once all are here.
    /// For records, of which all ranks together have many bytes.
    fn gather(&self, root: usize, bytes: Vec<u8>) -> Pending<AllBytes>;

    /// Sends to rank `to` of the group; matches its receive with the same tag, in order.
    fn send(&self, to: usize, tag: u64, buffer: Tensor<1>) -> Pending<()>;
    /// Receives `len` elements of `dtype` from rank `from` of the group.
    fn recv(&self, from: usize, tag: u64, len: usize, dtype: DType) -> Pending<Tensor<1>>;

    /// Whether what other ranks wait for may stand behind any call of this one, as with NCCL: then
    /// all ranks come to all that they do together in one order (ADR 31).
    fn keeps_order(&self) -> bool {
        false
    }

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

    /// Says, once, that this rank has its first step behind it: where the engine gives that a
    /// longer timeout, operations have the usual one from then on.
    fn past_first_step(&self) {}

    /// Operations and bytes of this rank on this communicator so far.
    fn stats(&self) -> CommStats {
        CommStats::default()
    }
}
