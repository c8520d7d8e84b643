//! Cross-entropy over rows of logits.

use super::math::{exp, ln};
use super::reduce::{max, sum};
use super::threads::{Fresh, each, piece};
use super::{GRAIN, simd};

/// The target of a row that is not scored: its loss and its gradient are zero.
pub const NOT_SCORED: usize = usize::MAX;

/// Cross-entropy of `logits: [targets.len(), vocabulary]`, summed in f64, first row first.
///
/// # Panics
/// Panics if a target is neither below `vocabulary` nor [`NOT_SCORED`].
pub fn cross_entropy(logits: &[f32], vocabulary: usize, targets: &[usize]) -> f64 {
    let rows = piece(targets.len(), 1, GRAIN.div_ceil(vocabulary.max(1)));
    let mut losses = Fresh::new(targets.len());
    let parts = logits.chunks(rows * vocabulary).zip(targets.chunks(rows)).zip(losses.parts(rows));
    each(parts, |((logits, targets), mut losses)| {
        simd(
            #[inline(always)]
            || {
                for (row, target) in logits.chunks_exact(vocabulary).zip(targets) {
                    if *target == NOT_SCORED {
                        losses.push(0.0);
                        continue;
                    }
                    let top = max(row);
                    let sum = sum(
                        row,
                        #[inline(always)]
                        |x| exp(x - top),
                    );
                    losses.push(f64::from(top - row[*target] + ln(sum)));
                }
            },
        );
    });
    losses.done().into_iter().fold(0.0, |total, loss| total + loss)
}

/// Like [`cross_entropy`], to the same bits, and turns the logits into the gradient of `scale`
/// times the sum, scale·(softmax − one-hot), in place.
///
/// # Panics
/// Panics if a target is neither below `vocabulary` nor [`NOT_SCORED`].
pub fn cross_entropy_gradient(
    logits: &mut [f32],
    vocabulary: usize,
    targets: &[usize],
    scale: f32,
) -> f64 {
    let rows = piece(targets.len(), 1, GRAIN.div_ceil(vocabulary.max(1)));
    let mut losses = Fresh::new(targets.len());
    let logits = logits.chunks_mut(rows * vocabulary);
    let parts = logits.zip(targets.chunks(rows)).zip(losses.parts(rows));
    each(parts, |((logits, targets), mut losses)| {
        simd(
            #[inline(always)]
            || {
                for (row, target) in logits.chunks_exact_mut(vocabulary).zip(targets) {
                    if *target == NOT_SCORED {
                        row.fill(0.0);
                        losses.push(0.0);
                        continue;
                    }
                    let (top, right) = (max(row), row[*target]);
                    row.iter_mut().for_each(|x| *x = exp(*x - top));
                    let sum = sum(row, |x| x);
                    losses.push(f64::from(top - right + ln(sum)));
                    let share = scale / sum;
                    row.iter_mut().for_each(|x| *x *= share);
                    row[*target] -= scale;
                }
            },
        );
    });
    losses.done().into_iter().fold(0.0, |total, loss| total + loss)
}
