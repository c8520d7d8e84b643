//! Cross-entropy over rows of logits.

use super::math::{exp, ln};
use super::reduce::{max, sum};
use super::simd;

/// Cross-entropy of `logits: [targets.len(), vocabulary]`, summed in f64, first row first.
///
/// # Panics
/// Panics if a target is not below `vocabulary`.
pub fn cross_entropy(logits: &[f32], vocabulary: usize, targets: &[usize]) -> f64 {
    let mut total = 0.0_f64;
    simd(
        #[inline(always)]
        || {
            for (row, target) in logits.chunks_exact(vocabulary).zip(targets) {
                let top = max(row);
                let sum = sum(
                    row,
                    #[inline(always)]
                    |x| exp(x - top),
                );
                total += f64::from(top - row[*target] + ln(sum));
            }
        },
    );
    total
}

/// Like [`cross_entropy`], to the same bits, and turns the logits into the gradient of `scale`
/// times the sum, scale·(softmax − one-hot), in place.
///
/// # Panics
/// Panics if a target is not below `vocabulary`.
pub fn cross_entropy_gradient(
    logits: &mut [f32],
    vocabulary: usize,
    targets: &[usize],
    scale: f32,
) -> f64 {
    let mut total = 0.0_f64;
    simd(
        #[inline(always)]
        || {
            for (row, target) in logits.chunks_exact_mut(vocabulary).zip(targets) {
                let (top, right) = (max(row), row[*target]);
                row.iter_mut().for_each(|x| *x = exp(*x - top));
                let sum = sum(row, |x| x);
                total += f64::from(top - right + ln(sum));
                let share = scale / sum;
                row.iter_mut().for_each(|x| *x *= share);
                row[*target] -= scale;
            }
        },
    );
    total
}
