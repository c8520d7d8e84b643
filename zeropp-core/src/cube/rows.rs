//! What the kernels on rows share: who works on which row, sums over a row's units, and tensors
//! seen as rows.
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
pub(super) const LOWEST: f32 = f32::MIN;

/// How a kernel on rows is launched.
pub(super) struct Launch {
    pub(super) count: CubeCount,
    /// Lanes of a row, and rows.
    pub(super) dim: CubeDim,
}

impl Launch {
    /// For `rows` rows of `width` elements.
    pub(super) fn new(client: &Client, rows: usize, width: usize) -> Self {
        let hardware = &client.properties().hardware;
        let most = hardware.max_units_per_cube.min(hardware.max_cube_dim.0);
        // Powers of two, so that sums can halve.
        let units = UNITS.min(1 << most.ilog2());
        let lanes = if width < LONG { LANES.min(units) } else { units };
        let dim = CubeDim::new_2d(lanes, units / lanes);
        let units = rows.div_ceil(dim.y as usize) * dim.num_elems() as usize;
        Self { count: cubecl::calculate_cube_count_elemwise(client, units, dim), dim }
    }
}

/// The row of this unit. It may lie behind the last one: such units read and write nothing, but
/// take part in all sums, for which a cube waits.
#[cube]
pub(super) fn row_of_unit() -> usize {
    CUBE_POS * CUBE_DIM_Y as usize + UNIT_POS_Y as usize
}

/// The largest `value` among the lanes of a row, for all of them. Every unit of a cube must come
/// here. `dim` as in [`Launch`].
#[cube]
pub(super) fn row_max(value: f32, #[comptime] dim: CubeDim) -> f32 {
    let mut shared = Shared::new_slice(comptime!(dim.num_elems() as usize));
    shared[UNIT_POS as usize] = value;
    sync_cube();
    let mut half = comptime!(dim.x / 2).runtime();
    while half > 0 {
        if UNIT_POS_X < half {
            let other = shared[(UNIT_POS + half) as usize];
            if other > shared[UNIT_POS as usize] {
                shared[UNIT_POS as usize] = other;
            }
        }
        half /= 2;
        sync_cube();
    }
    shared[(UNIT_POS_Y * CUBE_DIM_X) as usize]
}

/// The sum of `value` over the lanes of a row, otherwise like [`row_max`].
#[cube]
pub(super) fn row_sum(value: f32, #[comptime] dim: CubeDim) -> f32 {
    let mut shared = Shared::new_slice(comptime!(dim.num_elems() as usize));
    shared[UNIT_POS as usize] = value;
    sync_cube();
    let mut half = comptime!(dim.x / 2).runtime();
    while half > 0 {
        if UNIT_POS_X < half {
            let other = shared[(UNIT_POS + half) as usize];
            shared[UNIT_POS as usize] += other;
        }
        half /= 2;
        sync_cube();
    }
    shared[(UNIT_POS_Y * CUBE_DIM_X) as usize]
}

/// A tensor whose rows lie at a constant distance.
pub(super) struct Rows {
    pub(super) tensor: CubeTensor,
    /// Number of rows.
    pub(super) n: usize,
    /// Elements of a row.
    pub(super) width: usize,
    /// Elements from the start of a row to that of the next one.
    pub(super) pitch: usize,
}

impl Rows {
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
