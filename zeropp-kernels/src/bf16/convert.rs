//! Between bf16 and fp32. Rounds to nearest, ties to even; what would be denormal is zero.

use half::bf16;

use crate::{collect, simd};

/// The value of `x`, denormal or not.
#[inline(always)]
pub fn up(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// `x` with a zero of its sign in place of a denormal number.
#[inline(always)]
pub(crate) fn flush(x: f32) -> f32 {
    let zero = x.to_bits() & 0x8000_0000;
    if x.abs() < f32::MIN_POSITIVE { f32::from_bits(zero) } else { x }
}

/// `x` as bf16.
#[inline(always)]
pub fn down(x: f32) -> bf16 {
    let bits = flush(x).to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    // A NaN stays one: it must not be rounded up into an infinity.
    let bits = if x.is_nan() { bits | 0x0040_0000 } else { rounded };
    bf16::from_bits((bits >> 16) as u16)
}

/// The elements of `x` in fp32.
pub fn widen(x: &[bf16]) -> Vec<f32> {
    collect(x.len(), |range, out| {
        simd(
            #[inline(always)]
            || out.extend(x[range.clone()].iter().map(|x| up(*x))),
        );
    })
}

/// The elements of `x` rounded to bf16, denormals to denormals: what a cast of tensors gives.
pub fn round(x: &[f32]) -> Vec<bf16> {
    collect(x.len(), |range, out| {
        simd(
            #[inline(always)]
            || out.extend(x[range.clone()].iter().map(|x| bf16::from_f32(*x))),
        );
    })
}

/// The elements of `x` in bf16.
pub fn narrow(x: &[f32]) -> Vec<bf16> {
    collect(x.len(), |range, out| {
        simd(
            #[inline(always)]
            || out.extend(x[range.clone()].iter().map(|x| down(*x))),
        );
    })
}
