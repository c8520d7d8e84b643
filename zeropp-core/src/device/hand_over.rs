//! Tensors that go from one thread to another.
//!
//! On a GPU a Burn tensor belongs to the stream of the thread that made it. Three things go wrong
//! when a clone of one is simply moved to another thread (seen with Burn 0.22.1 and CubeCL 0.11.3;
//! `docs/adr/0010-tensors-between-threads.md`):
//!
//! - Clones count their holders, and a tensor whose holder is alone is consumed in place. The count
//!   is right only while all clones stay on one thread: otherwise memory may go before the
//!   operation that was to read it has been queued.
//! - A user of memory waits for its *allocation*, not for the last write: memory that was written
//!   in place may read as it was before. CUDA has one stream for all threads here, where it cannot.
//! - Nothing waits for readers: a buffer may be written in place while another stream still reads.
//!
//! So a tensor leaves its thread as a handle of its own, whose memory the sender does not keep to
//! write to, and arrives as a copy in memory of the receiver's own, unless it is only to be read.

use burn::tensor::{Device, Tensor};

/// `t` for another thread. Where the caller keeps a clone it must not write to it (an operation on
/// the only handle may) until it has used something that the other thread has made of it.
///
/// This also makes the device start on what the thread has asked of it so far, if `t` is part of
/// that. Burn would do so when the other thread first touches `t`: at any point in this thread's
/// later work, which would be cut, fused and compiled anew in other places in every step.
pub fn hand_over<const D: usize>(t: Tensor<D>) -> Tensor<D> {
    #[cfg(feature = "cube")]
    if !crate::cpu_tensor::is_on_cpu(&t) {
        return in_transit().executes(|| t.clone());
    }
    t
}

/// A tensor that another thread has handed over, in memory of this thread's own.
pub fn take_over(t: Tensor<1>) -> Tensor<1> {
    if crate::cpu_tensor::is_on_cpu(&t) { t } else { copy(&take_to_read(t)) }
}

/// A tensor that another thread has handed over, in memory that others may read too. It is to be
/// read, and neither passed on nor kept where an operation may take its place.
pub fn take_to_read<const D: usize>(t: Tensor<D>) -> Tensor<D> {
    #[cfg(feature = "cube")]
    if !crate::cpu_tensor::is_on_cpu(&t) {
        // Right away, and not again for every use.
        return t.clone();
    }
    t
}

/// `t` on `device`: itself where it is there already. What another rank has sent is on that rank's
/// device, which is another where a machine has several GPUs.
pub fn on<const D: usize>(device: &Device, t: Tensor<D>) -> Tensor<D> {
    if t.device() == *device {
        return t;
    }
    // Not by `to_device`: where NCCL is installed CubeCL would send `t` on a stream that its next
    // change in place does not wait for.
    let dtype = t.dtype();
    Tensor::from_data(t.into_data(), (device, dtype))
}

/// `t` in fresh memory of this thread's own; on the CPU, where copies are made on writing, `t`.
pub fn copy(t: &Tensor<1>) -> Tensor<1> {
    let n = t.dims()[0];
    if crate::cpu_tensor::is_on_cpu(t) || n == 0 {
        return t.clone();
    }
    // A concatenation of parts is never done in place, and nothing takes a shortcut through it.
    let parts = match n {
        1 => vec![t.clone(), t.clone()],
        _ => vec![t.clone().slice([0..n / 2]), t.clone().slice([n / 2..n])],
    };
    Tensor::cat(parts, 0).slice([0..n])
}

/// The stream of tensors under way. Nothing runs on it: it differs from every thread's own.
#[cfg(feature = "cube")]
fn in_transit() -> burn_fusion::stream::StreamId {
    use std::sync::OnceLock;

    use burn_fusion::stream::StreamId;

    static STREAM: OnceLock<StreamId> = OnceLock::new();
    *STREAM.get_or_init(StreamId::allocate)
}
