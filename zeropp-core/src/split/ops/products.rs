//! Products whose result stays in fp32, whatever the type of their factors, and sums of them.

use burn::tensor::{DType, Tensor};

#[cfg(feature = "cube")]
use super::on_gpu;
#[cfg(feature = "cube")]
use crate::cube;

/// x·y for `x: [.., i, k]`, `y: [.., k, j]`, with an fp32 result that was not rounded in between.
pub(super) fn matmul_f32<const D: usize>(x: Tensor<D>, y: Tensor<D>) -> Tensor<D> {
    if x.dtype() == DType::F32 {
        return x.matmul(y);
    }
    #[cfg(feature = "cube")]
    if on_gpu(&x) {
        return cube::matmul_f32(x, y);
    }
    x.cast(DType::F32).matmul(y.cast(DType::F32))
}

/// `sum: [n, s, d]` with `part: [n, r, d]` added to its first r rows, in place where nothing else
/// holds `sum`.
pub(super) fn add_first_rows(sum: Tensor<3>, part: Tensor<3>) -> Tensor<3> {
    #[cfg(feature = "cube")]
    if on_gpu(&sum) {
        return cube::add_first_rows(sum, part);
    }
    let [n, rows, d] = part.dims();
    let first = sum.clone().narrow(1, 0, rows) + part;
    sum.slice_assign([0..n, 0..rows, 0..d], first)
}
