//! Layer norm and RMS norm of rows, forward and the gradient of their input.

use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::rows::{StridedRows, empty, kernel_for, lane_of_unit, row_sum};

/// With `centered` a layer norm; without, an RMS norm, which has neither means nor beta.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn forward_kernel<F: Float>(
    x: &Tensor<F>,
    gamma: &Tensor<f32>,
    beta: &Tensor<f32>,
    y: &mut Tensor<F>,
    means: &mut Tensor<f32>,
    scales: &mut Tensor<f32>,
    rows: usize,
    width: usize,
    pitch: usize,
    eps: f32,
    #[comptime] centered: bool,
    #[comptime] dim: CubeDim,
) {
    let (row, start, step) = lane_of_unit();
    let from = row * pitch;
    let mut end = 0usize.runtime();
    if row < rows {
        end = width;
    }
    let elements = f32::cast_from(width as u32);
    let mut mean = 0.0f32.runtime();
    if comptime!(centered) {
        let mut sum = 0.0f32.runtime();
        let mut i = start;
        while i < end {
            sum += f32::cast_from(x[from + i]);
            i += step;
        }
        mean = row_sum(sum, dim) / elements;
    }
    let mut squares = 0.0f32.runtime();
    let mut i = start;
    while i < end {
        let c = f32::cast_from(x[from + i]) - mean;
        squares += c * c;
        i += step;
    }
    let scale = 1.0 / (row_sum(squares, dim) / elements + eps).sqrt();
    if start == 0 && row < rows {
        if comptime!(centered) {
            means[row] = mean;
        }
        scales[row] = scale;
    }
    let to = row * width;
    i = start;
    while i < end {
        let mut value = (f32::cast_from(x[from + i]) - mean) * scale * gamma[i];
        if comptime!(centered) {
            value += beta[i];
        }
        y[to + i] = F::cast_from(value);
        i += step;
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn backward_kernel<F: Float>(
    dy: &Tensor<F>,
    x: &Tensor<F>,
    gamma: &Tensor<f32>,
    means: &Tensor<f32>,
    scales: &Tensor<f32>,
    dx: &mut Tensor<F>,
    rows: usize,
    width: usize,
    dy_pitch: usize,
    pitch: usize,
    #[comptime] centered: bool,
    #[comptime] dim: CubeDim,
) {
    let (row, start, step) = lane_of_unit();
    let (from, dy_from) = (row * pitch, row * dy_pitch);
    let elements = f32::cast_from(width as u32);
    let mut end = 0usize.runtime();
    let mut scale = 0.0f32.runtime();
    let mut mean = 0.0f32.runtime();
    if row < rows {
        end = width;
        scale = scales[row];
        if comptime!(centered) {
            mean = means[row];
        }
    }
    let mut plain = 0.0f32.runtime();
    let mut weighted = 0.0f32.runtime();
    let mut i = start;
    while i < end {
        let d = f32::cast_from(dy[dy_from + i]) * gamma[i];
        plain += d;
        weighted += d * (f32::cast_from(x[from + i]) - mean) * scale;
        i += step;
    }
    let c2 = row_sum(weighted, dim) / elements;
    let mut c1 = 0.0f32.runtime();
    if comptime!(centered) {
        c1 = row_sum(plain, dim) / elements;
    }
    let to = row * width;
    i = start;
    while i < end {
        let d = f32::cast_from(dy[dy_from + i]) * gamma[i];
        let hat = (f32::cast_from(x[from + i]) - mean) * scale;
        dx[to + i] = F::cast_from((d - c1 - hat * c2) * scale);
        i += step;
    }
}

/// See [`layer_norm`](super::layer_norm); without `beta` an RMS norm, whose means are not set.
pub(super) fn forward(
    x: CubeTensor,
    gamma: CubeTensor,
    beta: Option<CubeTensor>,
    eps: f32,
) -> (CubeTensor, CubeTensor, CubeTensor) {
    let x = StridedRows::of(x);
    let gamma = into_contiguous(gamma);
    let centered = beta.is_some();
    let beta = beta.map_or_else(|| gamma.clone(), into_contiguous);
    let y = x.empty_like(x.tensor.dtype).tensor;
    let rows = |n: usize| empty(&y, Shape::new([n]), DType::F32);
    let (means, scales) = (rows(if centered { x.n } else { 1 }), rows(x.n));
    let at = x.launch();
    let kernel = kernel_for!(forward_kernel, y.dtype, "a norm");
    // SAFETY: a unit stays below the rows and the width of `x`, which `y` has too; the vectors
    // have one element a row (`means` only where it is written) or a column.
    unsafe {
        kernel(
            &at.client,
            at.count,
            at.dim,
            x.tensor.into_tensor_arg(),
            gamma.into_tensor_arg(),
            beta.into_tensor_arg(),
            y.clone().into_tensor_arg(),
            means.clone().into_tensor_arg(),
            scales.clone().into_tensor_arg(),
            x.n,
            x.width,
            x.pitch,
            eps,
            centered,
            at.dim,
        );
    }
    (y, means, scales)
}

/// See [`layer_norm_backward`](super::layer_norm_backward); without `means` that of an RMS norm.
pub(super) fn backward(
    dy: CubeTensor,
    x: CubeTensor,
    gamma: CubeTensor,
    means: Option<CubeTensor>,
    scales: CubeTensor,
) -> CubeTensor {
    let (dy, x) = (StridedRows::of(dy), StridedRows::of(x));
    let (gamma, scales) = (into_contiguous(gamma), into_contiguous(scales));
    let centered = means.is_some();
    let means = means.map_or_else(|| scales.clone(), into_contiguous);
    let dx = dy.empty_like(dy.tensor.dtype).tensor;
    let at = dy.launch();
    let kernel = kernel_for!(backward_kernel, dx.dtype, "a norm");
    // SAFETY: as in `forward`; `dy` and `dx` have the shape of `x`.
    unsafe {
        kernel(
            &at.client,
            at.count,
            at.dim,
            dy.tensor.into_tensor_arg(),
            x.tensor.into_tensor_arg(),
            gamma.into_tensor_arg(),
            means.into_tensor_arg(),
            scales.into_tensor_arg(),
            dx.clone().into_tensor_arg(),
            x.n,
            x.width,
            dy.pitch,
            x.pitch,
            centered,
            at.dim,
        );
    }
    dx
}
