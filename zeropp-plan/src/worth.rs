//! What another choice has to gain.

/// The least share of a step that it has to be predicted to gain: times are estimates, and not all
/// that ranks do is predicted.
pub(crate) const WORTH: f64 = 0.03;

/// Whether a step that takes `then` in place of `now` is worth another choice of V, kind, slices or
/// who has the head. Runs and plans ask this one.
pub fn is_worth(now: f64, then: f64) -> bool {
    then <= (1.0 - WORTH) * now
}
