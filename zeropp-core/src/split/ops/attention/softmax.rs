//! The causal softmax of a block of scores, and its pullback: one kernel each on GPUs.

use burn::tensor::{Bool, DType, Int, Tensor};

#[cfg(feature = "cube")]
use crate::{cube, split::ops::on_gpu};

/// The rows of a block of scores: its `queries` queries of one head after another, the first of
/// which is token `first` of its sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct SoftmaxRows {
    /// Token of the first query.
    pub(super) first: usize,
    /// Queries of a head in the block.
    pub(super) queries: usize,
    /// The factor of scores.
    pub(super) scale: f32,
}

/// Probabilities in `dtype`, of the shape of the fp32 `scores: [n, rows, keys]`, zero where a key
/// lies after its query or is `hidden`, which has the shape of the scores and says it of all keys;
/// and the fp32 logarithm of each row's sum of exponentials, `[n, rows]`.
pub(super) fn forward(
    scores: Tensor<3>,
    rows: SoftmaxRows,
    hidden: Option<Tensor<3, Bool>>,
    dtype: DType,
) -> (Tensor<3>, Tensor<2>) {
    #[cfg(feature = "cube")]
    if hidden.is_none() && on_gpu(&scores) {
        return cube::causal_softmax(scores, rows.first, rows.queries, rows.scale, dtype);
    }
    let hidden = hidden.unwrap_or_else(|| future(&scores, rows));
    let scores = (scores * rows.scale).mask_fill(hidden, f32::NEG_INFINITY);
    let top = scores.clone().max_dim(2);
    let e = (scores - top.clone()).exp();
    let sum = e.clone().sum_dim(2);
    ((e / sum.clone()).cast(dtype), (top + sum.log()).squeeze_dim(2))
}

/// The probabilities again, and the gradient of the unscaled scores, both in `dtype`: p and
/// p·(dp − Σ p·dp)·scale, from scores and `dp` in fp32, of one shape, and the rows' `sums`.
pub(super) fn backward(
    scores: Tensor<3>,
    dp: Tensor<3>,
    sums: Tensor<2>,
    rows: SoftmaxRows,
    hidden: Option<Tensor<3, Bool>>,
    dtype: DType,
) -> (Tensor<3>, Tensor<3>) {
    #[cfg(feature = "cube")]
    if hidden.is_none() && on_gpu(&scores) {
        return cube::causal_softmax_backward(
            scores,
            dp,
            sums,
            rows.first,
            rows.queries,
            rows.scale,
            dtype,
        );
    }
    let hidden = hidden.unwrap_or_else(|| future(&scores, rows));
    let p = (scores * rows.scale - sums.unsqueeze_dim(2)).exp().mask_fill(hidden, 0.0);
    let mean = (p.clone() * dp.clone()).sum_dim(2);
    let ds = (dp - mean) * p.clone() * rows.scale;
    (p.cast(dtype), ds.cast(dtype))
}

/// Which keys lie after their query, `[1, rows, keys]`.
fn future(scores: &Tensor<3>, rows: SoftmaxRows) -> Tensor<3, burn::tensor::Bool> {
    let [_, height, keys] = scores.dims();
    let device = scores.device();
    let (n, share) = (rows.queries, height / rows.queries);
    let query = Tensor::<1, Int>::arange(rows.first as i64..(rows.first + n) as i64, &device);
    let query = query.reshape([1, n]).repeat_dim(0, share).reshape([1, height, 1]);
    let key = Tensor::<1, Int>::arange(0..keys as i64, &device).reshape([1, 1, keys]);
    query.expand([1, height, keys]).lower(key.expand([1, height, keys]))
}
