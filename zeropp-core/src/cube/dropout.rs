//! Dropout of rows in place, by the masks of `zeropp_kernels::dropout`: the generator runs where
//! the elements are, so that no mask is made on the host and copied.

use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::rows::{addresses, kernel_for};
use crate::kernels::dropout::DropoutRule;

/// Columns whose elements sixteen blocks of four words decide.
const GROUP: usize = 64;
const LANES: usize = 16;

/// Which rows of which samples the rows of a tensor are: those of `queries` tokens of each head of
/// each sample, one after another. Without heads a sample is as one with one head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DroppedRows {
    pub(crate) rule: DropoutRule,
    pub(crate) queries: usize,
    pub(crate) heads: usize,
    /// The first of the queries in its sample.
    pub(crate) first: usize,
    /// Number of the first sample.
    pub(crate) sample: usize,
}

/// Multiplies an element by 0 or by `scale`, as its word says.
#[cube]
#[allow(clippy::too_many_arguments)]
fn decide<F: Float>(
    x: &mut Tensor<F>,
    from: usize,
    column: usize,
    width: usize,
    word: u32,
    threshold: u32,
    scale: f32,
) {
    if column < width {
        let mut factor = scale;
        if word < threshold {
            factor = 0.0f32.runtime();
        }
        let value = f32::cast_from(x[from + column]) * factor;
        x[from + column] = F::cast_from(value);
    }
}

/// A unit makes one block of Philox4x32-10, and decides the four elements of its words.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
fn drop_kernel<F: Float>(
    x: &mut Tensor<F>,
    units: usize,
    lanes: usize,
    width: usize,
    queries: usize,
    heads: usize,
    first: usize,
    sample: u32,
    step: u32,
    key_low: u32,
    key_high: u32,
    threshold: u32,
    scale: f32,
) {
    if ABSOLUTE_POS >= units {
        terminate!();
    }
    let row = ABSOLUTE_POS / lanes;
    let lane = ABSOLUTE_POS % lanes;
    let head = row / queries;
    let mut c0 = lane as u32;
    let mut c1 = ((first + row % queries) * heads + head % heads) as u32;
    let mut c2 = sample + (head / heads) as u32;
    let mut c3 = step;
    let mut k0 = key_low;
    let mut k1 = key_high;
    let mut round = 0u32.runtime();
    while round < 10 {
        let a = 0xD251_1F53u32.runtime();
        let b = 0xCD9E_8D57u32.runtime();
        let even = b.mul_hi(c2) ^ c1 ^ k0;
        let odd = a.mul_hi(c0) ^ c3 ^ k1;
        c1 = b * c2;
        c3 = a * c0;
        c0 = even;
        c2 = odd;
        k0 += 0x9E37_79B9u32.runtime();
        k1 += 0xBB67_AE85u32.runtime();
        round += 1;
    }
    let from = row * width;
    let column = lane / LANES * GROUP + lane % LANES;
    decide::<F>(x, from, column, width, c0, threshold, scale);
    decide::<F>(x, from, column + LANES, width, c1, threshold, scale);
    decide::<F>(x, from, column + 2 * LANES, width, c2, threshold, scale);
    decide::<F>(x, from, column + 3 * LANES, width, c3, threshold, scale);
}

/// See [`drop_rows`](super::drop_rows).
pub(super) fn drop_rows(x: CubeTensor, rows: DroppedRows) -> CubeTensor {
    let x = into_contiguous(x);
    let x = if x.can_mut() { x } else { x.copy() };
    let (shape, client) = (x.meta.shape().clone(), x.client.clone());
    let width = shape[shape.num_dims() - 1];
    let lanes = width.div_ceil(GROUP) * LANES;
    let units = shape.num_elements() / width.max(1) * lanes;
    let dim = CubeDim::new(&client, units);
    let count = cubecl::calculate_cube_count_elemwise(&client, units, dim);
    let DroppedRows { rule, queries, heads, first, sample } = rows;
    let kernel = kernel_for!(drop_kernel, x.dtype, "dropout");
    // SAFETY: a unit stays below the rows of `x`, and writes below its width.
    unsafe {
        kernel(
            &client,
            count,
            dim,
            addresses(&[&x]).max(AddressType::from_len(units)),
            x.clone().into_tensor_arg(),
            units,
            lanes,
            width,
            queries,
            heads,
            first,
            sample as u32,
            rule.step,
            rule.key[0],
            rule.key[1],
            rule.threshold,
            rule.scale,
        );
    }
    x
}
