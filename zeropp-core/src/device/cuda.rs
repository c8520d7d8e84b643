//! What CubeCL has of an NVIDIA GPU, for libraries that work on its memory and in its queue.
//!
//! CubeCL owns the memory, and a thread of its own for each GPU queues the work. It may free, reuse
//! or move a block that has no holder.

use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl_common::device::Device as _;
use cubecl_common::device_handle::DeviceHandle;
use cubecl_environment::stream::StreamId;
use cubecl_runtime::runtime::Runtime;
use cubecl_server::stream::WriteScoped;
use cudarc::driver::sys::CUstream;

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
pub fn queue_of(server: &mut CudaServer, stream: StreamId) -> Result<CUstream, String> {
    let streams = server.write_streams();
    let mut found = streams.resolve(stream, std::iter::empty()).map_err(|e| format!("{e:?}"))?;
    Ok(found.current().sys)
}
