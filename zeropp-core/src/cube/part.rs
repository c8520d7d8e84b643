//! Parts of flat buffers: a parameter of a gathered layer, or its gradient.

use std::ops::Range;

use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::{DType, Shape, Tensor as Plain};
use burn_cubecl::CubeBackend;
#[cfg(feature = "cuda")]
use burn_cubecl::CubeDevice;
use burn_cubecl::kernel::{into_contiguous, slice};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use cubecl::zspace::metadata::Metadata;

use super::rows::{addresses, kernel_for, vector_size};

/// `t` where it may be changed in place: in one piece, and held by nothing else.
pub(super) fn to_change(t: CubeTensor) -> CubeTensor {
    let t = into_contiguous(t);
    if t.can_mut() { t } else { t.copy() }
}

/// Elements of a contiguous tensor in one row, where they are.
pub(super) fn part_of(t: &CubeTensor, part: Range<usize>) -> CubeTensor {
    let bytes = |elements: usize| (elements * t.dtype.size()) as u64;
    let handle = t.handle.clone().offset_start(bytes(part.start));
    let handle = handle.offset_end(bytes(t.meta.num_elements() - part.end));
    let meta = Metadata::new([part.len()], [1]);
    CubeTensor::new(t.client.clone(), handle, meta, t.device.clone(), t.dtype)
}

/// The `columns` of a contiguous matrix from `start` on, where they are.
#[cfg(feature = "cuda")]
pub(super) fn columns_of(t: &CubeTensor, start: usize, columns: usize) -> CubeTensor {
    let (rows, width) = (t.meta.shape()[0], t.meta.shape()[1]);
    let bytes = |elements: usize| (elements * t.dtype.size()) as u64;
    let handle = t.handle.clone().offset_start(bytes(start));
    let handle = handle.offset_end(bytes(width - start - columns));
    let meta = Metadata::new([rows, columns], [width, 1]);
    CubeTensor::new(t.client.clone(), handle, meta, t.device.clone(), t.dtype)
}

/// `first` is where the part begins, in vectors.
#[cube(launch_unchecked, address_type = "dynamic")]
fn part_kernel<F: Float, N: Size>(
    sum: &mut Tensor<Vector<f32, N>>,
    part: &Tensor<Vector<F, N>>,
    vectors: usize,
    first: usize,
    #[comptime] begun: bool,
) {
    if ABSOLUTE_POS >= vectors {
        terminate!();
    }
    let new = Vector::<f32, N>::cast_from(part[ABSOLUTE_POS]);
    if comptime!(begun) {
        sum[first + ABSOLUTE_POS] += new;
    } else {
        sum[first + ABSOLUTE_POS] = new;
    }
}

/// See [`add_to_part`].
pub(super) fn add(sum: CubeTensor, part: CubeTensor, start: usize, begun: bool) -> CubeTensor {
    let sum = to_change(sum);
    add_to(&sum, part, start, begun);
    sum
}

/// The same to contiguous `sum`, whoever holds it.
pub(super) fn add_to(sum: &CubeTensor, part: CubeTensor, start: usize, begun: bool) {
    let part = into_contiguous(part);
    let n = part.meta.num_elements();
    let vector = vector_size(&[sum, &part], &[n, start]);
    let client = sum.client.clone();
    let dim = CubeDim::new(&client, n / vector);
    let kernel = kernel_for!(part_kernel, part.dtype, "a gradient");
    // SAFETY: a unit stays below the elements of `part`, which `sum` has from `start` on.
    unsafe {
        kernel(
            &client,
            cubecl::calculate_cube_count_elemwise(&client, n / vector, dim),
            dim,
            addresses(&[sum, &part]),
            vector,
            sum.clone().into_tensor_arg(),
            part.into_tensor_arg(),
            n / vector,
            start / vector,
            begun,
        );
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn zero_kernel<N: Size>(part: &mut Tensor<Vector<f32, N>>, vectors: usize) {
    if ABSOLUTE_POS >= vectors {
        terminate!();
    }
    part[ABSOLUTE_POS] = Vector::new(0.0f32);
}

/// See [`zero_part`].
fn zero(sum: CubeTensor, part: Range<usize>) -> CubeTensor {
    let (sum, n) = (to_change(sum), part.len());
    let part = part_of(&sum, part);
    let vector = vector_size(&[&part], &[n]);
    let client = sum.client.clone();
    let dim = CubeDim::new(&client, n / vector);
    // SAFETY: a unit stays below the elements of `part`.
    unsafe {
        zero_kernel::launch_unchecked(
            &client,
            cubecl::calculate_cube_count_elemwise(&client, n / vector, dim),
            dim,
            addresses(&[&part]),
            vector,
            part.into_tensor_arg(),
            n / vector,
        );
    }
    sum
}

#[backend_extension(Cube, Fusion)]
trait Parts: Backend {
    #[fusion(dtype = sum, shape = sum)]
    fn add_to_part(
        sum: FloatTensor<Self>,
        part: FloatTensor<Self>,
        start: usize,
        begun: bool,
    ) -> FloatTensor<Self>;

    #[fusion(dtype = sum, shape = sum)]
    fn zero_part(sum: FloatTensor<Self>, part: Range<usize>) -> FloatTensor<Self>;

    #[fusion(meta = part_spec)]
    fn view_part(flat: FloatTensor<Self>, part: Range<usize>) -> FloatTensor<Self>;

    #[fusion(meta = columns_spec)]
    fn view_columns(x: FloatTensor<Self>, columns: Range<usize>) -> FloatTensor<Self>;
}

impl Parts for CubeBackend {
    fn add_to_part(
        sum: FloatTensor<Self>,
        part: FloatTensor<Self>,
        start: usize,
        begun: bool,
    ) -> FloatTensor<Self> {
        add(sum, part, start, begun)
    }

    fn zero_part(sum: FloatTensor<Self>, part: Range<usize>) -> FloatTensor<Self> {
        zero(sum, part)
    }

    fn view_part(flat: FloatTensor<Self>, part: Range<usize>) -> FloatTensor<Self> {
        #[cfg(feature = "cuda")]
        if matches!(flat.device, CubeDevice::Cuda(_)) {
            return part_of(&into_contiguous(flat), part);
        }
        slice(flat, &[part])
    }

    fn view_columns(x: FloatTensor<Self>, columns: Range<usize>) -> FloatTensor<Self> {
        #[cfg(feature = "cuda")]
        if matches!(x.device, CubeDevice::Cuda(_)) {
            return columns_of(&into_contiguous(x), columns.start, columns.len());
        }
        let rows = x.meta.shape()[0];
        slice(x, &[0..rows, columns])
    }
}

fn part_spec(flat: &TensorSpec, part: &Range<usize>) -> TensorSpec {
    TensorSpec::new(Shape::new([part.len()]), flat.dtype)
}

fn columns_spec(x: &TensorSpec, columns: &Range<usize>) -> TensorSpec {
    TensorSpec::new(Shape::new([x.shape[0], columns.len()]), x.dtype)
}

/// fp32 `sum: [n]` with the elements of `part`, of any float type, from `start` on: added to what
/// is there if that has `begun`, else in its place. In place where nothing else holds `sum`.
pub(crate) fn add_to_part(sum: Plain<1>, part: Plain<1>, start: usize, begun: bool) -> Plain<1> {
    let ([all], [n]) = (sum.dims(), part.dims());
    assert!(n > 0 && start + n <= all, "{n} elements from {start} of {all}");
    assert_eq!(sum.dtype(), DType::F32);
    let (sum, part) = (sum.into_dispatch(), part.into_dispatch());
    Plain::from_dispatch(<Dispatch as Parts>::add_to_part(sum, part, start, begun))
}

/// fp32 `sum: [n]` with zeros in a part of it, in place where nothing else holds it.
pub(crate) fn zero_part(sum: Plain<1>, part: Range<usize>) -> Plain<1> {
    assert!(part.end <= sum.dims()[0], "{part:?} of {:?}", sum.dims());
    assert_eq!(sum.dtype(), DType::F32);
    if part.is_empty() {
        return sum;
    }
    Plain::from_dispatch(<Dispatch as Parts>::zero_part(sum.into_dispatch(), part))
}

/// Elements of a flat buffer. On NVIDIA GPUs a view wherever they begin, while Burn's slices are
/// copies unless they begin and end at multiples of 512 bytes: kernels there ask no more than that
/// their own vectors are aligned, which a block of parameters is.
pub(crate) fn view_part(flat: Plain<1>, part: Range<usize>) -> Plain<1> {
    assert!(part.end <= flat.dims()[0], "{part:?} of {:?}", flat.dims());
    Plain::from_dispatch(<Dispatch as Parts>::view_part(flat.into_dispatch(), part))
}

/// Some columns of `x: [n, h]`: as [`view_part`], for products, which ask no more than it.
pub(crate) fn view_columns(x: Plain<2>, columns: Range<usize>) -> Plain<2> {
    assert!(columns.end <= x.dims()[1], "{columns:?} of {:?}", x.dims());
    Plain::from_dispatch(<Dispatch as Parts>::view_columns(x.into_dispatch(), columns))
}
