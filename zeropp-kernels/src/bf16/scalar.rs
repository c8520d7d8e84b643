//! The path of every CPU: fused multiply-adds and flushed denormals in plain arithmetic, so that
//! neither the instruction set nor the floating-point state of the thread matters.

use super::convert::flush;
use super::left::{TileChains, start};
use super::matrix::{BLOCK, CacheLine, PANEL};

pub(super) struct Scalar;

/// The least number that rounds to the smallest normal number or above: 2⁻¹²⁶ − 2⁻¹⁵¹.
const LEAST: f64 = f32::MIN_POSITIVE as f64 * (1.0 - 1.0 / (1_u64 << 25) as f64);

/// a·b + c, rounded once, for bf16 numbers a and b and an fp32 number c, none of them denormal;
/// zero of its sign where the result would be.
///
/// The product is exact in f64. The sum is rounded to odd there: its last bit says whether anything
/// was lost, and so the second rounding, to fp32, is as good as the only one.
#[inline(always)]
pub(super) fn fused(a: f32, b: f32, c: f32) -> f32 {
    let (p, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let s = p + c;
    let part = s - p;
    let lost = (p - (s - part)) + (c - part);
    let bits = s.to_bits();
    let away = (lost > 0.0) == (s > 0.0);
    let odd = if away { bits.wrapping_add(1) } else { bits.wrapping_sub(1) };
    // Where s is not finite, `lost` is not a number.
    let inexact = lost.abs() > 0.0 && bits & 1 == 0;
    let s = if inexact { f64::from_bits(odd) } else { s };
    let tiny = s.abs() < LEAST;
    if tiny { f32::copysign(0.0, s as f32) } else { s as f32 }
}

impl TileChains for Scalar {
    const ROWS: usize = 4;

    fn run(left: &[CacheLine], panels: [&[CacheLine]; 2], c: &mut [f32], stride: usize, add: bool) {
        start::<Self>(c, stride, add);
        let value = |line: &CacheLine, i: usize| flush(f32::from_bits(line.0[i]));
        for (block, left) in left.chunks_exact(Self::ROWS * BLOCK / 16).enumerate() {
            for (row, left) in left.chunks_exact(BLOCK / 16).enumerate() {
                for (panel, lines) in panels.iter().enumerate() {
                    let lines = &lines[block * BLOCK..(block + 1) * BLOCK];
                    let mut sums = [[0.0; PANEL]; 2];
                    for (k, line) in lines.iter().enumerate() {
                        let a = value(&left[k / 16], k % 16);
                        for (i, sum) in sums[k % 2].iter_mut().enumerate() {
                            *sum = fused(a, value(line, i), *sum);
                        }
                    }
                    let c = &mut c[row * stride + panel * PANEL..][..PANEL];
                    for (i, c) in c.iter_mut().enumerate() {
                        *c = flush(flush(*c) + flush(sums[0][i] + sums[1][i]));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against the correctly rounded operation of the standard library.
    #[test]
    fn rounds_once() {
        let mut state = 7_u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 32) as u32
        };
        for i in 0..400_000 {
            let spread = if i % 2 == 0 { 20 } else { 254 };
            let mut number = |mask: u32| {
                let exponent = 127 - spread / 2 + next() % spread;
                f32::from_bits(next() & 0x8000_0000 | exponent << 23 | next() & mask)
            };
            let (a, b, c) = (number(0x7f_0000), number(0x7f_0000), number(0x7f_ffff));
            let want = a.mul_add(b, c);
            if want.abs() > f32::MIN_POSITIVE {
                assert_eq!(fused(a, b, c).to_bits(), want.to_bits(), "{a:e}·{b:e} + {c:e}");
            }
        }
    }
}
