//! Products of matrices on NVIDIA GPUs by cuBLASLt, where it is found at run time.
//!
//! A product is queued on CubeCL's thread, in order with its kernels and in the same queue, so that
//! nothing waits for it. Each shape's algorithm is the first that the library's heuristics propose
//! (docs/adr/0098-products-are-cublaslt-s-where-it-is-found.md).

mod gpu;
mod library;
mod problem;

use std::collections::HashMap;
use std::sync::OnceLock;

use burn::backend::DispatchDevice;
use burn::tensor::{DType, Device, Shape};
use burn_cubecl::CubeDevice;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::cuda::CudaDevice;
use cubecl_common::device::Device as _;
use cubecl_environment::stream::StreamId;
use parking_lot::Mutex;

use self::gpu::{Blocks, GpuBlas};
use self::library::CublasLt;
pub(crate) use self::problem::Beside;
use self::problem::{Placement, Problem, alignment};
use crate::device::cuda::server;

/// What becomes of a product.
#[derive(Clone, Copy)]
pub(crate) struct How<'a> {
    /// It is added to what is there.
    pub(crate) add: bool,
    /// fp32 factors are rounded to TF32.
    pub(crate) tf32: bool,
    /// What is done with a contiguous vector of its type, a number for each of its columns.
    pub(crate) beside: Option<(Beside, &'a CubeTensor)>,
}

/// The library, looked for once.
fn library() -> Result<&'static CublasLt, &'static str> {
    static LIBRARY: OnceLock<Result<CublasLt, String>> = OnceLock::new();
    LIBRARY.get_or_init(CublasLt::load).as_ref().map_err(String::as_str)
}

/// The version of the library that makes products on GPUs.
///
/// # Errors
/// Why there is none: then they are CubeCL's.
pub(crate) fn version() -> Result<String, &'static str> {
    let version = library()?.version;
    Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
}

/// Whether products of tensors on `device` are the library's.
pub(crate) fn serves(device: &Device) -> bool {
    matches!(device.as_dispatch(), DispatchDevice::Cube(CubeDevice::Cuda(_))) && library().is_ok()
}

/// The handle of a GPU, made when it is first asked for; none where the library is not found, or
/// cannot be used there, which is said once.
fn open(device: &CudaDevice) -> Option<&'static GpuBlas> {
    static GPUS: Mutex<Option<HashMap<usize, Option<&'static GpuBlas>>>> = Mutex::new(None);
    let library = library().ok()?;
    let index = usize::from(device.to_id().index_id);
    let mut gpus = GPUS.lock();
    *gpus.get_or_insert_default().entry(index).or_insert_with(|| {
        let opened = server(device).submit_blocking(move |_| GpuBlas::open(library, index));
        match opened.map_err(|error| format!("{error:?}")).and_then(|opened| opened) {
            // It lives as long as the process, as the GPU's context does.
            Ok(gpu) => Some(&*Box::leak(Box::new(gpu))),
            Err(error) => {
                tracing::warn!("GPU {index}: products are CubeCL's, not cuBLASLt's: {error}");
                None
            }
        }
    })
}

fn is_type(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16)
}

/// The library's handle for a product of these factors, where it can make it: `[.., m, k]` and
/// `[.., k, n]` of one type and one batch.
fn gpu_for(x: &CubeTensor, y: &CubeTensor) -> Option<(CudaDevice, &'static GpuBlas)> {
    let CubeDevice::Cuda(device) = &x.device else { return None };
    let fits = x.dtype == y.dtype && is_type(x.dtype) && x.device == y.device;
    if !fits || x.meta.is_tiled() || y.meta.is_tiled() {
        return None;
    }
    let (xs, ys) = (x.meta.shape(), y.meta.shape());
    let (outer, inner) = (xs.split_last_chunk::<2>()?, ys.split_last_chunk::<2>()?);
    let none_is_empty = xs.iter().chain(ys.iter()).all(|n| *n > 0);
    if outer.0 != inner.0 || outer.1[1] != inner.1[0] || !none_is_empty {
        return None;
    }
    Some((device.clone(), open(device)?))
}

/// x·y in `dtype`, for `x: [.., m, k]` and `y: [.., k, n]` of one type, with fp32 sums; none where
/// the library is not there or cannot make it.
///
/// With a contiguous `bias: [n]` in `dtype` that is added to each row.
pub(crate) fn product(
    x: &CubeTensor,
    y: &CubeTensor,
    bias: Option<&CubeTensor>,
    dtype: DType,
    tf32: bool,
) -> Option<CubeTensor> {
    let (device, gpu) = gpu_for(x, y).filter(|_| is_type(dtype))?;
    let mut shape: Vec<usize> = x.meta.shape().to_vec();
    *shape.last_mut()? = *y.meta.shape().last()?;
    let (client, on) = (x.client.clone(), x.device.clone());
    let d = empty_device_contiguous_dtype(client, on, Shape::from(shape), dtype);
    let beside = bias.map(|bias| (Beside::Bias, bias));
    queue(gpu, &device, [x, y], &d, How { add: false, tf32, beside }).then_some(d)
}

/// Writes x·y to `d: [m, n]` of their type, whose rows may lie apart, or adds it, in place, for
/// `x: [m, k]`, `y: [k, n]`; or to fp32 `d: [m·n]`. False where nothing was done, as for
/// [`product`].
pub(crate) fn product_to(d: &CubeTensor, x: &CubeTensor, y: &CubeTensor, how: How<'_>) -> bool {
    let Some((device, gpu)) = gpu_for(x, y) else { return false };
    queue(gpu, &device, [x, y], d, how)
}

/// Queues D = X·Y (+ D) behind what was asked for so far; false where there is no way to compute
/// it.
fn queue(
    gpu: &'static GpuBlas,
    device: &CudaDevice,
    [x, y]: [&CubeTensor; 2],
    d: &CubeTensor,
    How { add, tf32, beside }: How<'_>,
) -> bool {
    let (Some((x, x_at)), Some((y, y_at))) =
        (Placement::or_copy(x.clone()), Placement::or_copy(y.clone()))
    else {
        return false;
    };
    let (xs, ys) = (x.meta.shape(), y.meta.shape());
    let rank = xs.num_dims();
    let (m, k, n) = (xs[rank - 2], xs[rank - 1], ys[rank - 1]);
    let batch = xs[..rank - 2].iter().product();
    let first = d.handle.offset_start.unwrap_or(0);
    let d_at = match d.meta.num_dims() {
        1 => Placement::of(&[batch, m, n], &[m * n, n, 1], first),
        _ => Placement::of(d.meta.shape(), d.meta.strides(), first),
    };
    let Some(d_at) = d_at.filter(|at| !at.by_columns) else { return false };
    let (factors, result) = (x.dtype, d.dtype);
    let first = |of: &CubeTensor| alignment(of.handle.offset_start.unwrap_or(0));
    let vector = beside.map(|(what, of)| (what, first(of)));
    let tf32 = tf32 && factors == DType::F32;
    let problem =
        Problem { m, n, k, batch, factors, tf32, result, x: x_at, y: y_at, d: d_at, vector };
    let server = server(device);
    // The first time a shape comes, this waits for the heuristics, not for the GPU.
    let plan = gpu.known(&problem).unwrap_or_else(|| {
        server.submit_blocking(move |_| gpu.find(&problem)).expect("CubeCL's thread answers")
    });
    let Some(plan) = plan else { return false };
    let block = |tensor: &CubeTensor| tensor.handle.clone().binding();
    let vector = beside.map(|(_, of)| block(of));
    let blocks = Blocks { x: block(&x), y: block(&y), d: block(d), vector };
    let stream = StreamId::current();
    server.submit(move |server| gpu.queue(server, &plan, &problem, blocks, add, stream));
    true
}
