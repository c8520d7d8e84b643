//! The products: a factor of rows times a [`Packed`](super::Packed) one, into fp32 or bf16.

use std::mem::MaybeUninit;
use std::ops::Range;

use half::bf16;

use super::convert::widen;
use super::driver::{Sink, run};
use super::left::PackedRows;
use super::matrix::{Mat, reach};
use super::packed::{Packed, Right};
use super::scalar::Scalar;
#[cfg(target_arch = "x86_64")]
use super::{amx, avx, dots, isa::Isa};
use crate::threads;

/// `c = a·b` in fp32, for `c` of rows `stride` apart.
///
/// # Panics
/// Panics if the sizes do not match or the last element lies outside of `c`.
pub fn product_set<'b>(c: &mut [f32], stride: usize, a: Mat<'_>, b: impl Into<Right<'b>>) {
    into_floats(c, stride, a, b.into(), false);
}

/// `c += a·b` in fp32, for `c` of rows `stride` apart.
///
/// # Panics
/// Panics if the sizes do not match or the last element lies outside of `c`.
pub fn add_product<'b>(c: &mut [f32], stride: usize, a: Mat<'_>, b: impl Into<Right<'b>>) {
    into_floats(c, stride, a, b.into(), true);
}

/// `c += aᵀ·b` in fp32, for `a: [n, rows of c]` and `b: [n, columns of c]`: a product for each of
/// `blocks` of the n rows, in their order.
///
/// # Panics
/// Panics if the sizes do not match, or a block lies outside.
pub fn add_by_blocks(
    c: &mut [f32],
    a: Mat<'_>,
    b: Mat<'_>,
    blocks: impl Iterator<Item = Range<usize>>,
) {
    for block in blocks {
        let right = Packed::new(b.some_rows(block.start, block.len()));
        add_product(c, b.cols, a.some_rows(block.start, block.len()).t(), &right);
    }
}

/// `c += a·b` for each of the right factors, which have one size: the left one is laid out once.
///
/// # Panics
/// Panics if the sizes do not match.
pub(crate) fn add_products<const N: usize>(c: [&mut [f32]; N], a: Mat<'_>, b: [&Packed; N]) {
    let mut c = c.into_iter();
    let products = b.map(|b| {
        let (c, stride) = (c.next().expect("as many"), b.sizes().1);
        assert_eq!((a.rows * stride, a.cols), (c.len(), b.sizes().0), "sizes of a matrix product");
        (b.into(), Sink::Floats { c, stride, add: true })
    });
    if a.cols > 0 {
        dispatch(a, products);
    }
}

fn into_floats(c: &mut [f32], stride: usize, a: Mat<'_>, b: Right<'_>, add: bool) {
    let (k, n) = b.sizes();
    assert!(reach(a.rows, n, stride) <= c.len() && n <= stride, "a product beyond its slice");
    if k == 0 && !add {
        c.chunks_mut(stride.max(1)).take(a.rows).for_each(|row| row[..n].fill(0.0));
    }
    if k > 0 {
        dispatch(a, [(b, Sink::Floats { c, stride, add })]);
    }
}

/// `c = a·b`, or `c = a·b + bias` as [`product`] has it, rounded to bf16, for `c` of rows `stride`
/// apart.
///
/// # Panics
/// Panics if the sizes do not match or the last element lies outside of `c`.
pub fn product_into<'b>(
    c: &mut [bf16],
    stride: usize,
    a: Mat<'_>,
    b: impl Into<Right<'b>>,
    bias: Option<&[bf16]>,
) {
    let b = b.into();
    let n = b.sizes().1;
    assert!(reach(a.rows, n, stride) <= c.len() && n <= stride, "a product beyond its slice");
    let bias = wide_bias(bias, n);
    // SAFETY: the same elements, and `dispatch` writes nothing that is not initialised.
    let c = unsafe { &mut *(std::ptr::from_mut(c) as *mut [MaybeUninit<bf16>]) };
    dispatch(a, [(b, Sink::Halves { c, stride, bias: &bias })]);
}

/// `a·b`, or `a·b + bias` with the bias of each column added in fp32, rounded to bf16 once, in a
/// fresh vector, row-major.
///
/// # Panics
/// Panics if the sizes do not match.
pub fn product<'b>(a: Mat<'_>, b: impl Into<Right<'b>>, bias: Option<&[bf16]>) -> Vec<bf16> {
    let b = b.into();
    let len = a.rows * b.sizes().1;
    let mut c = Vec::with_capacity(len);
    let bias = wide_bias(bias, b.sizes().1);
    write([&mut c.spare_capacity_mut()[..len]], a, [b], &bias);
    // SAFETY: just written.
    unsafe { c.set_len(len) };
    c
}

/// The products `a·b` of right factors of one size, rounded once, row-major in memory that is not
/// written yet: the left one is laid out once.
///
/// # Panics
/// Panics if the sizes do not match.
pub(crate) fn write_products<'c, const N: usize>(
    c: [&'c mut [MaybeUninit<bf16>]; N],
    a: Mat<'_>,
    b: [&Packed; N],
) -> [&'c mut [bf16]; N] {
    write(c, a, b.map(Right::from), &[])
}

fn write<'c, const N: usize>(
    mut c: [&'c mut [MaybeUninit<bf16>]; N],
    a: Mat<'_>,
    b: [Right<'_>; N],
    bias: &[f32],
) -> [&'c mut [bf16]; N] {
    let n = b[0].sizes().1;
    assert!(c.iter().all(|c| c.len() == a.rows * n), "sizes of a product");
    let mut b = b.into_iter();
    let sinks = c.each_mut().map(|c| Sink::Halves { c, stride: n, bias });
    dispatch(a, sinks.map(|sink| (b.next().expect("as many"), sink)));
    // SAFETY: the tiles of a product cover all rows and columns, and each writes all of its
    // elements.
    c.map(|c| unsafe { c.assume_init_mut() })
}

/// `c = Σ a·b` in fp32 over the pairs of factors, row-major.
///
/// # Panics
/// Panics if the sizes do not match.
pub(crate) fn set_sum<const N: usize>(c: &mut [f32], a: [Mat<'_>; N], b: [&Packed; N]) {
    let (b, path, n) = (b.map(Right::from), b[0].first(0, 0).isa(), b[0].sizes().1);
    let wanted = a.map(|a| (c.len(), (a.cols, n), path));
    let given = std::array::from_fn(|i| (a[i].rows * n, b[i].sizes(), b[i].isa()));
    assert!(wanted == given && a.iter().all(|a| a.cols > 0), "sizes of a product");
    by_path(a, &mut [(b, Sink::Floats { c, stride: n, add: false })]);
}

/// The bias of `n` columns in fp32; empty where there is none.
fn wide_bias(bias: Option<&[bf16]>, n: usize) -> Vec<f32> {
    let bias = bias.map(widen).unwrap_or_default();
    assert!(bias.is_empty() || bias.len() == n, "a bias of {} for {n} columns", bias.len());
    bias
}

/// The products by the path that the right factors, of one size, were packed for.
fn dispatch<const N: usize>(a: Mat<'_>, products: [(Right<'_>, Sink<'_>); N]) {
    let b = products[0].0;
    let (k, n) = b.sizes();
    assert!(a.cols == k && products.iter().all(|(b, _)| b.sizes() == (k, n)), "sizes of a product");
    let least = WORK.div_ceil((k * n).max(1));
    let rows = a.rows.div_ceil(threads::count()).max(least).next_multiple_of(UNIT);
    let mut parts = products.map(|(b, sink)| (b, sink.blocks(a.rows, rows)));
    let parts = (0..a.rows).step_by(rows).map(|from| {
        let sinks = parts.each_mut().map(|(b, parts)| (*b, parts.next().expect("as many").2));
        (from, rows.min(a.rows - from), sinks)
    });
    threads::each(parts, |(from, rows, products)| {
        by_path([a.some_rows(from, rows)], &mut products.map(|(b, sink)| ([b], sink)));
    });
}

/// Sums of products, on this thread.
fn by_path<const N: usize>(a: [Mat<'_>; N], products: &mut [([Right<'_>; N], Sink<'_>)]) {
    let b = products[0].0;
    match b[0].isa() {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => run(b.map(|b| amx::Tiles::new(b.blocks())), a, products),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 => run(b.map(|b| PackedRows::<dots::Dots>::new(b.blocks())), a, products),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => run(b.map(|b| PackedRows::<avx::Avx512>::new(b.blocks())), a, products),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => run(b.map(|b| PackedRows::<avx::Avx2>::new(b.blocks())), a, products),
        _ => run(b.map(|b| PackedRows::<Scalar>::new(b.blocks())), a, products),
    }
}

/// Multiply-adds that are worth a thread.
const WORK: usize = 1 << 20;
/// Rows that a thread's part is a multiple of: whole tiles of matrix instructions.
const UNIT: usize = 32;
