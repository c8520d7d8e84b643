//! What CubeCL has of an NVIDIA GPU, for libraries that work on its memory and in its queue.
//!
//! CubeCL owns the memory, and a thread of its own for each GPU queues the work. It may free, reuse
//! or move a block that has no holder.

mod block;
mod host;
mod queue;

pub(crate) use block::{GpuBlock, GpuView};
pub(crate) use host::{HostLane, HostParcel};
pub(crate) use queue::queue_of;
pub use queue::{CudaServer, follow, mark, record, server, wait, words};
