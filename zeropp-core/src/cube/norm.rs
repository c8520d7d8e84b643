//! Layer norm and RMS norm of rows: forward, the gradient of their input, and with that those of
//! gamma and beta.
//!
//! A row stays in the registers of its lanes, which take `parts` vectors of it each, so that it is
//! read once.

use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::columns;
use super::rows::{
    StridedRows, addresses, empty, kernel_with_weights_for, lane_of_unit, row_sum, vector_size,
};

/// Cubes of a backward, each of which sums the gradients of gamma and beta over its rows. A
/// constant, so that these sums have the same bits in every run.
pub(super) const CUBES: usize = 256;

/// What a lane holds of a row in a forward; zeros behind its end.
#[derive(CubeType)]
pub(super) struct RowParts<N: Size> {
    pub(super) values: Array<Vector<f32, N>>,
}

#[cube]
impl<N: Size> RowParts<N> {
    /// The row's vectors before `end`, the first of which is at `from`.
    pub(super) fn read<F: Float>(
        x: &Tensor<Vector<F, N>>,
        from: usize,
        end: usize,
        #[comptime] parts: usize,
    ) -> RowParts<N> {
        let (_, start, step) = lane_of_unit();
        let mut kept = RowParts::<N> { values: Array::new(parts) };
        #[unroll]
        for part in 0..parts {
            let i = start + part * step;
            let mut value = Vector::<f32, N>::new(0.0f32);
            if i < end {
                value = Vector::cast_from(x[from + i]);
            }
            kept.values[part] = value;
        }
        kept
    }

    /// Takes the mean of the row's `elements` from each of them, and returns it.
    fn center(
        &mut self,
        end: usize,
        elements: f32,
        #[comptime] parts: usize,
        #[comptime] dim: CubeDim,
    ) -> f32 {
        let (_, start, step) = lane_of_unit();
        let mut sum = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for part in 0..parts {
            sum += self.values[part];
        }
        let mean = row_sum(sum.vector_sum(), dim) / elements;
        #[unroll]
        for part in 0..parts {
            if start + part * step < end {
                self.values[part] -= Vector::new(mean);
            }
        }
        mean
    }

    /// 1/√(mean square of the row's `elements` + eps).
    pub(super) fn scale(
        &self,
        elements: f32,
        eps: f32,
        #[comptime] parts: usize,
        #[comptime] dim: CubeDim,
    ) -> f32 {
        let mut squares = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for part in 0..parts {
            squares += self.values[part] * self.values[part];
        }
        1.0 / (row_sum(squares.vector_sum(), dim) / elements + eps).sqrt()
    }
}

/// With `centered` a layer norm; without, an RMS norm, which has neither means nor beta.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
fn forward_kernel<F: Float, G: Float, N: Size>(
    x: &Tensor<Vector<F, N>>,
    gamma: &Tensor<Vector<G, N>>,
    beta: &Tensor<Vector<G, N>>,
    y: &mut Tensor<Vector<F, N>>,
    means: &mut Tensor<f32>,
    scales: &mut Tensor<f32>,
    rows: usize,
    width: usize,
    pitch: usize,
    elements: f32,
    eps: f32,
    #[comptime] centered: bool,
    #[comptime] parts: usize,
    #[comptime] dim: CubeDim,
) {
    let (row, start, step) = lane_of_unit();
    let mut end = 0usize.runtime();
    if row < rows {
        end = width;
    }
    let mut kept = RowParts::<N>::read::<F>(x, row * pitch, end, parts);
    if comptime!(centered) {
        let mean = kept.center(end, elements, parts, dim);
        if start == 0 && row < rows {
            means[row] = mean;
        }
    }
    let scale = kept.scale(elements, eps, parts, dim);
    if start == 0 && row < rows {
        scales[row] = scale;
    }
    #[unroll]
    for part in 0..parts {
        let i = start + part * step;
        if i < end {
            let mut value = kept.values[part] * Vector::new(scale) * Vector::cast_from(gamma[i]);
            if comptime!(centered) {
                value += Vector::cast_from(beta[i]);
            }
            y[row * width + i] = Vector::cast_from(value);
        }
    }
}

/// What the lanes of one row hold in a backward: their parts of the row and of the gradients.
#[derive(CubeType)]
pub(super) struct Lanes<N: Size> {
    pub(super) gamma: Array<Vector<f32, N>>,
    pub(super) dgamma: Array<Vector<f32, N>>,
    pub(super) dbeta: Array<Vector<f32, N>>,
    /// (x − mean)·scale.
    pub(super) hats: Array<Vector<f32, N>>,
    /// dy·γ.
    pub(super) slopes: Array<Vector<f32, N>>,
}

#[cube]
impl<N: Size> Lanes<N> {
    pub(super) fn new<G: Float>(
        gamma: &Tensor<Vector<G, N>>,
        width: usize,
        #[comptime] parts: usize,
    ) -> Lanes<N> {
        let (_, start, step) = lane_of_unit();
        let mut lanes = Lanes::<N> {
            gamma: Array::new(parts),
            dgamma: Array::new(parts),
            dbeta: Array::new(parts),
            hats: Array::new(parts),
            slopes: Array::new(parts),
        };
        #[unroll]
        for part in 0..parts {
            let i = start + part * step;
            let mut value = Vector::<f32, N>::new(0.0f32);
            if i < width {
                value = Vector::cast_from(gamma[i]);
            }
            lanes.gamma[part] = value;
            lanes.dgamma[part] = Vector::new(0.0f32);
            lanes.dbeta[part] = Vector::new(0.0f32);
        }
        lanes
    }

    /// Adds a part of a row, dy and (x − mean)·scale, to the gradients.
    fn add(
        &mut self,
        d: Vector<f32, N>,
        hat: Vector<f32, N>,
        #[comptime] centered: bool,
        #[comptime] part: usize,
    ) {
        self.dgamma[part] += d * hat;
        if comptime!(centered) {
            self.dbeta[part] += d;
        }
        self.hats[part] = hat;
        self.slopes[part] = d * self.gamma[part];
    }

    /// Writes the gradient of a row before `end` from `to` on: what the hats and slopes of its
    /// `elements` leave after their means are taken off.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn write<F: Float>(
        &self,
        dx: &mut Tensor<Vector<F, N>>,
        to: usize,
        end: usize,
        scale: f32,
        elements: f32,
        #[comptime] centered: bool,
        #[comptime] parts: usize,
        #[comptime] dim: CubeDim,
    ) {
        let (_, start, step) = lane_of_unit();
        let mut plain = Vector::<f32, N>::new(0.0f32);
        let mut weighted = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for part in 0..parts {
            plain += self.slopes[part];
            weighted += self.slopes[part] * self.hats[part];
        }
        let c2 = row_sum(weighted.vector_sum(), dim) / elements;
        let mut c1 = 0.0f32.runtime();
        if comptime!(centered) {
            c1 = row_sum(plain.vector_sum(), dim) / elements;
        }
        #[unroll]
        for part in 0..parts {
            let i = start + part * step;
            if i < end {
                let slope = self.slopes[part] - Vector::new(c1) - self.hats[part] * Vector::new(c2);
                dx[to + i] = Vector::cast_from(slope * Vector::new(scale));
            }
        }
        // The next row's sums take the places of this one's, which all lanes must have read.
        sync_cube();
    }
}

/// Rows of lanes take every n-th row, `rounds` of them, and a cube's rows of lanes sum dγ, and with
/// `centered` dβ after it, over their rows: a row of `sums`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
fn backward_kernel<F: Float, G: Float, N: Size>(
    dy: &Tensor<Vector<F, N>>,
    x: &Tensor<Vector<F, N>>,
    gamma: &Tensor<Vector<G, N>>,
    means: &Tensor<f32>,
    scales: &Tensor<f32>,
    dx: &mut Tensor<Vector<F, N>>,
    sums: &mut Tensor<Vector<f32, N>>,
    rows: usize,
    width: usize,
    dy_pitch: usize,
    pitch: usize,
    rounds: usize,
    at_a_time: usize,
    elements: f32,
    #[comptime] centered: bool,
    #[comptime] parts: usize,
    #[comptime] dim: CubeDim,
) {
    let (first, start, step) = lane_of_unit();
    let mut lanes = Lanes::<N>::new::<G>(gamma, width, parts);
    for round in 0..rounds {
        let row = first + round * at_a_time;
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
        #[unroll]
        for part in 0..parts {
            let i = start + part * step;
            let mut hat = Vector::<f32, N>::new(0.0f32);
            let mut d = Vector::<f32, N>::new(0.0f32);
            if i < end {
                let value = Vector::<f32, N>::cast_from(x[row * pitch + i]);
                hat = (value - Vector::new(mean)) * Vector::new(scale);
                d = Vector::cast_from(dy[row * dy_pitch + i]);
            }
            lanes.add(d, hat, centered, part);
        }
        lanes.write::<F>(dx, row * width, end, scale, elements, centered, parts, dim);
    }
    add_up::<N>(&lanes, sums, width, centered, parts, dim);
}

/// Writes the sums of a cube's rows of lanes to its row of `sums`.
#[cube]
pub(super) fn add_up<N: Size>(
    lanes: &Lanes<N>,
    sums: &mut Tensor<Vector<f32, N>>,
    width: usize,
    #[comptime] centered: bool,
    #[comptime] parts: usize,
    #[comptime] dim: CubeDim,
) {
    let (_, start, step) = lane_of_unit();
    let vectors = comptime!(if centered { 2usize } else { 1usize });
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(comptime!(dim.num_elems() as usize));
    #[unroll]
    for part in 0..parts {
        #[unroll]
        for vector in 0..vectors {
            let mut total = lanes.dgamma[part];
            if comptime!(vector == 1) {
                total = lanes.dbeta[part];
            }
            if comptime!(dim.y > 1) {
                shared[UNIT_POS as usize] = total;
                sync_cube();
                let mut other = UNIT_POS_X + CUBE_DIM_X;
                while other < CUBE_DIM_X * CUBE_DIM_Y {
                    total += shared[other as usize];
                    other += CUBE_DIM_X;
                }
                sync_cube();
            }
            let i = start + part * step;
            if UNIT_POS_Y == 0 && i < width {
                sums[(CUBE_POS * vectors + vector) * width + i] = total;
            }
        }
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
    let vector = vector_size(&[&x.tensor, &y, &gamma, &beta], &[x.width, x.pitch]);
    let kernel = kernel_with_weights_for!(forward_kernel, y.dtype, gamma.dtype, "a norm");
    // SAFETY: a unit stays below the rows and the width of `x`, which `y` has too; the vectors
    // have one element a row (`means` only where it is written) or a column.
    unsafe {
        kernel(
            &at.client,
            at.count,
            at.dim,
            addresses(&[&x.tensor]),
            vector,
            x.tensor.into_tensor_arg(),
            gamma.into_tensor_arg(),
            beta.into_tensor_arg(),
            y.clone().into_tensor_arg(),
            means.clone().into_tensor_arg(),
            scales.clone().into_tensor_arg(),
            x.n,
            x.width / vector,
            x.pitch / vector,
            x.width as f32,
            eps,
            centered,
            (x.width / vector).div_ceil(at.dim.x as usize),
            at.dim,
        );
    }
    (y, means, scales)
}

/// Lanes of a row of so many vectors in a backward, of at most `units`: two vectors a lane, as each
/// holds five numbers of every element.
pub(super) fn lanes(vectors: usize, units: usize) -> usize {
    vectors.div_ceil(2).next_power_of_two().clamp(32.min(units), units)
}

/// See [`layer_norm_backward`](super::layer_norm_backward); without `means` that of an RMS norm,
/// which has no gradient of beta.
pub(super) fn backward(
    dy: CubeTensor,
    x: CubeTensor,
    gamma: CubeTensor,
    means: Option<CubeTensor>,
    scales: CubeTensor,
) -> (CubeTensor, CubeTensor) {
    let (dy, x) = (StridedRows::of(dy), StridedRows::of(x));
    let (gamma, scales) = (into_contiguous(gamma), into_contiguous(scales));
    let centered = means.is_some();
    let means = means.map_or_else(|| scales.clone(), into_contiguous);
    let dx = dy.empty_like(dy.tensor.dtype).tensor;
    let at = dy.launch();
    let read = [&dy.tensor, &x.tensor, &gamma, &dx];
    let vector = vector_size(&read, &[x.width, x.pitch, dy.pitch]);
    let units = at.dim.num_elems();
    let lanes = lanes(x.width / vector, units as usize);
    let dim = CubeDim::new_2d(lanes as u32, units / lanes as u32);
    let rows_of_lanes = dim.y as usize;
    let cubes = x.n.div_ceil(rows_of_lanes).min(CUBES);
    let all = if centered { 2 * x.width } else { x.width };
    let sums = empty(&dx, Shape::new([cubes, all]), DType::F32);
    let kernel = kernel_with_weights_for!(backward_kernel, dx.dtype, gamma.dtype, "a norm");
    // SAFETY: as in `forward`; `dy` and `dx` have the shape of `x`, and `sums` has a row for each
    // cube.
    unsafe {
        kernel(
            &at.client,
            CubeCount::Static(cubes as u32, 1, 1),
            dim,
            addresses(&[&dy.tensor, &x.tensor]),
            vector,
            dy.tensor.into_tensor_arg(),
            x.tensor.into_tensor_arg(),
            gamma.into_tensor_arg(),
            means.into_tensor_arg(),
            scales.into_tensor_arg(),
            dx.clone().into_tensor_arg(),
            sums.clone().into_tensor_arg(),
            x.n,
            x.width / vector,
            dy.pitch / vector,
            x.pitch / vector,
            x.n.div_ceil(cubes * rows_of_lanes),
            cubes * rows_of_lanes,
            x.width as f32,
            centered,
            (x.width / vector).div_ceil(lanes),
            dim,
        );
    }
    (dx, columns::sums(sums))
}
