//! What the kernels on rows share: who works on which row, sums over a row's units, and tensors
//! seen as rows.
//!
//! A row belongs to one plane where the device has planes of one size, several rows to a cube;
//! elsewhere to one cube, whose units meet in shared memory. Units take every `width`-th element,
//! so that neighbours read neighbours.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::features::Plane;
use cubecl::prelude::*;

/// Units of a cube that share one row where there are no planes, or rows are long.
const UNITS: u32 = 256;
/// Rows from here on get a whole cube: a plane would walk them in more than 64 steps.
const LONG: usize = 2048;
/// Where the search for a row's largest number begins. WGSL has no literal for −∞.
pub(super) const LOWEST: f32 = f32::MIN;

/// How a kernel on rows is launched.
pub(super) struct Launch {
    pub(super) count: CubeCount,
    pub(super) dim: CubeDim,
    /// Whether a row belongs to a plane, not to a cube.
    pub(super) planes: bool,
}

impl Launch {
    /// For `rows` rows of `width` elements.
    pub(super) fn new(client: &Client, rows: usize, width: usize) -> Self {
        let properties = client.properties();
        let (hardware, features) = (&properties.hardware, &properties.features);
        let plane = hardware.plane_size_max;
        let planes = width < LONG
            && features.plane.contains(Plane::Ops)
            && hardware.plane_size_min == plane
            && plane > 1;
        let most = hardware.max_units_per_cube.min(hardware.max_cube_dim.0);
        // A power of two, so that sums in shared memory can halve.
        let units = UNITS.min(1 << most.ilog2());
        let dim = if planes {
            CubeDim::new_2d(plane, (units / plane).max(1))
        } else {
            CubeDim::new_1d(units)
        };
        let cubes = rows.div_ceil(if planes { dim.y as usize } else { 1 });
        let count =
            cubecl::calculate_cube_count_elemwise(client, cubes * dim.num_elems() as usize, dim);
        Self { count, dim, planes }
    }
}

/// The row of this unit; may lie behind the last one.
#[cube]
pub(super) fn row_of_unit() -> usize {
    CUBE_POS * CUBE_DIM_Y as usize + UNIT_POS_Y as usize
}

/// The largest `value` among the units of a row, for all of them.
#[cube]
pub(super) fn row_max(value: f32, #[comptime] units: u32, #[comptime] planes: bool) -> f32 {
    if comptime!(planes) {
        plane_max(value)
    } else {
        let mut shared = Shared::new_slice(comptime!(units as usize));
        shared[UNIT_POS as usize] = value;
        sync_cube();
        let mut half = comptime!(units / 2).runtime();
        while half > 0 {
            if UNIT_POS < half {
                let other = shared[(UNIT_POS + half) as usize];
                if other > shared[UNIT_POS as usize] {
                    shared[UNIT_POS as usize] = other;
                }
            }
            half /= 2;
            sync_cube();
        }
        shared[0]
    }
}

/// The sum of `value` over the units of a row, for all of them.
#[cube]
pub(super) fn row_sum(value: f32, #[comptime] units: u32, #[comptime] planes: bool) -> f32 {
    if comptime!(planes) {
        plane_sum(value)
    } else {
        let mut shared = Shared::new_slice(comptime!(units as usize));
        shared[UNIT_POS as usize] = value;
        sync_cube();
        let mut half = comptime!(units / 2).runtime();
        while half > 0 {
            if UNIT_POS < half {
                let other = shared[(UNIT_POS + half) as usize];
                shared[UNIT_POS as usize] += other;
            }
            half /= 2;
            sync_cube();
        }
        shared[0]
    }
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
    let constant = (0..d - 2).all(|i| strides[i] == strides[i + 1] * shape[i + 1]);
    constant.then_some(strides[d - 2])
}
