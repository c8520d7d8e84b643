//! Addition of the rows of tokens to the rows that their ids name, in place and in the order of the
//! tokens: the gradient of an embedding.
//!
//! The tokens of one id are a chain. The first of them adds all, a unit for each column, so that
//! different ids are added at the same time and no two units write to one place.

use burn::tensor::{DType, Shape, bf16, f16};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::rows::{StridedRows, empty};

/// For each of `n` tokens the next one with its id, `n` where there is none; then for each whether
/// one with its id came before, 1 or 0.
#[cube(launch_unchecked)]
fn token_chains_kernel<I: Int>(ids: &Tensor<I>, chains: &mut Tensor<u32>, n: usize) {
    if ABSOLUTE_POS >= n {
        terminate!();
    }
    let id = ids[ABSOLUTE_POS];
    let mut next = n;
    let mut seen = 0u32.runtime();
    // All units look at the same token at a time.
    let mut i = 0usize.runtime();
    while i < n {
        if ids[i] == id {
            if i < ABSOLUTE_POS {
                seen = 1;
            }
            if i > ABSOLUTE_POS && next == n {
                next = i;
            }
        }
        i += 1;
    }
    chains[ABSOLUTE_POS] = next as u32;
    chains[n + ABSOLUTE_POS] = seen;
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn token_rows_kernel<F: Float, I: Int>(
    sum: &mut Tensor<f32>,
    ids: &Tensor<I>,
    rows: &Tensor<F>,
    chains: &Tensor<u32>,
    n: usize,
    width: usize,
    pitch: usize,
    height: usize,
) {
    if ABSOLUTE_POS >= n * width {
        terminate!();
    }
    let first = ABSOLUTE_POS / width;
    let column = ABSOLUTE_POS % width;
    // A negative id becomes one that is too large.
    let id = u32::cast_from(ids[first]) as usize;
    if chains[n + first] == 0 && id < height {
        let place = id * width + column;
        let mut total = sum[place];
        let mut token = first;
        while token < n {
            total += f32::cast_from(rows[token * pitch + column]);
            token = chains[token] as usize;
        }
        sum[place] = total;
    }
}

/// See [`add_token_rows`](super::add_token_rows).
pub(super) fn add(sum: CubeTensor, ids: CubeTensor, rows: CubeTensor) -> CubeTensor {
    let sum = into_contiguous(sum);
    let sum = if sum.can_mut() { sum } else { sum.copy() };
    let (ids, rows) = (into_contiguous(ids), StridedRows::of(rows));
    let (n, height) = (rows.n, sum.meta.num_elements() / rows.width.max(1));
    let chains = empty(&sum, Shape::new([2 * n]), DType::U32);
    let client = sum.client.clone();
    let find = match ids.dtype {
        DType::I64 => token_chains_kernel::launch_unchecked::<i64>,
        _ => token_chains_kernel::launch_unchecked::<i32>,
    };
    let add = match (rows.tensor.dtype, ids.dtype) {
        (DType::F32, DType::I32) => token_rows_kernel::launch_unchecked::<f32, i32>,
        (DType::F32, DType::I64) => token_rows_kernel::launch_unchecked::<f32, i64>,
        (DType::BF16, DType::I32) => token_rows_kernel::launch_unchecked::<bf16, i32>,
        (DType::BF16, DType::I64) => token_rows_kernel::launch_unchecked::<bf16, i64>,
        (DType::F16, DType::I32) => token_rows_kernel::launch_unchecked::<f16, i32>,
        (DType::F16, DType::I64) => token_rows_kernel::launch_unchecked::<f16, i64>,
        other => panic!("rows of tokens of {other:?}: f32, bf16 or f16 rows, i32 or i64 ids"),
    };
    let launch = |units: usize| {
        let dim = CubeDim::new(&client, units);
        (cubecl::calculate_cube_count_elemwise(&client, units, dim), dim)
    };
    let ((count, dim), (add_count, add_dim)) = (launch(n), launch(n * rows.width));
    let arg = |t: &CubeTensor| t.clone().into_tensor_arg();
    // SAFETY: a unit stays below the `n` tokens, and below their elements; `chains` has two numbers
    // a token, of which those that go on are tokens, and an id is held against the rows of `sum`.
    unsafe {
        find(&client, count, dim, arg(&ids), arg(&chains), n);
        add(
            &client,
            add_count,
            add_dim,
            arg(&sum),
            arg(&ids),
            arg(&rows.tensor),
            arg(&chains),
            n,
            rows.width,
            rows.pitch,
            height,
        );
    }
    sum
}
