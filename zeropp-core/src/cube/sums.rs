//! Addition to a part of a tensor, in place.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::rows::StridedRows;

#[cube(launch_unchecked)]
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
