//! RMSNorm of the heads of queries and of keys within the rows of q, k and v.

use super::reduce::{BLOCK, sum, sum_blocks, sum2};
use super::threads::{Fresh, each, piece};
use super::{GRAIN, simd};

/// A row of q, k and v: `heads` queries, `groups` keys and `groups` values of d elements, where d
/// is the length of the norms' weights.
#[derive(Clone, Copy, Debug)]
pub struct HeadRow {
    /// Query heads.
    pub heads: usize,
    /// Key heads, and value heads.
    pub groups: usize,
}

impl HeadRow {
    /// Heads that are normalised: queries and keys.
    fn normed(&self) -> usize {
        self.heads + self.groups
    }

    /// Elements of a row.
    fn width(&self, d: usize) -> usize {
        (self.heads + 2 * self.groups) * d
    }
}

/// Every query head of `qkv: [rows, (heads + 2·groups)·d]` divided by its root mean square and
/// multiplied by `q: [d]`, every key head likewise with `k: [d]`, values unchanged; and the inverse
/// root mean squares, `[rows, heads + groups]`.
pub fn head_norm(qkv: &[f32], at: HeadRow, q: &[f32], k: &[f32], eps: f32) -> (Vec<f32>, Vec<f32>) {
    let (d, width) = (q.len(), at.width(q.len()));
    assert_eq!((k.len(), qkv.len() % width), (d, 0));
    let rows = qkv.len() / width;
    let (mut out, mut rrms) = (Fresh::new(qkv.len()), Fresh::new(rows * at.normed()));
    let n = piece(rows, 1, GRAIN.div_ceil(width));
    let parts = out.parts(n * width).zip(rrms.parts(n * at.normed()));
    each(qkv.chunks(n * width).zip(parts), |(qkv, (mut out, mut rrms))| {
        let mut y = vec![0.0; d];
        simd(
            #[inline(always)]
            || {
                for row in qkv.chunks_exact(width) {
                    let (normed, values) = row.split_at(at.normed() * d);
                    for (i, x) in normed.chunks_exact(d).enumerate() {
                        let gamma = if i < at.heads { q } else { k };
                        let r = 1.0 / (sum(x, |x| x * x) / d as f32 + eps).sqrt();
                        for ((y, x), g) in y.iter_mut().zip(x).zip(gamma) {
                            *y = *x * r * *g;
                        }
                        out.extend_from_slice(&y);
                        rrms.push(r);
                    }
                    out.extend_from_slice(values);
                }
            },
        );
    });
    (out.done(), rrms.done())
}

/// Turns `dy` into the gradient of qkv in [`head_norm`] in place; adds that of `q` and, behind it,
/// that of `k` to `sums: [2·d]`, the last rows first.
pub fn head_norm_backward(
    dy: &mut [f32],
    qkv: &[f32],
    at: HeadRow,
    q: &[f32],
    k: &[f32],
    rrms: &[f32],
    sums: &mut [f32],
) {
    let (d, width) = (q.len(), at.width(q.len()));
    assert_eq!((dy.len(), k.len(), sums.len()), (qkv.len(), d, 2 * d));
    let elements = dy.len();
    let blocks = dy.chunks_mut(BLOCK * width).zip(qkv.chunks(BLOCK * width));
    let blocks = blocks.zip(rrms.chunks(BLOCK * at.normed()));
    sum_blocks(sums, blocks, elements, |((dy, qkv), rrms), sums| {
        let (dq, dk) = sums.split_at_mut(d);
        simd(
            #[inline(always)]
            || {
                let rows = dy.chunks_exact_mut(width).zip(qkv.chunks_exact(width));
                for ((dy, x), rrms) in rows.zip(rrms.chunks_exact(at.normed())) {
                    let heads = dy.chunks_exact_mut(d).zip(x.chunks_exact(d)).zip(rrms);
                    for (i, ((dy, x), r)) in heads.enumerate() {
                        let is_query = i < at.heads;
                        let (gamma, sums) = if is_query { (q, &mut *dq) } else { (k, &mut *dk) };
                        let sums = sums.iter_mut().zip(dy.iter_mut());
                        for (((ds, dy), x), g) in sums.zip(x).zip(gamma) {
                            *ds += *dy * (*x * *r);
                            *dy *= *g;
                        }
                        let c = sum2(dy, x, |d, x| d * (x * *r)) / d as f32;
                        for (dy, x) in dy.iter_mut().zip(x) {
                            *dy = (*dy - *x * *r * c) * *r;
                        }
                    }
                }
            },
        );
    });
}
