//! RMS norms of the heads of queries and keys within the rows of q, k and v.
//!
//! Every head is a row of lanes' own, values too, which pass unchanged.

use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::{DType, Shape, Tensor as Plain};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::columns;
use super::norm::{CUBES, Lanes, RowParts, add_up, lanes};
use super::rows::{
    StridedRows, addresses, empty, kernel_with_weights_for, lane_of_unit, vector_size,
};
use crate::kernels::head_norm::HeadRow;

/// Of `all` heads of a row the first `normed` are normalised, of which the first `queries` by `q`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
fn head_norm_forward_kernel<F: Float, G: Float, N: Size>(
    x: &Tensor<Vector<F, N>>,
    q: &Tensor<Vector<G, N>>,
    k: &Tensor<Vector<G, N>>,
    y: &mut Tensor<Vector<F, N>>,
    scales: &mut Tensor<f32>,
    rows: usize,
    width: usize,
    pitch: usize,
    queries: usize,
    normed: usize,
    all: usize,
    elements: f32,
    eps: f32,
    #[comptime] parts: usize,
    #[comptime] dim: CubeDim,
) {
    let (row, start, step) = lane_of_unit();
    let token = row / all;
    let head = row % all;
    let mut end = 0usize.runtime();
    if row < rows {
        end = width;
    }
    let kept = RowParts::<N>::read::<F>(x, token * pitch + head * width, end, parts);
    let mut scale = kept.scale(elements, eps, parts, dim);
    if head >= normed {
        scale = 1.0f32.runtime();
    } else if start == 0 && row < rows {
        scales[token * normed + head] = scale;
    }
    #[unroll]
    for part in 0..parts {
        let i = start + part * step;
        if i < end {
            let mut gamma = Vector::<f32, N>::new(1.0f32);
            if head < queries {
                gamma = Vector::cast_from(q[i]);
            } else if head < normed {
                gamma = Vector::cast_from(k[i]);
            }
            let value = kept.values[part] * Vector::new(scale) * gamma;
            y[row * width + i] = Vector::cast_from(value);
        }
    }
}

/// Adds a part of a head, dy and x·scale, to the gradient of its weight, which is that of queries
/// or `k`; and dy·γ.
#[cube]
fn add_head<G: Float, N: Size>(
    lanes: &mut Lanes<N>,
    d: Vector<f32, N>,
    hat: Vector<f32, N>,
    k: &Tensor<Vector<G, N>>,
    i: usize,
    is_query: bool,
    #[comptime] part: usize,
) -> Vector<f32, N> {
    let mut slope = d * lanes.gamma[part];
    if is_query {
        lanes.dgamma[part] += d * hat;
    } else {
        lanes.dbeta[part] += d * hat;
        slope = d * Vector::cast_from(k[i]);
    }
    slope
}

/// Rows of lanes take every n-th head, `rounds` of them; a cube's sum the gradients of q's weight,
/// and of k's after it, over their heads: a row of `sums`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
fn head_norm_backward_kernel<F: Float, G: Float, N: Size>(
    dy: &Tensor<Vector<F, N>>,
    x: &Tensor<Vector<F, N>>,
    q: &Tensor<Vector<G, N>>,
    k: &Tensor<Vector<G, N>>,
    scales: &Tensor<f32>,
    dx: &mut Tensor<Vector<F, N>>,
    sums: &mut Tensor<Vector<f32, N>>,
    rows: usize,
    width: usize,
    dy_pitch: usize,
    pitch: usize,
    queries: usize,
    normed: usize,
    all: usize,
    rounds: usize,
    at_a_time: usize,
    elements: f32,
    #[comptime] parts: usize,
    #[comptime] dim: CubeDim,
) {
    let (first, start, step) = lane_of_unit();
    // Its gamma is that of queries, the sums those of queries' and keys' weights.
    let mut lanes = Lanes::<N>::new::<G>(q, width, parts);
    for round in 0..rounds {
        let row = first + round * at_a_time;
        let token = row / all;
        let head = row % all;
        let mut end = 0usize.runtime();
        let mut scale = 1.0f32.runtime();
        if row < rows {
            end = width;
            if head < normed {
                scale = scales[token * normed + head];
            }
        }
        #[unroll]
        for part in 0..parts {
            let i = start + part * step;
            let mut hat = Vector::<f32, N>::new(0.0f32);
            let mut slope = Vector::<f32, N>::new(0.0f32);
            if i < end {
                let d = Vector::<f32, N>::cast_from(dy[token * dy_pitch + head * width + i]);
                slope = d;
                if head < normed {
                    let value = Vector::<f32, N>::cast_from(x[token * pitch + head * width + i]);
                    hat = value * Vector::new(scale);
                    slope = add_head::<G, N>(&mut lanes, d, hat, k, i, head < queries, part);
                }
            }
            lanes.hats[part] = hat;
            lanes.slopes[part] = slope;
        }
        lanes.write::<F>(dx, row * width, end, scale, elements, false, parts, dim);
    }
    add_up::<N>(&lanes, sums, width, true, parts, dim);
}

#[backend_extension(Cube, Fusion)]
trait HeadNormKernels: Backend {
    #[fusion(meta = normed_of)]
    fn head_norm(
        qkv: FloatTensor<Self>,
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        at: HeadRow,
        eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    #[fusion(meta = gradients_of)]
    fn head_norm_backward(
        dy: FloatTensor<Self>,
        qkv: FloatTensor<Self>,
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        rrms: FloatTensor<Self>,
        at: HeadRow,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

impl HeadNormKernels for CubeBackend {
    fn head_norm(
        qkv: FloatTensor<Self>,
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        at: HeadRow,
        eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        forward(qkv, [q, k], at, eps)
    }

    fn head_norm_backward(
        dy: FloatTensor<Self>,
        qkv: FloatTensor<Self>,
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        rrms: FloatTensor<Self>,
        at: HeadRow,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        backward([dy, qkv], [q, k], rrms, at)
    }
}

fn normed_of(
    qkv: &TensorSpec,
    _q: &TensorSpec,
    _k: &TensorSpec,
    at: &HeadRow,
    _eps: &f32,
) -> (TensorSpec, TensorSpec) {
    let scales = Shape::new([qkv.shape[0] * (at.heads + at.groups)]);
    (qkv.clone(), TensorSpec::new(scales, DType::F32))
}

fn gradients_of(
    dy: &TensorSpec,
    _qkv: &TensorSpec,
    q: &TensorSpec,
    _k: &TensorSpec,
    _rrms: &TensorSpec,
    _at: &HeadRow,
) -> (TensorSpec, TensorSpec) {
    (dy.clone(), TensorSpec::new(Shape::new([2 * q.shape[0]]), DType::F32))
}

/// Every query of `qkv: [n, (heads + 2·groups)·d]` over its root mean square times `q: [d]`, every
/// key likewise with `k: [d]`, of its type or fp32, values unchanged; and the fp32 factor of each
/// query and key, `[n·(heads + groups)]`.
pub(crate) fn head_norm(
    qkv: Plain<2>,
    [q, k]: [Plain<1>; 2],
    at: HeadRow,
    eps: f64,
) -> (Plain<2>, Plain<1>) {
    check(&qkv, [&q, &k], at);
    let (qkv, q, k) = (qkv.into_dispatch(), q.into_dispatch(), k.into_dispatch());
    let (y, rrms) = <Dispatch as HeadNormKernels>::head_norm(qkv, q, k, at, eps as f32);
    (Plain::from_dispatch(y), Plain::from_dispatch(rrms))
}

/// The gradient of qkv in [`head_norm`] for `dy` of its type, and its factors; and those of q's
/// weight and k's one after the other, fp32, `[2·d]`.
pub(crate) fn head_norm_backward(
    dy: Plain<2>,
    qkv: Plain<2>,
    [q, k]: [Plain<1>; 2],
    rrms: Plain<1>,
    at: HeadRow,
) -> (Plain<2>, Plain<1>) {
    check(&qkv, [&q, &k], at);
    assert_eq!((dy.dims(), dy.dtype(), rrms.dtype()), (qkv.dims(), qkv.dtype(), DType::F32));
    assert_eq!(rrms.dims(), [qkv.dims()[0] * (at.heads + at.groups)]);
    let (dy, qkv, rrms) = (dy.into_dispatch(), qkv.into_dispatch(), rrms.into_dispatch());
    let (q, k) = (q.into_dispatch(), k.into_dispatch());
    let (dx, sums) = <Dispatch as HeadNormKernels>::head_norm_backward(dy, qkv, q, k, rrms, at);
    (Plain::from_dispatch(dx), Plain::from_dispatch(sums))
}

fn check(qkv: &Plain<2>, [q, k]: [&Plain<1>; 2], at: HeadRow) {
    let ([_, width], [d]) = (qkv.dims(), q.dims());
    assert!((at.heads + 2 * at.groups) * d == width && k.dims() == [d], "{at:?} of {d} in {width}");
    assert!(q.dtype() == k.dtype() && [qkv.dtype(), DType::F32].contains(&q.dtype()));
}

/// The heads of all rows, as rows, where the kernels write.
fn heads_of(qkv: &StridedRows, at: HeadRow) -> StridedRows {
    let all = at.heads + 2 * at.groups;
    let (n, width) = (qkv.n * all, qkv.width / all);
    StridedRows { tensor: qkv.empty_like(qkv.tensor.dtype).tensor, n, width, pitch: width }
}

fn forward(
    qkv: CubeTensor,
    weights: [CubeTensor; 2],
    at: HeadRow,
    eps: f32,
) -> (CubeTensor, CubeTensor) {
    let (x, [q, k]) = (StridedRows::of(qkv), weights.map(into_contiguous));
    let heads = heads_of(&x, at);
    let (y, d, normed) = (&heads.tensor, heads.width, at.heads + at.groups);
    let scales = empty(y, Shape::new([x.n * normed]), DType::F32);
    let launch = heads.launch();
    let vector = vector_size(&[&x.tensor, y, &q, &k], &[d, x.pitch]);
    let kernel = kernel_with_weights_for!(head_norm_forward_kernel, y.dtype, q.dtype, "a norm");
    // SAFETY: a unit stays below the heads of `x` and their elements, which `y` has too; `scales`
    // has a number for each that is normalised.
    unsafe {
        kernel(
            &launch.client,
            launch.count,
            launch.dim,
            addresses(&[&x.tensor]),
            vector,
            x.tensor.clone().into_tensor_arg(),
            q.into_tensor_arg(),
            k.into_tensor_arg(),
            y.clone().into_tensor_arg(),
            scales.clone().into_tensor_arg(),
            heads.n,
            d / vector,
            x.pitch / vector,
            at.heads,
            normed,
            normed + at.groups,
            d as f32,
            eps,
            (d / vector).div_ceil(launch.dim.x as usize),
            launch.dim,
        );
    }
    (heads.tensor, scales)
}

fn backward(
    [dy, qkv]: [CubeTensor; 2],
    weights: [CubeTensor; 2],
    scales: CubeTensor,
    at: HeadRow,
) -> (CubeTensor, CubeTensor) {
    let (dy, x) = (StridedRows::of(dy), StridedRows::of(qkv));
    let ([q, k], scales) = (weights.map(into_contiguous), into_contiguous(scales));
    let heads = heads_of(&dy, at);
    let (dx, d, normed) = (&heads.tensor, heads.width, at.heads + at.groups);
    let launch = heads.launch();
    let vector = vector_size(&[&dy.tensor, &x.tensor, dx, &q, &k], &[d, x.pitch, dy.pitch]);
    let units = launch.dim.num_elems();
    let lanes = lanes(d / vector, units as usize);
    let dim = CubeDim::new_2d(lanes as u32, units / lanes as u32);
    let rows_of_lanes = dim.y as usize;
    let cubes = heads.n.div_ceil(rows_of_lanes).min(CUBES);
    let sums = empty(dx, Shape::new([cubes, 2 * d]), DType::F32);
    let kernel = kernel_with_weights_for!(head_norm_backward_kernel, dx.dtype, q.dtype, "a norm");
    // SAFETY: as in `forward`; `dy` and `dx` have the shape of `x`, and `sums` has a row for each
    // cube.
    unsafe {
        kernel(
            &launch.client,
            CubeCount::Static(cubes as u32, 1, 1),
            dim,
            addresses(&[&dy.tensor, &x.tensor]),
            vector,
            dy.tensor.clone().into_tensor_arg(),
            x.tensor.into_tensor_arg(),
            q.into_tensor_arg(),
            k.into_tensor_arg(),
            scales.into_tensor_arg(),
            dx.clone().into_tensor_arg(),
            sums.clone().into_tensor_arg(),
            heads.n,
            d / vector,
            dy.pitch / vector,
            x.pitch / vector,
            at.heads,
            normed,
            normed + at.groups,
            heads.n.div_ceil(cubes * rows_of_lanes),
            cubes * rows_of_lanes,
            d as f32,
            (d / vector).div_ceil(lanes),
            dim,
        );
    }
    (heads.tensor, columns::sums(sums))
}
