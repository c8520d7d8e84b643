//! The causal softmax of a block of attention scores, forward and backward.

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::rows::{ExpSum, StridedRows, addresses, empty, kernel_for, lane_of_unit, row_sum};

#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
fn forward_kernel<F: Float>(
    scores: &Tensor<f32>,
    p: &mut Tensor<F>,
    sums: &mut Tensor<f32>,
    rows: usize,
    keys: usize,
    pitch: usize,
    first: usize,
    queries: usize,
    scale: f32,
    #[comptime] dim: CubeDim,
) {
    let (row, start, step) = lane_of_unit();
    let mut seen = 0usize.runtime();
    let mut end = 0usize.runtime();
    if row < rows {
        seen = first + row % queries + 1;
        end = keys;
    }
    let from = row * pitch;
    let mut part = ExpSum::empty();
    let mut key = start;
    while key < seen {
        part.add(scores[from + key] * scale);
        key += step;
    }
    let (row_top, row_total) = part.of_row(dim);
    if start == 0 && row < rows {
        sums[row] = row_top + row_total.ln();
    }
    let inverse = 1.0 / row_total;
    let to = row * keys;
    key = start;
    while key < end {
        let mut value = 0.0f32.runtime();
        if key < seen {
            value = (scores[from + key] * scale - row_top).exp() * inverse;
        }
        p[to + key] = F::cast_from(value);
        key += step;
    }
}

/// See [`causal_softmax`](super::causal_softmax).
pub(super) fn forward(
    scores: CubeTensor,
    first: usize,
    queries: usize,
    scale: f32,
    dtype: DType,
) -> (CubeTensor, CubeTensor) {
    let scores = StridedRows::of(scores);
    let (rows, keys) = (scores.n, scores.width);
    let p = scores.empty_like(dtype).tensor;
    let shape = p.meta.shape();
    let sums = empty(&p, Shape::new([shape[0], shape[1]]), DType::F32);
    let at = scores.launch();
    let kernel = kernel_for!(forward_kernel, dtype, "attention");
    // SAFETY: a unit stays below `rows` and `keys`, which are the sizes of all tensors but for the
    // pitch of `scores`; a query lies below `keys` too.
    unsafe {
        kernel(
            &at.client,
            at.count,
            at.dim,
            addresses(&[&scores.tensor, &p]),
            scores.tensor.into_tensor_arg(),
            p.clone().into_tensor_arg(),
            sums.clone().into_tensor_arg(),
            rows,
            keys,
            scores.pitch,
            first,
            queries,
            scale,
            at.dim,
        );
    }
    (p, sums)
}

#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
fn backward_kernel<F: Float>(
    scores: &Tensor<f32>,
    dp: &Tensor<f32>,
    sums: &Tensor<f32>,
    p: &mut Tensor<F>,
    ds: &mut Tensor<F>,
    rows: usize,
    keys: usize,
    pitch: usize,
    dp_pitch: usize,
    first: usize,
    queries: usize,
    scale: f32,
    #[comptime] dim: CubeDim,
) {
    let (row, start, step) = lane_of_unit();
    let mut seen = 0usize.runtime();
    let mut end = 0usize.runtime();
    let mut log_sum = 0.0f32.runtime();
    if row < rows {
        seen = first + row % queries + 1;
        end = keys;
        log_sum = sums[row];
    }
    let from = row * pitch;
    let dp_from = row * dp_pitch;
    let mut part = 0.0f32.runtime();
    let mut key = start;
    while key < seen {
        part += (scores[from + key] * scale - log_sum).exp() * dp[dp_from + key];
        key += step;
    }
    let mean = row_sum(part, dim);
    let to = row * keys;
    key = start;
    while key < end {
        let mut value = 0.0f32.runtime();
        let mut slope = 0.0f32.runtime();
        if key < seen {
            value = (scores[from + key] * scale - log_sum).exp();
            slope = value * (dp[dp_from + key] - mean) * scale;
        }
        p[to + key] = F::cast_from(value);
        ds[to + key] = F::cast_from(slope);
        key += step;
    }
}

/// See [`causal_softmax_backward`](super::causal_softmax_backward).
pub(super) fn backward(
    scores: CubeTensor,
    dp: CubeTensor,
    sums: CubeTensor,
    first: usize,
    queries: usize,
    scale: f32,
    dtype: DType,
) -> (CubeTensor, CubeTensor) {
    let (scores, dp) = (StridedRows::of(scores), StridedRows::of(dp));
    let sums = burn_cubecl::kernel::into_contiguous(sums);
    let (rows, keys) = (scores.n, scores.width);
    let (p, ds) = (scores.empty_like(dtype).tensor, scores.empty_like(dtype).tensor);
    let at = scores.launch();
    let kernel = kernel_for!(backward_kernel, dtype, "attention");
    // SAFETY: as in `forward`; `dp` has the shape of `scores`, and `sums` an element a row.
    unsafe {
        kernel(
            &at.client,
            at.count,
            at.dim,
            addresses(&[&scores.tensor, &dp.tensor]),
            scores.tensor.into_tensor_arg(),
            dp.tensor.into_tensor_arg(),
            sums.into_tensor_arg(),
            p.clone().into_tensor_arg(),
            ds.clone().into_tensor_arg(),
            rows,
            keys,
            scores.pitch,
            dp.pitch,
            first,
            queries,
            scale,
            at.dim,
        );
    }
    (p, ds)
}
