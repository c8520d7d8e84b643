//! The queue of a rank's work on a GPU, and points in queues.

use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl_common::device::Device as _;
use cubecl_common::device_handle::DeviceHandle;
use cubecl_environment::stream::StreamId;
use cubecl_runtime::runtime::Runtime;
use cubecl_server::stream::WriteScoped;
use cudarc::driver::sys::{CUevent, CUevent_flags, CUevent_wait_flags, CUstream};
use cudarc::driver::{DriverError, result};

/// What answers for a GPU on its thread.
pub type CudaServer = <CudaRuntime as Runtime>::Server;

/// The thread that queues the GPU's work.
pub fn server(device: &CudaDevice) -> DeviceHandle<CudaServer> {
    DeviceHandle::new(device.to_id())
}

/// The driver's queue behind one of CubeCL's.
///
/// # Errors
/// CubeCL's words.
pub(crate) fn queue_of(server: &mut CudaServer, stream: StreamId) -> Result<CUstream, String> {
    let streams = server.write_streams();
    let mut found = streams.resolve(stream, std::iter::empty()).map_err(|e| format!("{e:?}"))?;
    Ok(found.current().sys)
}

/// Marks the point that the queue of `stream` has reached, on CubeCL's thread. The event is the
/// caller's.
///
/// # Errors
/// The words of CubeCL or the driver.
pub fn mark(server: &mut CudaServer, stream: StreamId) -> Result<CUevent, String> {
    let queue = queue_of(server, stream)?;
    // SAFETY: CubeCL's queue lives as long as its thread, on which the GPU's context is current.
    unsafe { record(queue) }
}

/// Lets what comes to the queue of `stream` from now on wait for `event`, on CubeCL's thread.
///
/// # Errors
/// The words of CubeCL or the driver.
///
/// # Safety
/// The event is alive, and of this GPU.
pub unsafe fn follow(
    server: &mut CudaServer,
    stream: StreamId,
    event: CUevent,
) -> Result<(), String> {
    let queue = queue_of(server, stream)?;
    // SAFETY: as above, and as the caller says.
    unsafe { wait(queue, event) }
}

/// The point that `queue` has reached.
///
/// # Errors
/// The driver's words.
///
/// # Safety
/// The queue is alive, and its context current.
pub unsafe fn record(queue: CUstream) -> Result<CUevent, String> {
    let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING;
    let event = result::event::create(flags).map_err(words)?;
    // SAFETY: as the caller says.
    match unsafe { result::event::record(event, queue) } {
        Ok(()) => Ok(event),
        Err(error) => {
            // SAFETY: nobody else knows it.
            let _ = unsafe { result::event::destroy(event) };
            Err(words(error))
        }
    }
}

/// Lets what comes to `queue` from now on wait for `event`.
///
/// # Errors
/// The driver's words.
///
/// # Safety
/// Both are alive, and the queue's context is current.
pub unsafe fn wait(queue: CUstream, event: CUevent) -> Result<(), String> {
    let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: as the caller says.
    unsafe { result::stream::wait_event(queue, event, flags) }.map_err(words)
}

/// The driver's words.
pub fn words(error: DriverError) -> String {
    format!("CUDA: {error:?}")
}
