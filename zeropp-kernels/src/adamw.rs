//! One AdamW update of a run of parameters.

use super::{GRAIN, simd, threads};

/// The scalars of an update, each rounded once to the precision in which it meets the elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWScalars {
    /// 1 − β1.
    pub towards1: f32,
    /// β2.
    pub beta2: f32,
    /// 1 − β2.
    pub towards2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Learning rate over the bias correction of the first moment.
    pub step_size: f32,
    /// Root of the bias correction of the second moment.
    pub root_bias2: f32,
    /// Factor on the parameter: one less what decays.
    pub keep: f32,
    /// Factor on the gradient (clipping).
    pub gradient: f32,
}

/// Updates parameters `p` and moments `m` and `v` by the gradient `g`, element by element.
///
/// Large tensors start at the same place within a page, so that element i of all four maps to one
/// set of the first-level cache and a load looks, to the processor, as if it depended on the store
/// before it. Whole vectors, of one element each at a time, never meet in this way.
///
/// # Panics
/// Panics if the slices differ in length.
pub fn adamw(p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32], s: &AdamWScalars) {
    let n = p.len();
    assert_eq!((m.len(), v.len(), g.len()), (n, n, n), "parameters, moments and gradient");
    let piece = threads::piece(n, 64, GRAIN);
    let state = p.chunks_mut(piece).zip(m.chunks_mut(piece)).zip(v.chunks_mut(piece));
    threads::each(state.zip(g.chunks(piece)), |(((p, m), v), g)| part(p, m, v, g, s));
}

fn part(p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32], s: &AdamWScalars) {
    simd(
        #[inline(always)]
        || {
            for (((p, m), v), g) in p.iter_mut().zip(m).zip(v).zip(g) {
                let g = g * s.gradient;
                *m += (g - *m) * s.towards1;
                *v = *v * s.beta2 + s.towards2 * g * g;
                let denominator = v.sqrt() / s.root_bias2 + s.eps;
                *p = *p * s.keep - s.step_size * (*m / denominator);
            }
        },
    );
}

/// Scalars of an early step, for tests.
#[cfg(test)]
pub(crate) const EARLY: AdamWScalars = AdamWScalars {
    towards1: 0.1,
    beta2: 0.999,
    towards2: 0.001,
    eps: 1e-8,
    step_size: 3e-3,
    root_bias2: 0.03,
    keep: 0.9999,
    gradient: 0.7,
};

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize, seed: u32) -> Vec<f32> {
        let hash = |i: usize| (i as u32 ^ seed).wrapping_mul(2_654_435_761).rotate_left(13);
        (0..n).map(|i| hash(i) as f32 / u32::MAX as f32 - 0.5).collect()
    }

    /// Whatever the instruction set and however a run is cut, each element takes the same
    /// operations, each of them rounded.
    #[test]
    fn bits_are_those_of_one_element_at_a_time() {
        let s = EARLY;
        for n in [0, 1, 15, 16, 17, 63, 1000] {
            let (p, m, g) = (values(n, 1), values(n, 2), values(n, 4));
            let v: Vec<f32> = values(n, 3).iter().map(|v| v * v).collect();
            let (mut p1, mut m1, mut v1) = (p.clone(), m.clone(), v.clone());
            adamw(&mut p1, &mut m1, &mut v1, &g, &s);
            for i in 0..n {
                let g = std::hint::black_box(g[i] * s.gradient);
                let towards = std::hint::black_box((g - m[i]) * s.towards1);
                let mi = m[i] + towards;
                let kept = std::hint::black_box(v[i] * s.beta2);
                let vi = kept + std::hint::black_box(s.towards2 * g * g);
                let denominator = vi.sqrt() / s.root_bias2 + s.eps;
                let change = std::hint::black_box(s.step_size * (mi / denominator));
                let pi = std::hint::black_box(p[i] * s.keep) - change;
                assert_eq!([p1[i], m1[i], v1[i]].map(f32::to_bits), [pi, mi, vi].map(f32::to_bits));
            }
        }
    }
}
