//! Loops over bf16 rows that compute in fp32: a few thousand numbers at a time are widened into
//! the first-level cache, go through the fp32 kernel, and are rounded once on their way out.

use half::bf16;

use super::convert::{down, up};
use crate::{activation, norm, simd};

/// Elements at a time.
const CHUNK: usize = 4096;

fn widen_into(out: &mut Vec<f32>, x: &[bf16]) {
    out.clear();
    simd(
        #[inline(always)]
        || out.extend(x.iter().map(|x| up(*x))),
    );
}

fn append(out: &mut Vec<bf16>, x: &[f32]) {
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

/// What `f` makes of the elements of `x`, one of each.
pub fn map(x: &[bf16], f: impl Fn(&[f32]) -> Vec<f32>) -> Vec<bf16> {
    let (mut out, mut wide) = (Vec::with_capacity(x.len()), Vec::with_capacity(CHUNK));
    for x in x.chunks(CHUNK) {
        widen_into(&mut wide, x);
        append(&mut out, &f(&wide));
    }
    out
}

/// Replaces the elements of `dy` by what `f` makes of them and of those of `x`.
pub fn update(dy: &mut [bf16], x: &[bf16], f: impl Fn(&mut [f32], &[f32])) {
    assert_eq!(dy.len(), x.len());
    let mut wide = [Vec::with_capacity(CHUNK), Vec::with_capacity(CHUNK)];
    for (dy, x) in dy.chunks_mut(CHUNK).zip(x.chunks(CHUNK)) {
        widen_into(&mut wide[0], dy);
        widen_into(&mut wide[1], x);
        let [wide_dy, wide_x] = &mut wide;
        f(wide_dy, wide_x);
        replace(dy, wide_dy);
    }
}

/// silu(gate)·up.
pub fn swiglu(gate: &[bf16], up: &[bf16]) -> Vec<bf16> {
    assert_eq!(gate.len(), up.len());
    let (mut out, mut wide) = (Vec::with_capacity(up.len()), [Vec::new(), Vec::new()]);
    for (gate, up) in gate.chunks(CHUNK).zip(up.chunks(CHUNK)) {
        widen_into(&mut wide[0], gate);
        widen_into(&mut wide[1], up);
        append(&mut out, &activation::swiglu(&wide[0], &wide[1]));
    }
    out
}

/// Gradients of [`swiglu`]: `dy` becomes that of `up`, that of `gate` is returned.
pub fn swiglu_backward(dy: &mut [bf16], gate: &[bf16], up: &[bf16]) -> Vec<bf16> {
    assert!(dy.len() == gate.len() && dy.len() == up.len());
    let (mut dgate, mut wide) = (Vec::with_capacity(dy.len()), [const { Vec::new() }; 3]);
    for ((dy, gate), up) in dy.chunks_mut(CHUNK).zip(gate.chunks(CHUNK)).zip(up.chunks(CHUNK)) {
        for (wide, x) in wide.iter_mut().zip([&*dy, gate, up]) {
            widen_into(wide, x);
        }
        let [wide_dy, gate, up] = &mut wide;
        append(&mut dgate, &activation::swiglu_backward(wide_dy, gate, up));
        replace(dy, wide_dy);
    }
    dgate
}

/// Elements of whole rows of `h` at a time.
fn whole_rows(h: usize) -> usize {
    (CHUNK / h.max(1)).max(1) * h.max(1)
}

/// Norms of rows: outputs, and the statistics that the backward wants.
pub struct Normed {
    /// The rows.
    pub out: Vec<bf16>,
    /// Their means; none for RMSNorm.
    pub means: Vec<f32>,
    /// What they were multiplied by.
    pub inverses: Vec<f32>,
}

impl Normed {
    fn of(len: usize) -> Self {
        let (means, inverses) = (Vec::new(), Vec::new());
        Self { out: Vec::with_capacity(len), means, inverses }
    }
}

/// [`norm::layer_norm`] of bf16 rows, `gamma` and `beta` widened.
pub fn layer_norm(x: &[bf16], gamma: &[f32], beta: &[f32], eps: f32) -> Normed {
    let (mut normed, mut wide) = (Normed::of(x.len()), Vec::new());
    for x in x.chunks(whole_rows(gamma.len())) {
        widen_into(&mut wide, x);
        let (out, means, rstds) = norm::layer_norm(&wide, gamma, beta, eps);
        append(&mut normed.out, &out);
        normed.means.extend(means);
        normed.inverses.extend(rstds);
    }
    normed
}

/// [`norm::layer_norm_backward`] for bf16 rows; the sums over rows are those of a chunk first.
pub fn layer_norm_backward(
    dy: &mut [bf16],
    x: &[bf16],
    gamma: &[f32],
    means: &[f32],
    rstds: &[f32],
) -> (Vec<f32>, Vec<f32>) {
    let (h, chunk) = (gamma.len(), whole_rows(gamma.len()));
    let (mut dgamma, mut dbeta) = (vec![0.0; h], vec![0.0; h]);
    let mut wide = [Vec::new(), Vec::new()];
    let stats = means.chunks(chunk / h).zip(rstds.chunks(chunk / h));
    for ((dy, x), (means, rstds)) in dy.chunks_mut(chunk).zip(x.chunks(chunk)).zip(stats) {
        widen_into(&mut wide[0], dy);
        widen_into(&mut wide[1], x);
        let [wide_dy, x] = &mut wide;
        let sums = norm::layer_norm_backward(wide_dy, x, gamma, means, rstds);
        crate::update(&mut dgamma, &sums.0, |sum, more| sum + more);
        crate::update(&mut dbeta, &sums.1, |sum, more| sum + more);
        replace(dy, wide_dy);
    }
    (dgamma, dbeta)
}

/// [`norm::rms_norm`] of bf16 rows, `gamma` widened.
pub fn rms_norm(x: &[bf16], gamma: &[f32], eps: f32) -> Normed {
    let (mut normed, mut wide) = (Normed::of(x.len()), Vec::new());
    for x in x.chunks(whole_rows(gamma.len())) {
        widen_into(&mut wide, x);
        let (out, rrms) = norm::rms_norm(&wide, gamma, eps);
        append(&mut normed.out, &out);
        normed.inverses.extend(rrms);
    }
    normed
}

/// [`norm::rms_norm_backward`] for bf16 rows; the sums over rows are those of a chunk first.
pub fn rms_norm_backward(dy: &mut [bf16], x: &[bf16], gamma: &[f32], rrms: &[f32]) -> Vec<f32> {
    let (h, chunk) = (gamma.len(), whole_rows(gamma.len()));
    let (mut dgamma, mut wide) = (vec![0.0; h], [Vec::new(), Vec::new()]);
    let rows = dy.chunks_mut(chunk).zip(x.chunks(chunk)).zip(rrms.chunks(chunk / h));
    for ((dy, x), rrms) in rows {
        widen_into(&mut wide[0], dy);
        widen_into(&mut wide[1], x);
        let [wide_dy, x] = &mut wide;
        let sums = norm::rms_norm_backward(wide_dy, x, gamma, rrms);
        crate::update(&mut dgamma, &sums, |sum, more| sum + more);
        replace(dy, wide_dy);
    }
    dgamma
}

/// Adds every row of `x: [rows, sums.len()]` to `sums`, first row first.
pub fn add_rows(sums: &mut [f32], x: &[bf16]) {
    simd(
        #[inline(always)]
        || {
            for row in x.chunks_exact(sums.len()) {
                sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += up(*x));
            }
        },
    );
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
            let sums = layer_norm_backward(&mut got, &x, &gamma, &wide.1, &wide.2);
            let exact = norm::layer_norm_backward(&mut want, &widen(&x), &gamma, &wide.1, &wide.2);
            assert_eq!(got, narrow(&want));
            let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-3);
            assert!(close(&sums.0, &exact.0) && close(&sums.1, &exact.1));
            let normed = rms_norm(&x, &gamma, 1e-5);
            assert_eq!(normed.out, narrow(&norm::rms_norm(&widen(&x), &gamma, 1e-5).0));
            let (mut got, mut want) = (dy.clone(), widen(&dy));
            let rrms = &normed.inverses;
            let sum = rms_norm_backward(&mut got, &x, &gamma, rrms);
            let exact = norm::rms_norm_backward(&mut want, &widen(&x), &gamma, rrms);
            assert!(got == narrow(&want) && close(&sum, &exact));
            assert_eq!(swiglu(&x, &dy), narrow(&activation::swiglu(&widen(&x), &widen(&dy))));
            let (mut got, mut want) = (dy.clone(), widen(&dy));
            let dgate = swiglu_backward(&mut got, &x, &dy);
            let exact = activation::swiglu_backward(&mut want, &widen(&x), &widen(&dy));
            assert!(got == narrow(&want) && dgate == narrow(&exact));
            assert_eq!(map(&x, activation::gelu), narrow(&activation::gelu(&widen(&x))));
            let (mut got, mut want) = (dy.clone(), widen(&dy));
            update(&mut got, &x, activation::gelu_backward);
            activation::gelu_backward(&mut want, &widen(&x));
            assert_eq!(got, narrow(&want));
            let (mut got, mut want) = (vec![1.0; h], vec![1.0; h]);
            add_rows(&mut got, &x);
            crate::reduce::add_rows(&mut want, &widen(&x));
            assert_eq!(got, want);
        }
    }
}
