//! Rows that are scaled by the sigmoid of a gate each.

use crate::math::exp;
use crate::threads::{self, piece};
use crate::{GRAIN, Number, simd};

fn sigmoid(z: f32) -> f32 {
    1.0 / (1.0 + exp(-z))
}

/// y·σ(z) for rows `y: [n, h]` and their gates `z: [n]`, `[n, h]`.
///
/// # Panics
/// Panics if sizes do not match.
pub fn scaled<E: Number>(y: &[E], z: &[E]) -> Vec<E> {
    let (n, h) = (z.len(), y.len() / z.len().max(1));
    assert_eq!(y.len(), n * h, "a gate of each row");
    let mut out = vec![E::ZERO; y.len()];
    let rows = piece(n, 1, GRAIN.div_ceil(h.max(1)));
    let inputs = y.chunks(rows * h).zip(z.chunks(rows));
    threads::each(out.chunks_mut(rows * h).zip(inputs), |(out, (y, z))| {
        for ((out, y), z) in out.chunks_mut(h).zip(y.chunks(h)).zip(z) {
            let gate = sigmoid(z.up());
            simd(
                #[inline(always)]
                || out.iter_mut().zip(y).for_each(|(out, y)| *out = E::down(y.up() * gate)),
            );
        }
    });
    out
}

/// Lanes of a sum over a row.
const LANES: usize = 16;

/// The gradient of the gates of [`scaled`] by that of its output, `dy: [n, h]`: Σ dy·y of each row,
/// times the sigmoid's slope, `[n]`.
///
/// # Panics
/// Panics if sizes do not match.
pub fn gradient<E: Number>(dy: &[E], y: &[E], z: &[E]) -> Vec<E> {
    let (n, h) = (z.len(), y.len() / z.len().max(1));
    assert_eq!((dy.len(), y.len()), (n * h, n * h), "a gate of each row");
    let mut out = vec![E::ZERO; n];
    let rows = piece(n, 1, GRAIN.div_ceil(h.max(1)));
    let inputs = dy.chunks(rows * h).zip(y.chunks(rows * h)).zip(z.chunks(rows));
    threads::each(out.chunks_mut(rows).zip(inputs), |(out, ((dy, y), z))| {
        for ((out, (dy, y)), z) in out.iter_mut().zip(dy.chunks(h).zip(y.chunks(h))).zip(z) {
            let mut sums = [0.0; LANES];
            simd(
                #[inline(always)]
                || {
                    for (dy, y) in dy.chunks(LANES).zip(y.chunks(LANES)) {
                        let products = dy.iter().zip(y).map(|(dy, y)| dy.up() * y.up());
                        sums.iter_mut().zip(products).for_each(|(sum, x)| *sum += x);
                    }
                },
            );
            let gate = sigmoid(z.up());
            *out = E::down(gate * (1.0 - gate) * sums.iter().sum::<f32>());
        }
    });
    out
}
