//! One update of a run of parameters by Lion (Chen et al. 2023, algorithm 2): steps of one size, in
//! the direction of a mean gradient's sign.

use super::update_two;

/// The scalars of an update, each rounded once to the precision in which it meets the elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LionScalars {
    /// Factor on the gradient (clipping).
    pub gradient: f32,
    /// β1: the mean's share of what gives the direction.
    pub beta1: f32,
    /// 1 − β1.
    pub towards1: f32,
    /// β2: what stays of the mean.
    pub beta2: f32,
    /// 1 − β2.
    pub towards2: f32,
    /// Learning rate.
    pub lr: f32,
    /// Factor on the parameter: one less what decays.
    pub keep: f32,
}

/// Updates parameters `p` and the mean gradient `m` by the gradient `g`, element by element.
///
/// # Panics
/// Panics if the slices differ in length.
pub fn lion(p: &mut [f32], m: &mut [f32], g: &[f32], s: &LionScalars) {
    update_two(
        p,
        m,
        g,
        #[inline(always)]
        |p, m, g| {
            let g = g * s.gradient;
            let direction = *m * s.beta1 + g * s.towards1;
            // No step where there is no direction; `signum` would make one of zero.
            let forth = if direction > 0.0 { s.lr } else { 0.0 };
            let back = if direction < 0.0 { s.lr } else { 0.0 };
            *p = *p * s.keep - (forth - back);
            *m = *m * s.beta2 + g * s.towards2;
        },
    );
}

/// Scalars for tests.
#[cfg(test)]
pub(crate) const SOME: LionScalars = LionScalars {
    gradient: 0.7,
    beta1: 0.9,
    towards1: 0.1,
    beta2: 0.99,
    towards2: 0.01,
    lr: 1e-3,
    keep: 0.9999,
};
