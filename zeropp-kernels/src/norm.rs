//! Row normalisations. Rows are `gamma.len()` elements; statistics are one number a row.

use super::reduce::{BLOCK, sum, sum_blocks, sum2};
use super::threads::{Fresh, each, piece};
use super::{GRAIN, simd};

/// Rows that a thread takes at a time, of `rows` of `h` elements.
fn rows_each(rows: usize, h: usize) -> usize {
    piece(rows, 1, GRAIN.div_ceil(h.max(1)))
}

/// LayerNorm of every row of `x`: the output, the row means and the inverse standard deviations.
pub fn layer_norm(
    x: &[f32],
    gamma: &[f32],
    beta: &[f32],
    eps: f32,
) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let h = gamma.len();
    assert_eq!(beta.len(), h);
    let rows = x.len() / h;
    let mut out = Fresh::new(x.len());
    let (mut means, mut rstds) = (Fresh::new(rows), Fresh::new(rows));
    let n = rows_each(rows, h);
    let parts = out.parts(n * h).zip(means.parts(n).zip(rstds.parts(n)));
    each(x.chunks(n * h).zip(parts), |(x, (mut out, (mut means, mut rstds)))| {
        let mut y = vec![0.0; h];
        simd(
            #[inline(always)]
            || {
                for x in x.chunks_exact(h) {
                    let mean = sum(x, |x| x) / h as f32;
                    let var = sum(x, |x| (x - mean) * (x - mean)) / h as f32;
                    let rstd = 1.0 / (var + eps).sqrt();
                    for (((y, x), g), b) in y.iter_mut().zip(x).zip(gamma).zip(beta) {
                        *y = (*x - mean) * rstd * *g + *b;
                    }
                    out.extend_from_slice(&y);
                    means.push(mean);
                    rstds.push(rstd);
                }
            },
        );
    });
    (out.done(), means.done(), rstds.done())
}

/// Turns `dy` into the input gradient of [`layer_norm`] in place; adds dγ and, behind it, dβ to
/// `sums: [2·h]`, the last rows first.
pub fn layer_norm_backward(
    dy: &mut [f32],
    x: &[f32],
    gamma: &[f32],
    means: &[f32],
    rstds: &[f32],
    sums: &mut [f32],
) {
    let h = gamma.len();
    assert_eq!(sums.len(), 2 * h);
    assert_eq!(dy.len(), x.len());
    let elements = dy.len();
    let blocks = dy.chunks_mut(BLOCK * h).zip(x.chunks(BLOCK * h));
    let blocks = blocks.zip(means.chunks(BLOCK).zip(rstds.chunks(BLOCK)));
    sum_blocks(sums, blocks, elements, |((dy, x), (means, rstds)), sums| {
        let (dgamma, dbeta) = sums.split_at_mut(h);
        let mut hat = vec![0.0; h];
        simd(
            #[inline(always)]
            || {
                let rows = dy.chunks_exact_mut(h).zip(x.chunks_exact(h));
                for ((dy, x), (mean, rstd)) in rows.zip(means.iter().zip(rstds)) {
                    for (hat, x) in hat.iter_mut().zip(x) {
                        *hat = (*x - *mean) * *rstd;
                    }
                    for ((dg, dy), hat) in dgamma.iter_mut().zip(dy.iter()).zip(&hat) {
                        *dg += *dy * *hat;
                    }
                    for ((db, dy), g) in dbeta.iter_mut().zip(dy.iter_mut()).zip(gamma) {
                        *db += *dy;
                        *dy *= *g;
                    }
                    let c1 = sum(dy, |d| d) / h as f32;
                    let c2 = sum2(dy, &hat, |d, hat| d * hat) / h as f32;
                    for (d, hat) in dy.iter_mut().zip(&hat) {
                        *d = (*d - c1 - *hat * c2) * *rstd;
                    }
                }
            },
        );
    });
}

/// RMSNorm of every row of `x`: the output and the inverse root mean squares.
pub fn rms_norm(x: &[f32], gamma: &[f32], eps: f32) -> (Vec<f32>, Vec<f32>) {
    let h = gamma.len();
    let (mut out, mut rrms) = (Fresh::new(x.len()), Fresh::new(x.len() / h));
    let n = rows_each(x.len() / h, h);
    let parts = out.parts(n * h).zip(rrms.parts(n));
    each(x.chunks(n * h).zip(parts), |(x, (mut out, mut rrms))| {
        let mut y = vec![0.0; h];
        simd(
            #[inline(always)]
            || {
                for x in x.chunks_exact(h) {
                    let r = 1.0 / (sum(x, |x| x * x) / h as f32 + eps).sqrt();
                    for ((y, x), g) in y.iter_mut().zip(x).zip(gamma) {
                        *y = *x * r * *g;
                    }
                    out.extend_from_slice(&y);
                    rrms.push(r);
                }
            },
        );
    });
    (out.done(), rrms.done())
}

/// Turns `dy` into the input gradient of [`rms_norm`] in place; adds dγ to `sums: [h]`, the last
/// rows first.
pub fn rms_norm_backward(dy: &mut [f32], x: &[f32], gamma: &[f32], rrms: &[f32], sums: &mut [f32]) {
    let h = gamma.len();
    assert_eq!(sums.len(), h);
    assert_eq!(dy.len(), x.len());
    let elements = dy.len();
    let blocks = dy.chunks_mut(BLOCK * h).zip(x.chunks(BLOCK * h)).zip(rrms.chunks(BLOCK));
    sum_blocks(sums, blocks, elements, |((dy, x), rrms), dgamma| {
        simd(
            #[inline(always)]
            || {
                for ((dy, x), r) in dy.chunks_exact_mut(h).zip(x.chunks_exact(h)).zip(rrms) {
                    let sums = dgamma.iter_mut().zip(dy.iter_mut());
                    for (((dg, dy), x), g) in sums.zip(x).zip(gamma) {
                        *dg += *dy * (*x * *r);
                        *dy *= *g;
                    }
                    let c = sum2(dy, x, |d, x| d * (x * *r)) / h as f32;
                    for (d, x) in dy.iter_mut().zip(x) {
                        *d = (*d - *x * *r * c) * *r;
                    }
                }
            },
        );
    });
}
