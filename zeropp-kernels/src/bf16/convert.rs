//! Between bf16 and fp32. Rounds to nearest, ties to even; what would be denormal is zero.

use half::bf16;

pub(crate) use crate::number::flush;
pub use crate::number::{down, up};
use crate::parts::{collect, simd};

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
