//! Activation functions and their pullbacks (`dy` becomes the input gradient in place).

use super::math::{exp, normal_cdf, sigmoid};
use super::{collect, each_part, map, map2, simd, update};

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
fn sigmoid_slope(z: f32) -> (f32, f32) {
    let e = exp(-z);
    let s = 1.0 / (1.0 + e);
    (s, s * (e * s))
}

macro_rules! activation {
    ($name:ident, $back:ident, $doc:literal, $f:expr, $df:expr) => {
        #[doc = $doc]
        pub fn $name(x: &[f32]) -> Vec<f32> {
            collect(x.len(), |range, out| {
                simd(
                    #[inline(always)]
                    || map(out, &x[range.clone()], $f),
                )
            })
        }
        #[doc = concat!("Multiplies `dy` by the derivative of [`", stringify!($name), "`] at `x`.")]
        pub fn $back(dy: &mut [f32], x: &[f32]) {
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

/// `f` of the elements of both.
fn of_pairs(gate: &[f32], up: &[f32], f: impl Fn(f32, f32) -> f32 + Copy + Sync) -> Vec<f32> {
    assert_eq!(gate.len(), up.len());
    collect(up.len(), |range, out| {
        simd(
            #[inline(always)]
            || map2(out, &gate[range.clone()], &up[range.clone()], f),
        )
    })
}

/// silu(gate)·up.
pub fn swiglu(gate: &[f32], up: &[f32]) -> Vec<f32> {
    of_pairs(
        gate,
        up,
        #[inline(always)]
        |g, u| g * sigmoid(g) * u,
    )
}

/// Gradients of [`swiglu`]: `dy` becomes that of `up`, that of `gate` is returned.
pub fn swiglu_backward(dy: &mut [f32], gate: &[f32], up: &[f32]) -> Vec<f32> {
    let mut dgate = of_pairs(
        gate,
        up,
        #[inline(always)]
        |g, u| {
            let (s, ds) = sigmoid_slope(g);
            u * (s + g * ds)
        },
    );
    each_part(&mut dgate, [dy], |dgate, [dy]| update(dgate, dy, |slope, dy| slope * dy));
    each_part(dy, [gate], |dy, [gate]| {
        simd(
            #[inline(always)]
            || {
                update(
                    dy,
                    gate,
                    #[inline(always)]
                    |dy, g| dy * (g * sigmoid(g)),
                )
            },
        )
    });
    dgate
}
