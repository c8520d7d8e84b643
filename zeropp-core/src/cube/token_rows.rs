//! Addition of the rows of tokens to the rows that their ids name, in place and in the order of the
//! tokens: the gradient of an embedding.
//!
//! The tokens are sorted by their ids, those of one id by their places. A unit for each column adds
//! all rows of an id, which it finds side by side, so that it reads several while it adds, and no
//! two units write to one place.

use std::ops::Range;

use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::part::{part_of, to_change};
use super::rows::{StridedRows, addresses, empty, kernel_for, vector_size};

/// How many elements of `some` are below `id`, those that equal it among them if `or_equal`.
#[cube]
fn below<N: Size>(
    some: Vector<i32, N>,
    id: i32,
    #[comptime] or_equal: bool,
    #[comptime] n: usize,
) -> u32 {
    let mut count = 0u32.runtime();
    #[unroll]
    for i in 0..n {
        let other = some.extract(i);
        if comptime!(or_equal) {
            count += select(other <= id, 1u32, 0u32);
        } else {
            count += select(other < id, 1u32, 0u32);
        }
    }
    count
}

/// The `n` tokens in the order of their ids, those of one id in their own; then these ids.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sort_tokens_kernel<N: Size>(
    ids: &Tensor<Vector<i32, N>>,
    sorted: &mut Tensor<u32>,
    vectors: usize,
    #[comptime] each: usize,
) {
    let n = vectors * each;
    if ABSOLUTE_POS >= n {
        terminate!();
    }
    let own = ABSOLUTE_POS / each;
    let lane = ABSOLUTE_POS % each;
    let vector = ids[own];
    let id = vector.extract_dynamic(lane);
    // Its place is the number of tokens that come before it: all units look at the same ones.
    let mut place = 0u32.runtime();
    #[unroll]
    for i in 0..each {
        let other = vector.extract(i);
        place += select(other < id || (other == id && i < lane), 1u32, 0u32);
    }
    let mut i = 0usize.runtime();
    while i < own {
        place += below::<N>(ids[i], id, true, each);
        i += 1;
    }
    i += 1;
    while i < vectors {
        place += below::<N>(ids[i], id, false, each);
        i += 1;
    }
    sorted[place as usize] = ABSOLUTE_POS as u32;
    sorted[n + place as usize] = u32::cast_from(id);
}

/// Rows that a unit reads before it adds them.
const AT_A_TIME: usize = 4;

#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
fn token_rows_kernel<F: Float, N: Size>(
    sum: &mut Tensor<Vector<f32, N>>,
    rows: &Tensor<Vector<F, N>>,
    sorted: &Tensor<u32>,
    tokens: usize,
    width: usize,
    pitch: usize,
    height: usize,
) {
    if ABSOLUTE_POS >= tokens * width {
        terminate!();
    }
    let first = ABSOLUTE_POS / width;
    let column = ABSOLUTE_POS % width;
    let id = sorted[tokens + first];
    let mut is_first = true.runtime();
    if first > 0 {
        is_first = sorted[tokens + first - 1] != id;
    }
    // A negative id is one that is too large.
    if is_first && (id as usize) < height {
        // The end of the tokens of this id lies above `end` and not above `above`.
        let mut end = first;
        let mut above = tokens;
        while end + 1 < above {
            let middle = (end + above) / 2;
            if sorted[tokens + middle] == id {
                end = middle;
            } else {
                above = middle;
            }
        }
        end = above;
        let place = id as usize * width + column;
        let mut total = sum[place];
        let mut i = first;
        while i + AT_A_TIME <= end {
            let mut some = Array::<Vector<F, N>>::new(AT_A_TIME);
            #[unroll]
            for k in 0..AT_A_TIME {
                some[k] = rows[sorted[i + k] as usize * pitch + column];
            }
            #[unroll]
            for k in 0..AT_A_TIME {
                total += Vector::cast_from(some[k]);
            }
            i += AT_A_TIME;
        }
        while i < end {
            total += Vector::cast_from(rows[sorted[i] as usize * pitch + column]);
            i += 1;
        }
        sum[place] = total;
    }
}

/// See [`add_token_rows`](super::add_token_rows).
pub(super) fn add(
    sum: CubeTensor,
    part: Range<usize>,
    ids: CubeTensor,
    rows: CubeTensor,
) -> CubeTensor {
    let all = to_change(sum);
    let sum = part_of(&all, part);
    let (ids, rows) = (into_contiguous(ids), StridedRows::of(rows));
    let ids = if ids.dtype == DType::I32 { ids } else { cast(ids, DType::I32) };
    let (n, height) = (rows.n, sum.meta.num_elements() / rows.width.max(1));
    let sorted = empty(&sum, Shape::new([2 * n]), DType::U32);
    let client = sum.client.clone();
    let arg = |t: &CubeTensor| t.clone().into_tensor_arg();
    let launch = |units: usize, dim: CubeDim| {
        (cubecl::calculate_cube_count_elemwise(&client, units, dim), dim)
    };
    // Small cubes, so that all of a GPU takes part: each unit looks at all tokens.
    let (count, dim) = launch(n, CubeDim::new_1d(64));
    let each = vector_size(&[&ids], &[n]);
    let tensors = [&sum, &rows.tensor];
    let vector = vector_size(&tensors, &[rows.width, rows.pitch]);
    let width = rows.width / vector;
    let (add_count, add_dim) = launch(n * width, CubeDim::new(&client, n * width));
    let add = kernel_for!(token_rows_kernel, rows.tensor.dtype, "rows of tokens");
    // SAFETY: a unit stays below the `n` tokens, and below their elements; places of tokens are
    // below `n`, all different, and an id is held against the rows of `sum`.
    unsafe {
        sort_tokens_kernel::launch_unchecked(
            &client,
            count,
            dim,
            addresses(&[&sorted]),
            each,
            arg(&ids),
            arg(&sorted),
            n / each,
            each,
        );
        add(
            &client,
            add_count,
            add_dim,
            addresses(&tensors),
            vector,
            arg(&sum),
            arg(&rows.tensor),
            arg(&sorted),
            n,
            width,
            rows.pitch / vector,
            height,
        );
    }
    all
}
