//! Rotary position embedding in the rotate-half layout: element i of a head's first half turns
//! together with element i of its second half.

use super::threads::{each, piece};
use super::{GRAIN, simd};

/// cos and sin of every angle, `[s, d/2]` each: position p turns pair i by p · `inverse[i]`, where
/// there are d/2 inverse frequencies.
pub fn angles(s: usize, inverse: &[f64]) -> (Vec<f32>, Vec<f32>) {
    let half = inverse.len();
    let angles = || (0..s * half).map(|i| (i / half) as f64 * inverse[i % half]);
    (angles().map(|a| a.cos() as f32).collect(), angles().map(|a| a.sin() as f32).collect())
}

/// The inverse frequencies of the plain embedding: base^(−2i/d) for each of d/2 pairs.
pub fn inverse_frequencies(d: usize, base: f64) -> Vec<f64> {
    (0..d / 2).map(|pair| base.powf(-2.0 * pair as f64 / d as f64)).collect()
}

/// Which elements turn: the first `heads` heads of `d` elements in every row of `width`.
#[derive(Clone, Copy, Debug)]
pub struct Turned {
    /// Elements of a row.
    pub width: usize,
    /// Heads that turn.
    pub heads: usize,
    /// Elements of a head, even.
    pub d: usize,
}

/// By which angles rows turn.
#[derive(Clone, Copy, Debug)]
pub struct ByPosition<'a> {
    /// cos of [`angles`].
    pub cos: &'a [f32],
    /// sin of them.
    pub sin: &'a [f32],
    /// The position of each row; without, rows have those of `angles` one after another, and then
    /// the first again.
    pub positions: Option<&'a [usize]>,
}

impl ByPosition<'_> {
    /// cos and sin of the `half` pairs of row `row`.
    #[inline(always)]
    pub(crate) fn of(&self, row: usize, half: usize) -> (&[f32], &[f32]) {
        let position = match self.positions {
            None => row % (self.cos.len() / half),
            Some(positions) => positions[row],
        };
        let at = position * half;
        (&self.cos[at..at + half], &self.sin[at..at + half])
    }
}

/// Turns `x: [rows, width]` in place by the rows' angles, or back by them.
pub fn rope(x: &mut [f32], t: Turned, by: ByPosition<'_>, back: bool) {
    let half = t.d / 2;
    let sign = if back { -1.0 } else { 1.0 };
    let rows = x.len() / t.width;
    let n = piece(rows, 1, GRAIN.div_ceil(t.width));
    each(x.chunks_mut(n * t.width).enumerate(), |(i, x)| {
        let first = i * n;
        simd(
            #[inline(always)]
            || {
                for (i, row) in x.chunks_exact_mut(t.width).enumerate() {
                    let row = &mut row[..t.heads * t.d];
                    let (cos, sin) = by.of(first + i, half);
                    turn_heads(row, cos, sin, sign);
                }
            },
        );
    });
}

/// Turns heads of one row, one after another, by the angles of its position; `sign` is −1 for back.
#[inline(always)]
pub(crate) fn turn_heads(heads: &mut [f32], cos: &[f32], sin: &[f32], sign: f32) {
    let half = cos.len();
    for head in heads.chunks_exact_mut(2 * half) {
        let (low, high) = head.split_at_mut(half);
        for (((l, h), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
            let s = sign * *s;
            (*l, *h) = (*l * *c - *h * s, *h * *c + *l * s);
        }
    }
}
