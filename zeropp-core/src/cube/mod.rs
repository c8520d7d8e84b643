//! Fused kernels for GPUs, written once in CubeCL for CUDA and for everything that WebGPU drives,
//! and reached from plain tensors, with Burn's fusion and without.
//!
//! All sums and exponentials are fp32, whatever the type of the tensors. The functions here take
//! plain tensors on a GPU ([`is_on`]) and panic elsewhere; `split::ops` chooses.

mod adamw;
mod attention;
mod columns;
mod dropout;
mod head_norm;
mod loss;
mod norm;
mod part;
mod products;
mod rows;
mod softmax;
mod sums;
#[cfg(all(test, feature = "wgpu"))]
mod tests;
mod token_rows;
mod turn;
#[cfg(all(test, feature = "cuda"))]
mod wide_tests;

pub(crate) use adamw::adamw;
pub(crate) use attention::FusedAttention;
pub(crate) use columns::{add_column_sums, column_sums};
pub(crate) use dropout::DroppedRows;
pub(crate) use head_norm::{head_norm, head_norm_backward};
pub(crate) use part::{add_to_part, view_columns, view_part, zero_part};
pub(crate) use products::{
    Maker, PlaceOfProduct, add_product, affine, has_library, product, product_to_columns,
};
pub(crate) use sums::block_squares;
pub(crate) use turn::{TurnedRows, turn_rows};

use std::ops::Range;

use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::{DType, Device, Int, Shape, Tensor};
use burn_cubecl::CubeBackend;

/// Whether the plain (untracked) tensor `t` is on a GPU.
pub(crate) fn is_on<const D: usize>(t: &Tensor<D>) -> bool {
    t.device() != Device::flex()
}

/// The number of a tensor on a GPU, which all its handles have in common and views of it do not;
/// `None` elsewhere.
pub(crate) fn tensor_id<const D: usize>(t: &Tensor<D>) -> Option<usize> {
    let t = t.clone().inner().try_into_primitive::<burn::backend::Cube>().ok()?;
    Some(t.id.value() as usize)
}

/// Kernels of masks and tokens, which change their first tensor in place.
#[backend_extension(Cube, Fusion)]
trait KernelsOfRows: Backend {
    #[fusion(dtype = sum, shape = sum)]
    fn add_token_rows(
        sum: FloatTensor<Self>,
        part: Range<usize>,
        ids: IntTensor<Self>,
        rows: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    #[fusion(dtype = x, shape = x)]
    fn drop_rows(x: FloatTensor<Self>, rows: DroppedRows) -> FloatTensor<Self>;
}

impl KernelsOfRows for CubeBackend {
    fn add_token_rows(
        sum: FloatTensor<Self>,
        part: Range<usize>,
        ids: IntTensor<Self>,
        rows: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        token_rows::add(sum, part, ids, rows)
    }

    fn drop_rows(x: FloatTensor<Self>, rows: DroppedRows) -> FloatTensor<Self> {
        dropout::drop_rows(x, rows)
    }
}

#[backend_extension(Cube, Fusion)]
trait CubeKernels: Backend {
    #[fusion(dtype = sum, shape = sum)]
    fn add_first_rows(sum: FloatTensor<Self>, part: FloatTensor<Self>) -> FloatTensor<Self>;

    #[fusion(meta = probabilities_of)]
    fn causal_softmax(
        scores: FloatTensor<Self>,
        first: usize,
        queries: usize,
        scale: f32,
        dtype: DType,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    #[fusion(meta = gradients_of)]
    fn causal_softmax_backward(
        scores: FloatTensor<Self>,
        dp: FloatTensor<Self>,
        sums: FloatTensor<Self>,
        first: usize,
        queries: usize,
        scale: f32,
        dtype: DType,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    #[fusion(meta = losses_of)]
    fn cross_entropy(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        gradient: bool,
        weight: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    #[fusion(meta = layer_norm_of)]
    fn layer_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    #[fusion(meta = layer_norm_gradients_of)]
    fn layer_norm_backward(
        dy: FloatTensor<Self>,
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        means: FloatTensor<Self>,
        rstds: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    #[fusion(meta = rms_norm_of)]
    fn rms_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    #[fusion(meta = rms_norm_gradients_of)]
    fn rms_norm_backward(
        dy: FloatTensor<Self>,
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        rrms: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

impl CubeKernels for CubeBackend {
    fn causal_softmax(
        scores: FloatTensor<Self>,
        first: usize,
        queries: usize,
        scale: f32,
        dtype: DType,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        softmax::forward(scores, first, queries, scale, dtype)
    }

    fn causal_softmax_backward(
        scores: FloatTensor<Self>,
        dp: FloatTensor<Self>,
        sums: FloatTensor<Self>,
        first: usize,
        queries: usize,
        scale: f32,
        dtype: DType,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        softmax::backward(scores, dp, sums, first, queries, scale, dtype)
    }

    fn add_first_rows(sum: FloatTensor<Self>, part: FloatTensor<Self>) -> FloatTensor<Self> {
        sums::add_first_rows(sum, part)
    }

    fn cross_entropy(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        gradient: bool,
        weight: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        loss::cross_entropy(logits, targets, gradient, weight)
    }

    fn layer_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        norm::forward(x, gamma, Some(beta), eps)
    }

    fn layer_norm_backward(
        dy: FloatTensor<Self>,
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        means: FloatTensor<Self>,
        rstds: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        norm::backward(dy, x, gamma, Some(means), rstds)
    }

    fn rms_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (y, _, rrms) = norm::forward(x, gamma, None, eps);
        (y, rrms)
    }

    fn rms_norm_backward(
        dy: FloatTensor<Self>,
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        rrms: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        norm::backward(dy, x, gamma, None, rrms)
    }
}

fn probabilities_of(
    scores: &TensorSpec,
    _first: &usize,
    _queries: &usize,
    _scale: &f32,
    dtype: &DType,
) -> (TensorSpec, TensorSpec) {
    let sums = Shape::new([scores.shape[0], scores.shape[1]]);
    (TensorSpec::new(scores.shape.clone(), *dtype), TensorSpec::new(sums, DType::F32))
}

#[allow(clippy::too_many_arguments)]
fn gradients_of(
    scores: &TensorSpec,
    _dp: &TensorSpec,
    _sums: &TensorSpec,
    _first: &usize,
    _queries: &usize,
    _scale: &f32,
    dtype: &DType,
) -> (TensorSpec, TensorSpec) {
    let spec = TensorSpec::new(scores.shape.clone(), *dtype);
    (spec.clone(), spec)
}

fn losses_of(
    logits: &TensorSpec,
    targets: &TensorSpec,
    _gradient: &bool,
    _weight: &f32,
) -> (TensorSpec, TensorSpec) {
    (TensorSpec::new(targets.shape.clone(), DType::F32), logits.clone())
}

/// One fp32 number a row of `x: [n, h]`.
fn row_statistic(x: &TensorSpec) -> TensorSpec {
    TensorSpec::new(Shape::new([x.shape[0]]), DType::F32)
}

fn layer_norm_of(
    x: &TensorSpec,
    _gamma: &TensorSpec,
    _beta: &TensorSpec,
    _eps: &f32,
) -> (TensorSpec, TensorSpec, TensorSpec) {
    (x.clone(), row_statistic(x), row_statistic(x))
}

fn rms_norm_of(x: &TensorSpec, _gamma: &TensorSpec, _eps: &f32) -> (TensorSpec, TensorSpec) {
    (x.clone(), row_statistic(x))
}

/// The gradient of the input, and `vectors` of one fp32 number a column.
fn norm_gradients(dy: &TensorSpec, vectors: usize) -> (TensorSpec, TensorSpec) {
    let sums = Shape::new([vectors * dy.shape[1]]);
    (dy.clone(), TensorSpec::new(sums, DType::F32))
}

fn layer_norm_gradients_of(
    dy: &TensorSpec,
    _x: &TensorSpec,
    _gamma: &TensorSpec,
    _means: &TensorSpec,
    _rstds: &TensorSpec,
) -> (TensorSpec, TensorSpec) {
    norm_gradients(dy, 2)
}

fn rms_norm_gradients_of(
    dy: &TensorSpec,
    _x: &TensorSpec,
    _gamma: &TensorSpec,
    _rrms: &TensorSpec,
) -> (TensorSpec, TensorSpec) {
    norm_gradients(dy, 1)
}

/// The softmax of scale·scores in `dtype` and the fp32 logarithms of the rows' sums of
/// exponentials, `[n, rows]`, for fp32 `scores: [n, rows, keys]`.
///
/// Row r of every n holds the query at token `first` + r mod `queries`; keys after it get zero.
pub(crate) fn causal_softmax(
    scores: Tensor<3>,
    first: usize,
    queries: usize,
    scale: f32,
    dtype: DType,
) -> (Tensor<3>, Tensor<2>) {
    check_block(&scores, first, queries);
    let scores = scores.into_dispatch();
    let (p, sums) = <Dispatch as CubeKernels>::causal_softmax(scores, first, queries, scale, dtype);
    (Tensor::from_dispatch(p), Tensor::from_dispatch(sums))
}

/// p and p·(dp − Σ p·dp)·scale in `dtype`, zero where a key lies after its query, for fp32 scores,
/// `dp` of their shape, and `sums` as from [`causal_softmax`].
pub(crate) fn causal_softmax_backward(
    scores: Tensor<3>,
    dp: Tensor<3>,
    sums: Tensor<2>,
    first: usize,
    queries: usize,
    scale: f32,
    dtype: DType,
) -> (Tensor<3>, Tensor<3>) {
    check_block(&scores, first, queries);
    assert_eq!((scores.dims(), &scores.dims()[..2]), (dp.dims(), &sums.dims()[..]));
    assert_eq!([dp.dtype(), sums.dtype()], [DType::F32; 2]);
    let (scores, dp, sums) = (scores.into_dispatch(), dp.into_dispatch(), sums.into_dispatch());
    let (p, ds) = <Dispatch as CubeKernels>::causal_softmax_backward(
        scores, dp, sums, first, queries, scale, dtype,
    );
    (Tensor::from_dispatch(p), Tensor::from_dispatch(ds))
}

fn check_block(scores: &Tensor<3>, first: usize, queries: usize) {
    let [_, rows, keys] = scores.dims();
    assert_eq!(scores.dtype(), DType::F32);
    assert!(
        rows.is_multiple_of(queries) && first + queries <= keys,
        "{rows} rows of {queries} queries from token {first} on {keys} keys"
    );
}

/// fp32 `sum: [n, s, d]` with fp32 `part: [n, r, d]` added to its first r rows, in place where
/// nothing else holds `sum`.
pub(crate) fn add_first_rows(sum: Tensor<3>, part: Tensor<3>) -> Tensor<3> {
    let ([n, s, d], [m, r, c]) = (sum.dims(), part.dims());
    assert!(n == m && d == c && r <= s, "{:?} onto {:?}", part.dims(), sum.dims());
    assert_eq!([sum.dtype(), part.dtype()], [DType::F32; 2]);
    let (sum, part) = (sum.into_dispatch(), part.into_dispatch());
    Tensor::from_dispatch(<Dispatch as CubeKernels>::add_first_rows(sum, part))
}

/// fp32 `sum` with row i of `rows: [n, h]` added to the h elements from h · `ids[i]` on of its
/// `part` of V·h, in the order of the rows, in place where nothing else holds `sum`. Ids that are
/// not below V are left out.
pub(crate) fn add_token_rows(
    sum: Tensor<1>,
    part: Range<usize>,
    ids: Tensor<1, Int>,
    rows: Tensor<2>,
) -> Tensor<1> {
    let ([n, h], [elements]) = (rows.dims(), sum.dims());
    assert_eq!((ids.dims(), sum.dtype()), ([n], DType::F32));
    let fits = part.end <= elements && part.len().is_multiple_of(h.max(1));
    assert!(n > 0 && h > 0 && fits, "{n} rows of {h} onto {part:?} of {elements}");
    let (sum, ids, rows) = (sum.into_dispatch(), ids.into_dispatch(), rows.into_dispatch());
    Tensor::from_dispatch(<Dispatch as KernelsOfRows>::add_token_rows(sum, part, ids, rows))
}

/// `x`, whose rows are `rows`, with elements dropped and the others scaled, in place where nothing
/// else holds it.
pub(crate) fn drop_rows<const D: usize>(x: Tensor<D>, rows: DroppedRows) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as KernelsOfRows>::drop_rows(x.into_dispatch(), rows))
}

/// −log softmax(logits)\[target\] of every row of `logits: [n, V]`, in fp32, NaN for a target that
/// is not below V; and with a `weight` the gradient of that times their sum in place of the logits,
/// in place where nothing else holds them. Without it, the logits.
pub(crate) fn cross_entropy(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    weight: Option<f32>,
) -> (Tensor<1>, Tensor<2>) {
    assert_eq!(logits.dims()[0], targets.dims()[0], "rows of logits and targets");
    let (logits, targets) = (logits.into_dispatch(), targets.into_dispatch());
    let (gradient, weight) = (weight.is_some(), weight.unwrap_or_default());
    let (losses, logits) =
        <Dispatch as CubeKernels>::cross_entropy(logits, targets, gradient, weight);
    (Tensor::from_dispatch(losses), Tensor::from_dispatch(logits))
}

/// (x − mean)/√(var + eps)·γ + β of the rows of `x: [n, h]`, `gamma`, `beta: [h]` of its type or
/// fp32; and fp32 mean and 1/√(var + eps), `[n]`.
pub(crate) fn layer_norm(
    x: Tensor<2>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    eps: f64,
) -> (Tensor<2>, Tensor<1>, Tensor<1>) {
    check_columns(&x, &[&gamma, &beta]);
    let (x, gamma, beta) = (x.into_dispatch(), gamma.into_dispatch(), beta.into_dispatch());
    let (y, means, rstds) = <Dispatch as CubeKernels>::layer_norm(x, gamma, beta, eps as f32);
    (Tensor::from_dispatch(y), Tensor::from_dispatch(means), Tensor::from_dispatch(rstds))
}

/// The gradient of the input of [`layer_norm`] for `dy` of its type, and its statistics; and those
/// of gamma and beta one after the other, fp32, `[2·h]`.
pub(crate) fn layer_norm_backward(
    dy: Tensor<2>,
    x: Tensor<2>,
    gamma: Tensor<1>,
    means: Tensor<1>,
    rstds: Tensor<1>,
) -> (Tensor<2>, Tensor<1>) {
    check_columns(&x, &[&gamma]);
    check_gradient(&dy, &x, &[&means, &rstds]);
    let (dx, sums) = <Dispatch as CubeKernels>::layer_norm_backward(
        dy.into_dispatch(),
        x.into_dispatch(),
        gamma.into_dispatch(),
        means.into_dispatch(),
        rstds.into_dispatch(),
    );
    (Tensor::from_dispatch(dx), Tensor::from_dispatch(sums))
}

/// x/√(mean(x²) + eps)·γ of the rows of `x: [n, h]`, `gamma: [h]` of its type or fp32, and the
/// fp32 factor of each row, `[n]`.
pub(crate) fn rms_norm(x: Tensor<2>, gamma: Tensor<1>, eps: f64) -> (Tensor<2>, Tensor<1>) {
    check_columns(&x, &[&gamma]);
    let (x, gamma) = (x.into_dispatch(), gamma.into_dispatch());
    let (y, rrms) = <Dispatch as CubeKernels>::rms_norm(x, gamma, eps as f32);
    (Tensor::from_dispatch(y), Tensor::from_dispatch(rrms))
}

/// The gradient of the input of [`rms_norm`] for `dy` of its type, and its factors; and that of
/// gamma, fp32, `[h]`.
pub(crate) fn rms_norm_backward(
    dy: Tensor<2>,
    x: Tensor<2>,
    gamma: Tensor<1>,
    rrms: Tensor<1>,
) -> (Tensor<2>, Tensor<1>) {
    check_columns(&x, &[&gamma]);
    check_gradient(&dy, &x, &[&rrms]);
    let (dx, sums) = <Dispatch as CubeKernels>::rms_norm_backward(
        dy.into_dispatch(),
        x.into_dispatch(),
        gamma.into_dispatch(),
        rrms.into_dispatch(),
    );
    (Tensor::from_dispatch(dx), Tensor::from_dispatch(sums))
}

fn check_columns(x: &Tensor<2>, vectors: &[&Tensor<1>]) {
    for v in vectors {
        assert_eq!(v.dims()[0], x.dims()[1], "of {:?}", x.dims());
        let types = [vectors[0].dtype(), x.dtype(), DType::F32];
        assert!(v.dtype() == types[0] && types[1..].contains(&types[0]), "{types:?}");
    }
}

fn check_gradient(dy: &Tensor<2>, x: &Tensor<2>, statistics: &[&Tensor<1>]) {
    assert_eq!((dy.dims(), dy.dtype()), (x.dims(), x.dtype()));
    for v in statistics {
        assert_eq!((v.dims()[0], v.dtype()), (x.dims()[0], DType::F32), "of {:?}", x.dims());
    }
}
