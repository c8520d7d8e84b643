//! How far an operation's results may lie from exact ones.

/// Largest error of one rounding in fp32, relative to its result.
const ROUNDING: f64 = f32::EPSILON as f64 / 2.0;
/// Roundings on the way to an element beside those of its sums: an elementary function of the
/// kernels has an error of up to 7 of them (the sigmoid's own test), an element passes two, and is
/// scaled, shifted and stored a dozen times.
const ELEMENTWISE: f64 = 2.0 * 7.0 + 12.0;
/// Standard deviations of a sum's error that no case reaches: one element in 10¹⁵.
const DEVIATIONS: f64 = 8.0;

/// The error of results that are sums of `lengths` elements, one after another, relative to the
/// largest of them. The errors of a sum of n are n roundings of partial sums that grow like √n; as
/// good as independent, they add up to √n of the result's own size (Higham & Mary, "A new approach
/// to probabilistic rounding error analysis", 2019).
///
/// It holds where a result has elements enough that the largest one is no accident: cases have
/// eight or more.
pub(crate) fn bound(lengths: &[usize]) -> f64 {
    let sums: f64 = lengths.iter().map(|n| DEVIATIONS * (*n as f64).sqrt()).sum();
    ROUNDING * (ELEMENTWISE * lengths.len().max(1) as f64 + sums)
}

/// Standard deviation of the error of one rounding to bf16, relative to the largest result with its
/// exponent: evenly between −2⁻⁹ and 2⁻⁹.
const HALF_ROUNDING: f64 = 0.577_350_269 / 512.0;

/// The same for results in bf16 against fp32's, that have been stored so many times on their way,
/// factors included. Sums are in fp32 and their error is nothing beside that of a store; the errors
/// of stores, and of the factors in a sum, are as good as independent.
pub(crate) fn half_bound(stores: usize) -> f64 {
    DEVIATIONS * HALF_ROUNDING * (stores as f64).sqrt()
}

#[test]
fn bounds_follow_from_lengths_alone() {
    assert_eq!(bound(&[]), bound(&[0]));
    assert!(bound(&[]) < 2e-6 && bound(&[100]) < 7e-6, "{} {}", bound(&[]), bound(&[100]));
    assert!(bound(&[100, 100]) > bound(&[100]) && bound(&[400]) > bound(&[100]));
}
