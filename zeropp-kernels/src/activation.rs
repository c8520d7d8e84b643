//! Activation functions and their pullbacks (`dy` becomes the input gradient in place), of fp32 and
//! of bf16 numbers.

use super::math::{exp, normal_cdf, sigmoid};
use super::threads::{Fresh, each, piece};
use super::{GRAIN, Number, collect, each_part, map, map2, simd, update};

/// 1/√(2π).
const DENSITY: f32 = 0.398_942_3;
/// 2·√(2/π), so that (1 + tanh(u))/2 is the sigmoid of `TANH_SCALE·(x + TANH_CUBE·x³)`.
const TANH_SCALE: f32 = 1.595_769_2;
const TANH_CUBE: f32 = 0.044_715;

#[inline(always)]
fn gelu_tanh_exponent(x: f32) -> f32 {
    TANH_SCALE * (x + TANH_CUBE * x * x * x)
}

/// sigmoid(z) and its derivative; the latter without the cancellation in 1 − sigmoid(z).
#[inline(always)]
pub(crate) fn sigmoid_slope(z: f32) -> (f32, f32) {
    let e = exp(-z);
    let s = 1.0 / (1.0 + e);
    (s, s * (e * s))
}

macro_rules! activation {
    ($name:ident, $back:ident, $doc:literal, $f:expr, $df:expr) => {
        #[doc = $doc]
        pub fn $name<E: Number>(x: &[E]) -> Vec<E> {
            collect(x.len(), |range, out| {
                simd(
                    #[inline(always)]
                    || map(out, &x[range.clone()], $f),
                )
            })
        }
        #[doc = concat!("Multiplies `dy` by the derivative of [`", stringify!($name), "`] at `x`.")]
        pub fn $back<E: Number>(dy: &mut [E], x: &[E]) {
            each_part(dy, [x], |dy, [x]| {
                simd(
                    #[inline(always)]
                    || update(dy, x, $df),
                )
            });
        }
    };
}

activation!(
    gelu,
    gelu_backward,
    "x·Φ(x), the GELU with the error function.",
    #[inline(always)]
    |x| x * normal_cdf(x).0,
    #[inline(always)]
    |dy, x| {
        let (cdf, bell) = normal_cdf(x);
        dy * (cdf + x * (DENSITY * bell))
    }
);

activation!(
    gelu_tanh,
    gelu_tanh_backward,
    "GELU in its tanh approximation (`gelu_new` of GPT-2).",
    #[inline(always)]
    |x| x * sigmoid(gelu_tanh_exponent(x)),
    #[inline(always)]
    |dy, x| {
        let (s, ds) = sigmoid_slope(gelu_tanh_exponent(x));
        let inner = TANH_SCALE * (1.0 + 3.0 * TANH_CUBE * x * x);
        dy * (s + x * ds * inner)
    }
);

activation!(
    silu,
    silu_backward,
    "x·sigmoid(x).",
    #[inline(always)]
    |x| x * sigmoid(x),
    #[inline(always)]
    |dy, x| {
        let (s, ds) = sigmoid_slope(x);
        dy * (s + x * ds)
    }
);

/// silu(gate)·up.
pub fn swiglu<E: Number>(gate: &[E], up: &[E]) -> Vec<E> {
    assert_eq!(gate.len(), up.len());
    collect(up.len(), |range, out| {
        simd(
            #[inline(always)]
            || map2(out, &gate[range.clone()], &up[range.clone()], |g, u| g * sigmoid(g) * u),
        )
    })
}

/// Elements of a gradient at a time: they stay in the first-level cache.
const CHUNK: usize = 1024;

/// Gradients of [`swiglu`]: `dy` becomes that of `up`, that of `gate` is returned.
pub fn swiglu_backward<E: Number>(dy: &mut [E], gate: &[E], up: &[E]) -> Vec<E> {
    assert!(dy.len() == gate.len() && dy.len() == up.len(), "slices of one length");
    let mut dgate = Fresh::new(dy.len());
    let n = piece(dy.len(), CHUNK, GRAIN);
    let parts = dy.chunks_mut(n).zip(dgate.parts(n));
    each(parts.zip(gate.chunks(n).zip(up.chunks(n))), |((dy, mut dgate), (gate, up))| {
        let chunks = gate.chunks(CHUNK).zip(up.chunks(CHUNK));
        for (dy, (gate, up)) in dy.chunks_mut(CHUNK).zip(chunks) {
            let mut made = [E::ZERO; CHUNK];
            let made = &mut made[..dy.len()];
            simd(
                #[inline(always)]
                || {
                    let inputs = gate.iter().zip(up);
                    for ((dy, dgate), (gate, up)) in dy.iter_mut().zip(&mut *made).zip(inputs) {
                        let (d, g) = (dy.up(), gate.up());
                        let (s, ds) = sigmoid_slope(g);
                        *dgate = E::down(up.up() * (s + g * ds) * d);
                        *dy = E::down(d * (g * s));
                    }
                },
            );
            dgate.extend_from_slice(made);
        }
    });
    dgate.done()
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::bf16::convert::{narrow, widen};

    fn numbers(n: usize, seed: usize) -> Vec<bf16> {
        let value = |i: usize| ((i + seed).wrapping_mul(2_654_435_761) % 1000) as f32 / 100.0 - 5.0;
        narrow(&(0..n).map(value).collect::<Vec<_>>())
    }

    /// Of bf16 numbers each result is that of fp32, rounded once.
    #[test]
    fn halves_are_rounded_once() {
        for n in [0, 1, 1023, 70_000] {
            let (x, up, dy) = (numbers(n, 1), numbers(n, 2), numbers(n, 3));
            let [wide_x, wide_up, wide_dy] = [&x, &up, &dy].map(|v| widen(v));
            type Pair<E> = (fn(&[E]) -> Vec<E>, fn(&mut [E], &[E]));
            let pairs: [(Pair<bf16>, Pair<f32>); 3] = [
                ((gelu, gelu_backward), (gelu, gelu_backward)),
                ((gelu_tanh, gelu_tanh_backward), (gelu_tanh, gelu_tanh_backward)),
                ((silu, silu_backward), (silu, silu_backward)),
            ];
            for ((f, back), (wide_f, wide_back)) in pairs {
                assert_eq!(f(&x), narrow(&wide_f(&wide_x)));
                let (mut got, mut want) = (dy.clone(), wide_dy.clone());
                back(&mut got, &x);
                wide_back(&mut want, &wide_x);
                assert_eq!(got, narrow(&want));
            }
            assert_eq!(swiglu(&x, &up), narrow(&swiglu(&wide_x, &wide_up)));
            let (mut got, mut want) = (dy.clone(), wide_dy.clone());
            let dgate = swiglu_backward(&mut got, &x, &up);
            let wide_dgate = swiglu_backward(&mut want, &wide_x, &wide_up);
            assert!(got == narrow(&want) && dgate == narrow(&wide_dgate));
        }
    }

    /// The gradient of a product is that of its factors, in the order in which they always were.
    #[test]
    fn swiglu_has_the_gradients_of_its_parts() {
        let [gate, up, dy] = [1, 2, 3].map(|seed| widen(&numbers(3000, seed)));
        let mut dup = dy.clone();
        let dgate = swiglu_backward(&mut dup, &gate, &up);
        for i in 0..dy.len() {
            let (s, ds) = sigmoid_slope(gate[i]);
            assert_eq!(dup[i], dy[i] * (gate[i] * sigmoid(gate[i])));
            assert_eq!(dgate[i], up[i] * (s + gate[i] * ds) * dy[i]);
        }
    }
}
