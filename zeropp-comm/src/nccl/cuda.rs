//! NVIDIA GPUs as the engine's devices: NCCL reads and writes in place what CubeCL allocates.
//!
//! CubeCL owns the memory, and may free, reuse or move a block that has no holder: so the engine
//! holds it until NCCL is done. A rank's work is on the queue of the thread that asks for it. The
//! engine's queues and that one wait for each other by events, which the GPU sees to.
//!
//! NCCL itself is never called on CubeCL's thread, where it could block on other ranks.

use std::sync::Arc;

use burn::backend::Cube;
use burn::tensor::{DType, Device, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::cuda::CudaDevice;
use cubecl_environment::stream::StreamId;
use cubecl_server::server::{BufferBinding, ServerStorage};
use cudarc::driver::{DriverError, result, sys};
use zeropp_core::device::cuda::{CudaServer, follow, mark, record, server, wait, words};

use super::{Accelerator, DeviceResult, Event, OnPinned, Pinned, RawEvent, RawStream};

/// One NVIDIA GPU, as the device of a rank of this process. A rank's tensors are made and used by
/// one thread: only that thread's queue waits for NCCL.
pub struct CudaAccelerator {
    device: Device,
    cubecl: CudaDevice,
    context: Context,
}

/// The GPU's primary context, which CubeCL and NCCL use as well.
#[derive(Clone, Copy)]
struct Context(sys::CUcontext);

// SAFETY: a context may be current on any number of threads, and the driver locks what they share.
unsafe impl Send for Context {}
// SAFETY: as above; the handle itself is never written.
unsafe impl Sync for Context {}

impl CudaAccelerator {
    /// The GPU with this number among those that CUDA shows to the process.
    ///
    /// # Errors
    /// The driver's words, also where there is no driver.
    pub fn new(index: usize) -> DeviceResult<CudaAccelerator> {
        // SAFETY: only tries to load the library.
        if !unsafe { sys::is_culib_present() } {
            return Err("libcuda.so.1 was not found; install NVIDIA's driver".into());
        }
        result::init().map_err(words)?;
        let ordinal = i32::try_from(index).map_err(|_| format!("no GPU has number {index}"))?;
        let gpu = result::device::get(ordinal).map_err(words)?;
        // SAFETY: the GPU was found above. The context is kept for the life of the process, as
        // CubeCL keeps it.
        let context = Context(unsafe { result::primary_ctx::retain(gpu) }.map_err(words)?);
        Ok(CudaAccelerator { device: Device::cuda(index), cubecl: CudaDevice::new(index), context })
    }
}

/// Finishes a tensor's lazy work, as far as queueing it, and finds the block it is in. One that the
/// CPU holds, such as figures for rank 0, is copied to `device` first.
fn resolve(tensor: Tensor<1>, device: &Device) -> DeviceResult<BufferBinding> {
    let tensor = zeropp_core::device::on(device, tensor).inner().try_into_primitive::<Cube>();
    let fused = tensor.map_err(|_| "the tensor is not on a GPU".to_owned())?;
    let client = fused.client.clone();
    let tensor: CubeTensor = client.resolve_tensor_float::<CubeBackend>(fused);
    Ok(into_contiguous(tensor).handle.binding())
}

// SAFETY: the resources in `keep` hold the blocks where they are, and the event is recorded on the
// queue of the thread that made the tensors, after all work on them.
unsafe impl Accelerator for CudaAccelerator {
    fn enter(&self) -> DeviceResult<()> {
        // SAFETY: the context was retained for the life of the process.
        unsafe { result::ctx::set_current(self.context.0) }.map_err(words)
    }

    fn room(&self, len: usize, dtype: DType) -> Tensor<1> {
        Tensor::empty([len], (&self.device, dtype))
    }

    fn pin(&self, tensors: Vec<Tensor<1>>, then: OnPinned) {
        let tensors = tensors.into_iter().map(|tensor| resolve(tensor, &self.device));
        let found: DeviceResult<Vec<BufferBinding>> = tensors.collect();
        let blocks = match found {
            Ok(blocks) => blocks,
            Err(text) => return then(Err(text)),
        };
        let stream = StreamId::current();
        let thread = server(&self.cubecl);
        thread.submit(move |server: &mut CudaServer| {
            let pin = || {
                let held: Result<Vec<_>, _> =
                    blocks.into_iter().map(|block| server.get_resource(block, stream)).collect();
                let held = held.map_err(|e| format!("{e:?}"))?;
                let addresses = held.iter().map(|block| block.resource().ptr as usize).collect();
                let ready = mark(server, stream)? as RawEvent;
                Ok(Pinned { addresses, ready, keep: Box::new(held) })
            };
            then(pin());
        });
        // Tasks are collected for a while, but the other ranks wait for this one.
        thread.flush_queue();
    }

    fn stream(&self) -> DeviceResult<RawStream> {
        // What NCCL does many ranks may wait for: it comes before the kernels of this one.
        let (_, greatest) = result::stream::get_priority_range().map_err(words)?;
        let kind = result::stream::StreamKind::NonBlocking;
        let stream = result::stream::create_with_priority(kind, greatest).map_err(words)?;
        Ok(stream as RawStream)
    }

    fn wait(&self, stream: RawStream, event: RawEvent) -> DeviceResult<()> {
        // SAFETY: both are alive, and `enter` made the context current.
        unsafe { wait(stream as _, event as _) }
    }

    fn record(&self, stream: RawStream) -> DeviceResult<RawEvent> {
        // SAFETY: the queue is alive, and `enter` made the context current.
        unsafe { record(stream as _) }.map(|event| event as RawEvent)
    }

    fn is_done(&self, event: RawEvent) -> DeviceResult<bool> {
        // SAFETY: the event is alive, and `enter` made the context current.
        match unsafe { result::event::query(event as _) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(words(error)),
        }
    }

    fn start(&self) -> DeviceResult<()> {
        self.device.flush().map_err(|error| format!("{error:?}"))
    }

    fn join(&self, _: &Tensor<1>, event: Arc<Event>) -> DeviceResult<()> {
        let stream = StreamId::current();
        server(&self.cubecl).submit(move |server: &mut CudaServer| {
            // SAFETY: the event lives, and is of this GPU. A server that cannot find the queue
            // fails the caller's next operation on it; another error is one of the context, which
            // every later call reports as well.
            let _ = unsafe { follow(server, stream, event.raw() as _) };
        });
        Ok(())
    }

    fn free_event(&self, event: RawEvent) {
        // SAFETY: the last use; the driver waits with it until the event is reached.
        let _ = unsafe { result::event::destroy(event as _) };
    }

    fn free_stream(&self, stream: RawStream) {
        // SAFETY: the last use, with no work left.
        let _ = unsafe { result::stream::destroy(stream as _) };
    }
}
