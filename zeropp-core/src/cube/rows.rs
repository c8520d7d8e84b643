//! The shared parts of the kernels on rows: which unit works on which row, sums over a row's units,
//! and tensors seen as rows.
//!
//! The units of a cube are cut into rows of lanes: a few rows of 32 lanes each where rows are
//! short, one of all lanes where they are long. Lanes take every n-th element, so that neighbours
//! read neighbours, and meet in shared memory: plane operations would save some steps, but not
//! every device has them, and what runs on one GPU shall be what is tested on another.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;

/// Units of a cube.
const UNITS: u32 = 256;
/// Lanes of a short row.
const LANES: u32 = 32;
/// Rows from here on get all units of a cube: 32 lanes would walk them in 64 steps and more.
const LONG: usize = 2048;
/// Where the search for a row's largest number begins. WGSL has no literal for −∞.
const LOWEST: f32 = f32::MIN;

/// How a kernel on rows is launched.
pub(super) struct RowsLaunch {
    pub(super) client: Client,
    pub(super) count: CubeCount,
    /// Lanes of a row, and rows.
    pub(super) dim: CubeDim,
}

/// The launch of `$kernel` for floats of type `$dtype`; `$what` is in the message where it has
/// none.
macro_rules! kernel_for {
    ($kernel:ident, $dtype:expr, $what:literal) => {
        match $dtype {
            burn::tensor::DType::F32 => $kernel::launch_unchecked::<f32>,
            burn::tensor::DType::BF16 => $kernel::launch_unchecked::<burn::tensor::bf16>,
            burn::tensor::DType::F16 => $kernel::launch_unchecked::<burn::tensor::f16>,
            other => panic!("{} in {other:?}: f32, bf16 and f16 are supported", $what),
        }
    };
}
pub(super) use kernel_for;

/// The launch of `$kernel` for floats of type `$dtype`, beside weights that have that type or are
/// f32.
macro_rules! kernel_with_weights_for {
    ($kernel:ident, $dtype:expr, $weights:expr, $what:literal) => {{
        use burn::tensor::{DType, bf16, f16};
        match ($dtype, $weights) {
            (DType::F32, DType::F32) => $kernel::launch_unchecked::<f32, f32>,
            (DType::BF16, DType::F32) => $kernel::launch_unchecked::<bf16, f32>,
            (DType::BF16, DType::BF16) => $kernel::launch_unchecked::<bf16, bf16>,
            (DType::F16, DType::F32) => $kernel::launch_unchecked::<f16, f32>,
            (DType::F16, DType::F16) => $kernel::launch_unchecked::<f16, f16>,
            other => panic!("{} in {other:?}: f32, bf16 and f16 are supported", $what),
        }
    }};
}
pub(super) use kernel_with_weights_for;

/// The row of this unit, its first element there, and the distance to its next one. The row may lie
/// behind the last one: such units read and write nothing, but take part in all sums, for which a
/// cube waits.
#[cube]
pub(super) fn lane_of_unit() -> (usize, usize, usize) {
    let row = CUBE_POS * CUBE_DIM_Y as usize + UNIT_POS_Y as usize;
    (row, UNIT_POS_X as usize, CUBE_DIM_X as usize)
}

/// The sum of `value` over the lanes of a row, or the `largest`, for all of them. Every unit of a
/// cube must come here. `dim` as in [`RowsLaunch`].
#[cube]
fn row_fold(value: f32, #[comptime] largest: bool, #[comptime] dim: CubeDim) -> f32 {
    let mut shared = Shared::new_slice(comptime!(dim.num_elems() as usize));
    shared[UNIT_POS as usize] = value;
    sync_cube();
    let mut half = comptime!(dim.x / 2).runtime();
    while half > 0 {
        if UNIT_POS_X < half {
            let other = shared[(UNIT_POS + half) as usize];
            if comptime!(largest) {
                if other > shared[UNIT_POS as usize] {
                    shared[UNIT_POS as usize] = other;
                }
            } else {
                shared[UNIT_POS as usize] += other;
            }
        }
        half /= 2;
        sync_cube();
    }
    shared[(UNIT_POS_Y * CUBE_DIM_X) as usize]
}

/// The sum of `value` over the lanes of a row, as in [`row_fold`].
#[cube]
pub(super) fn row_sum(value: f32, #[comptime] dim: CubeDim) -> f32 {
    row_fold(value, false, dim)
}

/// A sum of exponentials as multiples of e to the largest of their exponents, so that none
/// overflows.
#[derive(CubeType)]
pub(super) struct ExpSum {
    top: f32,
    sum: f32,
}

#[cube]
impl ExpSum {
    pub(super) fn empty() -> Self {
        ExpSum { top: LOWEST.runtime(), sum: 0.0f32.runtime() }
    }

    /// Adds e to the `exponent`.
    pub(super) fn add(&mut self, exponent: f32) {
        if exponent > self.top {
            self.sum = self.sum * (self.top - exponent).exp() + 1.0;
            self.top = exponent;
        } else {
            self.sum += (exponent - self.top).exp();
        }
    }

    /// Adds e to each of the `n` elements of `exponents`.
    pub(super) fn add_vector<N: Size>(&mut self, exponents: Vector<f32, N>, #[comptime] n: usize) {
        let mut top = self.top;
        #[unroll]
        for i in 0..n {
            let exponent = exponents.extract(i);
            if exponent > top {
                top = exponent;
            }
        }
        if top > self.top {
            self.sum *= (self.top - top).exp();
            self.top = top;
        }
        #[unroll]
        for i in 0..n {
            self.sum += (exponents.extract(i) - top).exp();
        }
    }

    /// The largest exponent and the sum over all lanes of a row, as in [`row_fold`].
    pub(super) fn of_row(&self, #[comptime] dim: CubeDim) -> (f32, f32) {
        let top = row_fold(self.top, true, dim);
        (top, row_sum(self.sum * (self.top - top).exp(), dim))
    }
}

/// A tensor whose rows lie at a constant distance.
pub(super) struct StridedRows {
    pub(super) tensor: CubeTensor,
    /// Number of rows.
    pub(super) n: usize,
    /// Elements of a row.
    pub(super) width: usize,
    /// Elements from the start of a row to that of the next one.
    pub(super) pitch: usize,
}

impl StridedRows {
    /// Copies only what lies otherwise.
    pub(super) fn of(tensor: CubeTensor) -> Self {
        let tensor = if pitch(&tensor).is_some() { tensor } else { into_contiguous(tensor) };
        let pitch = pitch(&tensor).expect("contiguous");
        let shape = tensor.shape();
        let width = shape[shape.num_dims() - 1];
        Self { n: shape.num_elements() / width.max(1), width, pitch, tensor }
    }

    /// A tensor of the same shape in `dtype`, not yet written.
    pub(super) fn empty_like(&self, dtype: DType) -> Self {
        let tensor = empty(&self.tensor, self.tensor.shape(), dtype);
        Self { pitch: self.width, tensor, ..*self }
    }

    /// How a kernel on these rows is launched.
    pub(super) fn launch(&self) -> RowsLaunch {
        let client = self.tensor.client.clone();
        let hardware = &client.properties().hardware;
        let most = hardware.max_units_per_cube.min(hardware.max_cube_dim.0);
        // Powers of two, so that sums can halve.
        let units = UNITS.min(1 << most.ilog2());
        let lanes = if self.width < LONG { LANES.min(units) } else { units };
        let dim = CubeDim::new_2d(lanes, units / lanes);
        let units = self.n.div_ceil(dim.y as usize) * dim.num_elems() as usize;
        let count = cubecl::calculate_cube_count_elemwise(&client, units, dim);
        RowsLaunch { client, count, dim }
    }
}

/// The elements that a unit reads at once: a divisor of all `lengths`, which are those of rows and
/// their distances, such that a vector of the narrowest of `tensors` is no larger than what a
/// device loads at once, and all begin at a multiple of theirs.
pub(super) fn vector_size(tensors: &[&CubeTensor], lengths: &[usize]) -> usize {
    let sizes = tensors.iter().map(|t| t.dtype.size());
    let narrowest = sizes.min().expect("kernels read something");
    let fits = |n: &usize| {
        let starts = |t: &CubeTensor| t.handle.offset_start.unwrap_or(0) as usize;
        lengths.iter().all(|length| length.is_multiple_of(*n))
            && tensors.iter().all(|t| starts(t).is_multiple_of(n * t.dtype.size()))
    };
    let client = &tensors[0].client;
    client.io_optimized_vector_sizes(narrowest).filter(fits).max().unwrap_or(1)
}

/// The type of indices that reach every element of `tensors`.
pub(super) fn addresses(tensors: &[&CubeTensor]) -> AddressType {
    tensors.iter().map(|t| t.required_address_type()).max().unwrap_or_default()
}

/// A contiguous tensor beside `t`, not yet written.
pub(super) fn empty(t: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(t.client.clone(), t.device.clone(), shape, dtype)
}

fn pitch(t: &CubeTensor) -> Option<usize> {
    let (shape, strides) = (t.shape(), t.meta.strides());
    let d = shape.num_dims();
    if t.qparams.is_some() || t.meta.is_tiled() || strides[d - 1] != 1 {
        return None;
    }
    if d == 1 {
        return Some(shape[0]);
    }
    let constant = (0..d - 2).all(|i| shape[i] == 1 || strides[i] == strides[i + 1] * shape[i + 1]);
    constant.then_some(strides[d - 2])
}
