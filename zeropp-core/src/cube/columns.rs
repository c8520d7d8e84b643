//! Sums of the columns of rows, in fp32 and in one order: blocks of rows first, then the blocks;
//! these may be added where they are to be.

use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::{DType, Shape, Tensor as Plain};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::part::to_change;
use super::rows::{StridedRows, addresses, empty, kernel_for, vector_size};

/// Columns of a cube, in vectors.
const LANES: u32 = 8;
/// Units that share a column of a block.
const SHARERS: u32 = 32;
/// Rows of a block, where there are no more than [`BLOCKS`] of them.
const BLOCK: usize = 256;
/// Most blocks of rows.
const BLOCKS: usize = 64;

/// A unit adds every n-th row of its block in one column; then one adds those units' sums, and what
/// is there if `add`. Sums begin at vector `start`.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
fn column_sums_kernel<F: Float, N: Size>(
    x: &Tensor<Vector<F, N>>,
    sums: &mut Tensor<Vector<f32, N>>,
    rows: usize,
    width: usize,
    pitch: usize,
    block: usize,
    start: usize,
    #[comptime] add: bool,
    #[comptime] dim: CubeDim,
) {
    let column = CUBE_POS_X as usize * CUBE_DIM_X as usize + UNIT_POS_X as usize;
    let first = CUBE_POS_Y as usize * block;
    let mut end = first + block;
    if end > rows {
        end = rows;
    }
    if column >= width {
        end = 0usize.runtime();
    }
    let mut total = Vector::<f32, N>::new(0.0f32);
    let mut row = first + UNIT_POS_Y as usize;
    while row < end {
        total += Vector::cast_from(x[row * pitch + column]);
        row += CUBE_DIM_Y as usize;
    }
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(comptime!(dim.num_elems() as usize));
    shared[UNIT_POS as usize] = total;
    sync_cube();
    if UNIT_POS_Y == 0 && column < width {
        let mut other = CUBE_DIM_X;
        while other < CUBE_DIM_X * CUBE_DIM_Y {
            total += shared[(other + UNIT_POS_X) as usize];
            other += CUBE_DIM_X;
        }
        let place = start + CUBE_POS_Y as usize * width + column;
        if comptime!(add) {
            total += sums[place];
        }
        sums[place] = total;
    }
}

/// Where sums go.
pub(super) struct Place<'a> {
    pub(super) sums: &'a CubeTensor,
    /// The first of them there.
    pub(super) start: usize,
    /// Whether they are added to what is there.
    pub(super) add: bool,
}

/// The sums of blocks of `block` rows, one row of them after the other.
fn of_blocks(x: &StridedRows, block: usize, Place { sums, start, add }: Place<'_>) {
    let blocks = x.n.div_ceil(block);
    let client = x.tensor.client.clone();
    let hardware = &client.properties().hardware;
    let most = hardware.max_units_per_cube.min(hardware.max_cube_dim.1 * LANES);
    let dim = CubeDim::new_2d(LANES, SHARERS.min(most / LANES));
    let vector = vector_size(&[&x.tensor, sums], &[x.width, x.pitch, start]);
    let columns = (x.width / vector).div_ceil(LANES as usize);
    let count = CubeCount::Static(columns as u32, blocks as u32, 1);
    let kernel = kernel_for!(column_sums_kernel, x.tensor.dtype, "sums of columns");
    // SAFETY: a unit stays below the rows and the width of `x`; `sums` has a row for each block.
    unsafe {
        kernel(
            &client,
            count,
            dim,
            addresses(&[&x.tensor, sums]),
            vector,
            x.tensor.clone().into_tensor_arg(),
            sums.clone().into_tensor_arg(),
            x.n,
            x.width / vector,
            x.pitch / vector,
            block,
            start / vector,
            add,
            dim,
        );
    }
}

#[backend_extension(Cube, Fusion)]
trait ColumnKernel: Backend {
    #[fusion(meta = sums_of)]
    fn column_sums(x: FloatTensor<Self>) -> FloatTensor<Self>;

    #[fusion(dtype = sum, shape = sum)]
    fn add_column_sums(
        sum: FloatTensor<Self>,
        x: FloatTensor<Self>,
        start: usize,
        begun: bool,
    ) -> FloatTensor<Self>;
}

impl ColumnKernel for CubeBackend {
    fn column_sums(x: FloatTensor<Self>) -> FloatTensor<Self> {
        sums(x)
    }

    fn add_column_sums(
        sum: FloatTensor<Self>,
        x: FloatTensor<Self>,
        start: usize,
        begun: bool,
    ) -> FloatTensor<Self> {
        let sum = to_change(sum);
        to_place(x, Place { sums: &sum, start, add: begun });
        sum
    }
}

fn sums_of(x: &TensorSpec) -> TensorSpec {
    TensorSpec::new(Shape::new([x.shape[1]]), DType::F32)
}

/// The fp32 sums of the columns of `x: [n, h]`, `[h]`.
pub(crate) fn column_sums(x: Plain<2>) -> Plain<1> {
    Plain::from_dispatch(<Dispatch as ColumnKernel>::column_sums(x.into_dispatch()))
}

/// fp32 `sum: [n]` with the sums of the columns of `x: [r, h]` from `start` on, added to what is
/// there if that has `begun`, else in its place. In place where nothing else holds `sum`.
pub(crate) fn add_column_sums(sum: Plain<1>, x: Plain<2>, start: usize, begun: bool) -> Plain<1> {
    let ([n], [_, h]) = (sum.dims(), x.dims());
    assert!(start + h <= n, "{h} sums from {start} of {n}");
    assert_eq!(sum.dtype(), DType::F32);
    let (sum, x) = (sum.into_dispatch(), x.into_dispatch());
    Plain::from_dispatch(<Dispatch as ColumnKernel>::add_column_sums(sum, x, start, begun))
}

/// [`column_sums`] of a tensor of the device.
pub(super) fn sums(x: CubeTensor) -> CubeTensor {
    let x = StridedRows::of(x).tensor;
    let width = x.meta.shape()[x.meta.num_dims() - 1];
    let sums = empty(&x, Shape::new([width]), DType::F32);
    to_place(x, Place { sums: &sums, start: 0, add: false });
    sums
}

/// Sums the columns of `x`, whoever holds what they are added to.
pub(super) fn to_place(x: CubeTensor, place: Place<'_>) {
    let x = StridedRows::of(x);
    let block = BLOCK.max(x.n.div_ceil(BLOCKS));
    let blocks = x.n.div_ceil(block);
    if blocks <= 1 {
        return of_blocks(&x, block, place);
    }
    let sums = empty(&x.tensor, Shape::new([blocks, x.width]), DType::F32);
    of_blocks(&x, block, Place { sums: &sums, start: 0, add: false });
    of_blocks(&StridedRows::of(sums), blocks, place);
}
