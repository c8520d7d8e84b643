//! The types that elements have in memory, and the way between bf16 and fp32.

use half::bf16;

/// Elements as they are in memory. Kernels compute with them in fp32 and round results once.
pub trait Number: Copy + Send + Sync {
    /// Zero.
    const ZERO: Self;
    /// Its value in fp32.
    fn up(self) -> f32;
    /// `x`, rounded as [`down`] does where it has to be.
    fn down(x: f32) -> Self;
}

impl Number for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn up(self) -> f32 {
        self
    }

    #[inline(always)]
    fn down(x: f32) -> Self {
        x
    }
}

impl Number for bf16 {
    const ZERO: Self = bf16::ZERO;

    #[inline(always)]
    fn up(self) -> f32 {
        up(self)
    }

    #[inline(always)]
    fn down(x: f32) -> Self {
        down(x)
    }
}

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
