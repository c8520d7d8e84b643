//! Addition to a part of a tensor, in place, and sums of squares of blocks.

use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::{DType, Shape, Tensor as Plain};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::rows::{StridedRows, addresses, empty, kernel_for, row_sum, vector_size};

#[cube(launch_unchecked, address_type = "dynamic")]
fn add_kernel(
    sum: &mut Tensor<f32>,
    part: &Tensor<f32>,
    elements: usize,
    rows: usize,
    width: usize,
    all_rows: usize,
    pitch: usize,
) {
    if ABSOLUTE_POS >= elements {
        terminate!();
    }
    let row = ABSOLUTE_POS / width;
    let column = ABSOLUTE_POS % width;
    let place = (row / rows * all_rows + row % rows) * width + column;
    sum[place] += part[row * pitch + column];
}

/// See [`add_first_rows`](super::add_first_rows).
pub(super) fn add_first_rows(sum: CubeTensor, part: CubeTensor) -> CubeTensor {
    let sum = burn_cubecl::kernel::into_contiguous(sum);
    let sum = if sum.can_mut() { sum } else { sum.copy() };
    let part = StridedRows::of(part);
    let (rows, all_rows) = (part.tensor.meta.shape()[1], sum.meta.shape()[1]);
    let elements = part.n * part.width;
    let client = sum.client.clone();
    let dim = CubeDim::new(&client, elements);
    // SAFETY: a unit stays below the elements of `part`, whose rows are the first ones of `sum`.
    unsafe {
        add_kernel::launch_unchecked(
            &client,
            cubecl::calculate_cube_count_elemwise(&client, elements, dim),
            dim,
            addresses(&[&sum, &part.tensor]),
            sum.clone().into_tensor_arg(),
            part.tensor.into_tensor_arg(),
            elements,
            rows,
            part.width,
            all_rows,
            part.pitch,
        );
    }
    sum
}

/// The units of a cube add the squares of a block of so many vectors, each every n-th of them.
#[cube(launch_unchecked, address_type = "dynamic")]
fn squares_kernel<F: Float, N: Size>(
    x: &Tensor<Vector<F, N>>,
    sums: &mut Tensor<f32>,
    vectors: usize,
    block: usize,
    blocks: usize,
    #[comptime] dim: CubeDim,
) {
    let mut end = (CUBE_POS + 1) * block;
    if end > vectors {
        end = vectors;
    }
    let mut total = Vector::<f32, N>::new(0.0f32);
    let mut i = CUBE_POS * block + UNIT_POS as usize;
    while i < end {
        let value = Vector::<f32, N>::cast_from(x[i]);
        total += value * value;
        i += comptime!(dim.num_elems() as usize);
    }
    let sum = row_sum(total.vector_sum(), dim);
    if UNIT_POS == 0 && CUBE_POS < blocks {
        sums[CUBE_POS] = sum;
    }
}

#[backend_extension(Cube, Fusion)]
trait SquaresKernel: Backend {
    #[fusion(meta = squares_of)]
    fn block_squares(x: FloatTensor<Self>, block: usize) -> FloatTensor<Self>;
}

impl SquaresKernel for CubeBackend {
    fn block_squares(x: FloatTensor<Self>, block: usize) -> FloatTensor<Self> {
        squares(x, block)
    }
}

fn squares_of(x: &TensorSpec, block: &usize) -> TensorSpec {
    TensorSpec::new(Shape::new([x.shape[0].div_ceil(*block)]), DType::F32)
}

/// See [`block_squares`](crate::squares::block_squares).
pub(crate) fn block_squares(x: Plain<1>, block: usize) -> Plain<1> {
    Plain::from_dispatch(<Dispatch as SquaresKernel>::block_squares(x.into_dispatch(), block))
}

fn squares(x: CubeTensor, block: usize) -> CubeTensor {
    let x = StridedRows::of(into_contiguous(x));
    let (n, blocks) = (x.width, x.width.div_ceil(block));
    let sums = empty(&x.tensor, Shape::new([blocks]), DType::F32);
    let vector = vector_size(&[&x.tensor], &[n, block]);
    let at = x.launch();
    // All units of a cube are one row of lanes.
    let dim = CubeDim::new_2d(at.dim.num_elems(), 1);
    let units = blocks * dim.num_elems() as usize;
    let count = cubecl::calculate_cube_count_elemwise(&at.client, units, dim);
    let kernel = kernel_for!(squares_kernel, x.tensor.dtype, "sums of squares");
    // SAFETY: a unit stays below the vectors of `x`, and a cube below the blocks, which `sums` has.
    unsafe {
        kernel(
            &at.client,
            count,
            dim,
            addresses(&[&x.tensor]),
            vector,
            x.tensor.into_tensor_arg(),
            sums.clone().into_tensor_arg(),
            n / vector,
            block / vector,
            blocks,
            dim,
        );
    }
    sums
}
