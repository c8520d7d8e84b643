//! The types that elements have in memory.

use half::bf16;

use crate::bf16::convert;

/// Elements as they are in memory. Kernels compute with them in fp32 and round results once.
pub trait Number: Copy + Send + Sync {
    /// Zero.
    const ZERO: Self;
    /// Its value in fp32.
    fn up(self) -> f32;
    /// `x`, rounded as [`convert::down`] does where it has to be.
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
        convert::up(self)
    }

    #[inline(always)]
    fn down(x: f32) -> Self {
        convert::down(x)
    }
}
