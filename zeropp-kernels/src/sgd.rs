//! One update of a run of parameters by stochastic gradient descent.

use super::{simd, update, update_two};

/// The scalars of an update, each rounded once to the precision in which it meets the elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdScalars {
    /// Factor on the gradient (clipping).
    pub gradient: f32,
    /// Factor on the parameter that is added to the gradient (weight decay).
    pub decay: f32,
    /// The share of the velocity that stays.
    pub momentum: f32,
    /// Whether a step looks ahead along the velocity (Nesterov).
    pub nesterov: bool,
    /// Learning rate.
    pub lr: f32,
}

/// Updates parameters `p` and their velocity `m` by the gradient `g`, element by element.
///
/// # Panics
/// Panics if the slices differ in length.
pub fn sgd_with_momentum(p: &mut [f32], m: &mut [f32], g: &[f32], s: &SgdScalars) {
    update_two(
        p,
        m,
        g,
        #[inline(always)]
        |p, m, g| {
            let g = g * s.gradient + s.decay * *p;
            *m = *m * s.momentum + g;
            let step = if s.nesterov { g + s.momentum * *m } else { *m };
            *p -= s.lr * step;
        },
    );
}

/// Updates parameters `p` by the gradient `g`, element by element.
///
/// # Panics
/// Panics if the slices differ in length.
pub fn sgd(p: &mut [f32], g: &[f32], s: &SgdScalars) {
    super::each_part(p, [g], |p, [g]| {
        simd(
            #[inline(always)]
            || update(p, g, |p, g| p - s.lr * (g * s.gradient + s.decay * p)),
        );
    });
}

/// Scalars for tests.
#[cfg(test)]
pub(crate) const SOME: SgdScalars =
    SgdScalars { gradient: 0.7, decay: 0.01, momentum: 0.9, nesterov: true, lr: 0.03 };
