//! Loops over bf16 rows that compute in fp32: a few thousand numbers at a time are widened into
//! the first-level cache, go through the fp32 kernel, and are rounded once on their way out.

use half::bf16;

use super::convert::{down, up};
use crate::dropout::{self, DropoutRule};
use crate::reduce::{columns_apart, rows_by_block, sum_blocks};
use crate::rope::{ByPosition, Turned, turn_heads};
use crate::threads::{Fresh, FreshPart, each, piece};
use crate::tokens::GRID;
use crate::{GRAIN, each_part, norm, simd};

/// Elements at a time.
const CHUNK: usize = 4096;

fn widen_into(out: &mut Vec<f32>, x: &[bf16]) {
    out.clear();
    simd(
        #[inline(always)]
        || out.extend(x.iter().map(|x| up(*x))),
    );
}

fn append(out: &mut FreshPart<'_, bf16>, x: &[f32]) {
    simd(
        #[inline(always)]
        || out.extend(x.iter().map(|x| down(*x))),
    );
}

fn replace(out: &mut [bf16], x: &[f32]) {
    assert_eq!(out.len(), x.len());
    simd(
        #[inline(always)]
        || out.iter_mut().zip(x).for_each(|(out, x)| *out = down(*x)),
    );
}

/// Adds `more` to `sum`, element by element, rounded as a sum of tensors is: denormals stay.
///
/// # Panics
/// Panics if the slices differ in length.
pub fn add(sum: &mut [bf16], more: &[bf16]) {
    each_part(sum, [more], |sum, [more]| {
        simd(
            #[inline(always)]
            || sum.iter_mut().zip(more).for_each(|(x, y)| *x = bf16::from_f32(up(*x) + up(*y))),
        );
    });
}

/// Multiplies `x: [samples·rows, width]` by the factors of dropout, in place, as
/// [`dropout::apply`] does: products in fp32, rounded once.
pub fn drop_some(x: &mut [bf16], width: usize, samples: dropout::SampleRows, by: DropoutRule) {
    dropout::each_group(
        x,
        width,
        samples,
        by,
        #[inline(always)]
        |x, factors| x.iter_mut().zip(factors).for_each(|(x, m)| *x = down(up(*x) * *m)),
    );
}

/// Turns `x: [samples·s, width]` in place as [`rope`](crate::rope::rope) does, in fp32.
pub fn rope(x: &mut [bf16], t: Turned, by: ByPosition<'_>, back: bool) {
    let (half, sign) = (t.d / 2, if back { -1.0 } else { 1.0 });
    let turned = t.heads * t.d;
    let n = piece(x.len() / t.width, 1, GRAIN.div_ceil(t.width));
    each(x.chunks_mut(n * t.width).enumerate(), |(i, x)| {
        let mut wide = Vec::with_capacity(turned);
        for (j, row) in x.chunks_exact_mut(t.width).enumerate() {
            let (cos, sin) = by.of(i * n + j, half);
            widen_into(&mut wide, &row[..turned]);
            simd(
                #[inline(always)]
                || turn_heads(&mut wide, cos, sin, sign),
            );
            replace(&mut row[..turned], &wide);
        }
    });
}

/// Elements of whole rows of `h` at a time: as many rows as the grid of tokens is a multiple of.
fn whole_rows(h: usize) -> usize {
    let rows = (CHUNK / h.max(1)).clamp(1, GRID);
    (1 << rows.ilog2()) * h.max(1)
}

/// Norms of rows: outputs, and the statistics that the backward wants.
pub struct Normed {
    /// The rows.
    pub out: Vec<bf16>,
    /// Their means; none for RMSNorm.
    pub means: Vec<f32>,
    /// The factors that they were multiplied by.
    pub inverses: Vec<f32>,
}

/// [`norm::layer_norm`] of bf16 rows, `gamma` and `beta` widened.
pub fn layer_norm(x: &[bf16], gamma: &[f32], beta: &[f32], eps: f32) -> Normed {
    let (h, chunk) = (gamma.len(), whole_rows(gamma.len()));
    let rows = x.len() / h;
    let (mut out, mut means) = (Fresh::new(x.len()), Fresh::new(rows));
    let mut inverses = Fresh::new(rows);
    let n = piece(rows, chunk / h, GRAIN.div_ceil(h));
    let parts = out.parts(n * h).zip(means.parts(n).zip(inverses.parts(n)));
    each(x.chunks(n * h).zip(parts), |(x, (mut out, (mut means, mut inverses)))| {
        let mut wide = Vec::new();
        for x in x.chunks(chunk) {
            widen_into(&mut wide, x);
            let (y, own_means, rstds) = norm::layer_norm(&wide, gamma, beta, eps);
            append(&mut out, &y);
            means.extend_from_slice(&own_means);
            inverses.extend_from_slice(&rstds);
        }
    });
    Normed { out: out.done(), means: means.done(), inverses: inverses.done() }
}

/// [`norm::layer_norm_backward`] for bf16 rows; the sums over rows are those of a chunk first.
pub fn layer_norm_backward(
    dy: &mut [bf16],
    x: &[bf16],
    gamma: &[f32],
    means: &[f32],
    rstds: &[f32],
    sums: &mut [f32],
) {
    let (h, chunk, elements) = (gamma.len(), whole_rows(gamma.len()), dy.len());
    let stats = means.chunks(chunk / h).zip(rstds.chunks(chunk / h));
    let chunks = dy.chunks_mut(chunk).zip(x.chunks(chunk)).zip(stats);
    assert_eq!(sums.len(), 2 * h);
    sum_blocks(sums, chunks, elements, |((dy, x), (means, rstds)), sums| {
        let mut wide = [Vec::new(), Vec::new()];
        widen_into(&mut wide[0], dy);
        widen_into(&mut wide[1], x);
        let [wide_dy, x] = &mut wide;
        norm::layer_norm_backward(wide_dy, x, gamma, means, rstds, sums);
        replace(dy, wide_dy);
    });
}

/// [`norm::rms_norm`] of bf16 rows, `gamma` widened.
pub fn rms_norm(x: &[bf16], gamma: &[f32], eps: f32) -> Normed {
    let (h, chunk) = (gamma.len(), whole_rows(gamma.len()));
    let rows = x.len() / h;
    let (mut out, mut inverses) = (Fresh::new(x.len()), Fresh::new(rows));
    let n = piece(rows, chunk / h, GRAIN.div_ceil(h));
    let parts = out.parts(n * h).zip(inverses.parts(n));
    each(x.chunks(n * h).zip(parts), |(x, (mut out, mut inverses))| {
        let mut wide = Vec::new();
        for x in x.chunks(chunk) {
            widen_into(&mut wide, x);
            let (y, rrms) = norm::rms_norm(&wide, gamma, eps);
            append(&mut out, &y);
            inverses.extend_from_slice(&rrms);
        }
    });
    Normed { out: out.done(), means: Vec::new(), inverses: inverses.done() }
}

/// [`norm::rms_norm_backward`] for bf16 rows; the sums over rows are those of a chunk first.
pub fn rms_norm_backward(
    dy: &mut [bf16],
    x: &[bf16],
    gamma: &[f32],
    rrms: &[f32],
    sums: &mut [f32],
) {
    let (h, chunk, elements) = (gamma.len(), whole_rows(gamma.len()), dy.len());
    let chunks = dy.chunks_mut(chunk).zip(x.chunks(chunk)).zip(rrms.chunks(chunk / h));
    assert_eq!(sums.len(), h);
    sum_blocks(sums, chunks, elements, |((dy, x), rrms), sums| {
        let mut wide = [Vec::new(), Vec::new()];
        widen_into(&mut wide[0], dy);
        widen_into(&mut wide[1], x);
        let [wide_dy, x] = &mut wide;
        norm::rms_norm_backward(wide_dy, x, gamma, rrms, sums);
        replace(dy, wide_dy);
    });
}

/// Adds every row of `x: [rows, sums.len()]` to `sums`, as [`add_columns`] does.
pub fn add_rows(sums: &mut [f32], x: &[bf16]) {
    add_columns(sums, x, sums.len(), 0);
}

/// Adds some columns of `x: [n, width]`, from `column` on, to sums of columns, in the order of
/// [`reduce::add_columns`](crate::reduce::add_columns).
pub fn add_columns(sums: &mut [f32], x: &[bf16], width: usize, column: usize) {
    let width = width.max(1);
    columns_apart(sums, x.len() / width, |from, sums| {
        let from = column + from;
        simd(
            #[inline(always)]
            || {
                for row in rows_by_block(x, width) {
                    let row = &row[from..from + sums.len()];
                    sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += up(*x));
                }
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bf16::convert::{narrow, widen};

    fn numbers(n: usize, seed: usize) -> Vec<bf16> {
        let value = |i: usize| ((i + seed).wrapping_mul(2_654_435_761) % 1000) as f32 / 250.0 - 2.0;
        narrow(&(0..n).map(value).collect::<Vec<_>>())
    }

    /// Chunks do not show: each element is the fp32 kernel's, rounded.
    #[test]
    fn rows_are_the_fp32_kernels_rounded() {
        for (rows, h) in [(3, 5), (70, 96), (5, 5000)] {
            let (x, dy) = (numbers(rows * h, 1), numbers(rows * h, 2));
            let gamma = widen(&numbers(h, 3));
            let normed = layer_norm(&x, &gamma, &gamma, 1e-5);
            let wide = norm::layer_norm(&widen(&x), &gamma, &gamma, 1e-5);
            assert_eq!(normed.out, narrow(&wide.0));
            assert_eq!((&normed.means, &normed.inverses), (&wide.1, &wide.2));
            let (mut got, mut want) = (dy.clone(), widen(&dy));
            let (means, rstds) = (&wide.1, &wide.2);
            let [mut sums, mut exact] = [(); 2].map(|()| vec![0.0; 2 * h]);
            layer_norm_backward(&mut got, &x, &gamma, means, rstds, &mut sums);
            norm::layer_norm_backward(&mut want, &widen(&x), &gamma, means, rstds, &mut exact);
            assert_eq!(got, narrow(&want));
            let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-3);
            assert!(close(&sums, &exact));
            let normed = rms_norm(&x, &gamma, 1e-5);
            assert_eq!(normed.out, narrow(&norm::rms_norm(&widen(&x), &gamma, 1e-5).0));
            let (mut got, mut want) = (dy.clone(), widen(&dy));
            let rrms = &normed.inverses;
            let [mut sums, mut exact] = [(); 2].map(|()| vec![0.0; h]);
            rms_norm_backward(&mut got, &x, &gamma, rrms, &mut sums);
            norm::rms_norm_backward(&mut want, &widen(&x), &gamma, rrms, &mut exact);
            assert!(got == narrow(&want) && close(&sums, &exact));
            let (mut got, mut want) = (x.clone(), widen(&x));
            let samples = dropout::SampleRows { first: 2, token: 0, rows: 2 };
            let by = DropoutRule::new([1, 2], 3, 0.3);
            drop_some(&mut got, h, samples, by);
            dropout::apply(&mut want, h, samples, by);
            assert_eq!(got, narrow(&want));
            let (mut got, mut want) = (vec![1.0; h], vec![1.0; h]);
            add_rows(&mut got, &x);
            crate::reduce::add_rows(&mut want, &widen(&x));
            assert_eq!(got, want);
        }
    }
}
