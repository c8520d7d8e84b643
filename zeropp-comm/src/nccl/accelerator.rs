//! The functions that the engine needs of the device that holds a rank's tensors.

use std::any::Any;
use std::sync::Arc;

use burn::tensor::{DType, Tensor};

/// Something that went wrong on the device, in its driver's words.
pub type DeviceResult<T> = Result<T, String>;

/// A queue of the device (`CUstream`), as a number.
pub type RawStream = usize;
/// A point in a queue (`CUevent`), as a number.
pub type RawEvent = usize;

/// Tensors that NCCL can reach.
pub struct Pinned {
    /// Address of each tensor's first element on the device.
    pub addresses: Vec<usize>,
    /// The point after which the tensors hold what they should, and may be written.
    pub ready: RawEvent,
    /// Keeps the addresses good while it is alive.
    pub keep: Box<dyn Any + Send>,
}

/// The function that is called, on any thread, once tensors are pinned.
pub type OnPinned = Box<dyn FnOnce(DeviceResult<Pinned>) + Send>;

/// The device of one rank. Queued work runs in the order of its queue; queues wait for each other
/// through events. No call waits for queued work, except where it says so.
///
/// # Safety
/// Addresses that [`pin`](Self::pin) hands out must be valid for NCCL, for reads and writes of all
/// elements of their tensors, from the `ready` event on until `keep` is dropped.
pub unsafe trait Accelerator: Send + Sync {
    /// Makes this device the one of the calling thread's NCCL calls.
    ///
    /// # Errors
    /// The driver's words; so for all other calls.
    fn enter(&self) -> DeviceResult<()>;

    /// A flat tensor of `len` elements of any values, for NCCL to write.
    fn room(&self, len: usize, dtype: DType) -> Tensor<1>;

    /// Looks up where the elements of contiguous `tensors` are, keeps them there, and marks the
    /// point after all work that the calling thread has queued on them.
    fn pin(&self, tensors: Vec<Tensor<1>>, then: OnPinned);

    /// A new queue.
    fn stream(&self) -> DeviceResult<RawStream>;
    /// Lets work that is queued on `stream` from now on wait for `event`.
    fn wait(&self, stream: RawStream, event: RawEvent) -> DeviceResult<()>;
    /// The point that `stream` reaches when all work queued so far is done.
    fn record(&self, stream: RawStream) -> DeviceResult<RawEvent>;
    /// Whether the device has reached `event`.
    fn is_done(&self, event: RawEvent) -> DeviceResult<bool>;

    /// Lets the device begin what the calling thread has asked of it so far, also where such work
    /// is collected to be queued together. What the thread waits for next comes after it.
    fn start(&self) -> DeviceResult<()>;

    /// Lets the calling thread's later work on `tensor` wait for `event`. A device whose tensors
    /// are read by the CPU without a queue blocks here until the event is reached.
    fn join(&self, tensor: &Tensor<1>, event: Arc<Event>) -> DeviceResult<()>;

    /// Frees an event.
    fn free_event(&self, event: RawEvent);
    /// Frees a queue whose work is done.
    fn free_stream(&self, stream: RawStream);
}

/// An event that is freed with its last owner.
pub struct Event {
    accelerator: Arc<dyn Accelerator>,
    raw: RawEvent,
}

impl Event {
    /// Takes over an event of `accelerator`.
    pub(super) fn new(accelerator: Arc<dyn Accelerator>, raw: RawEvent) -> Event {
        Event { accelerator, raw }
    }

    /// The event as a number.
    pub fn raw(&self) -> RawEvent {
        self.raw
    }

    pub(super) fn is_done(&self) -> DeviceResult<bool> {
        self.accelerator.is_done(self.raw)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.accelerator.free_event(self.raw);
    }
}
