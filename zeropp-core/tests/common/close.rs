//! Comparison of results that differ in their rounding.

use std::fmt::Display;

/// Fails at the first error above `tolerance`, relative to the largest element of `want`, or to
/// `terms` where that is larger: the size of what the elements are differences of.
pub(crate) fn assert_within<T>(what: &str, got: &[f32], want: &[T], tolerance: f64, terms: f64)
where
    T: Copy + Display + Into<f64>,
{
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    let norm = want.iter().fold(terms, |m, x| m.max((*x).into().abs()));
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - (*want).into()).abs();
        assert!(
            error <= tolerance * norm,
            "{what}[{i}]: {got} instead of {want}: {error:e} is more than {tolerance:e} of {norm:e}"
        );
    }
}
