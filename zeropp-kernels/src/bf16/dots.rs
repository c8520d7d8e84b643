//! Products by `vdpbf16ps`, which takes a pair of bf16 numbers in each lane: where the pair is two
//! neighbours of one chain, the instruction is two steps of it, in the chain's order.
//!
//! Of a lane it adds the upper product first, rounds, then adds the lower one and rounds again,
//! with denormals flushed whatever the control register says. So the pairs of the even chain are
//! k = 0 and 2, 4 and 6, …, and those of the odd one 1 and 3, 5 and 7, …, the first of each in the
//! upper half.

use std::arch::x86_64::*;
use std::sync::OnceLock;

use super::avx::{KEPT_ROWS, TILE_ROWS, flushing, kernel_512};
use super::convert::flush;
use super::left::{TileChains, check};
use super::matrix::{BLOCK, CacheLine, Mat, PANEL, chain_place};
use super::{scalar, transpose};

/// Lines of a block of K in a panel, and lanes of a row of it.
const LINES: usize = BLOCK / 2;

pub(super) struct Dots;

/// Whether this CPU has the instruction, and it rounds as described above, as far as [`agrees`] can
/// tell. The vendors describe the rounding in pseudo-code only, and all bits rest on it.
pub(super) fn keep_the_order() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let is_here = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16");
        // SAFETY: both were just detected.
        is_here && unsafe { agrees() }
    })
}

/// Compares the instruction with two steps in plain arithmetic: on numbers that make both sums
/// round, near one and near the smallest normal number, on denormal ones, and where a sum is just
/// too small or just not.
///
/// # Safety
/// Needs AVX-512 with bf16.
#[target_feature(enable = "avx512f,avx512bf16")]
#[inline(never)]
unsafe fn agrees() -> bool {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    // Exponents of factors, of which many, and those of c.
    let ranges = [(119, 16, 127), (56, 16, 2), (0, 2, 0), (0, 127, 0)];
    let random = ranges.into_iter().cycle().take(1024).all(|(first, count, sum)| {
        let mut half = || next() & 0x807f | (first + next() % count) << 7;
        let (a, b) = (half() << 16 | half(), half() << 16 | half());
        let c = (next() << 8 ^ next()) & 0x807f_ffff | (sum + next() % 2) << 23;
        agrees_on(a, b, f32::from_bits(c))
    });
    // 2⁻¹²⁶ less a quarter or three quarters of the last place below it.
    let upper = |x: f32| x.to_bits() & 0xffff_0000;
    let edges = [(2.0_f32.powi(-76), 1.0), (2.0_f32.powi(-75), 1.5)].map(|(b, a)| {
        let (a, b, c) = (a * 2.0_f32.powi(-76), b, f32::MIN_POSITIVE);
        agrees_on(upper(a), upper(-b), c) && agrees_on(upper(a), upper(b), -c)
    });
    random && edges == [true; 2]
}

/// Whether the instruction makes of two pairs and a sum what two steps make of them.
#[target_feature(enable = "avx512f,avx512bf16")]
fn agrees_on(a: u32, b: u32, c: f32) -> bool {
    let pairs = [a, b].map(|x| _mm512_set1_epi32(x as i32));
    let got = _mm512_cvtss_f32(multiply_pairs(_mm512_set1_ps(c), pairs[0], pairs[1]));
    let step = |c, upper: bool| {
        let number =
            |pair: u32| f32::from_bits(if upper { pair & 0xffff_0000 } else { pair << 16 });
        scalar::fused(flush(number(a)), flush(number(b)), c)
    };
    got.to_bits() == step(step(flush(c), true), false).to_bits()
}

impl TileChains for Dots {
    const ROWS: usize = TILE_ROWS;
    const LINES: usize = LINES;

    #[inline(always)]
    fn fill(
        lines: &mut [CacheLine],
        a: Mat<'_>,
        corner: (usize, usize),
        height: usize,
        depth: usize,
    ) {
        if height == Self::ROWS && (a.turned || depth == BLOCK) {
            let lines = lines[..Self::ROWS].first_chunk_mut().expect("a row each");
            let start = |along, across| &a.data[along * a.stride + across..];
            return match a.turned {
                true => transpose::chain_columns(lines, start(corner.1, corner.0), a.stride, depth),
                false => transpose::chain_rows(lines, start(corner.0, corner.1), a.stride),
            };
        }
        for (i, line) in lines.iter_mut().enumerate().take(height) {
            for k in 0..depth {
                let (lane, shift) = chain_place(k);
                let bits = u32::from(a.at(corner.0 + i, corner.1 + k).to_bits());
                line.0[lane] |= bits << shift;
            }
        }
    }

    fn run(left: &[CacheLine], panels: [&[CacheLine]; 2], c: &mut [f32], stride: usize, add: bool) {
        let blocks = check::<Self>(left, panels, c, stride);
        let b = panels.map(|panel| panel.as_ptr().cast());
        // SAFETY: packed for this path, so that the CPU has it; the sizes were just checked. The
        // second vector of a row begins 16 numbers after the first.
        flushing(|| unsafe {
            let c = c.as_mut_ptr();
            chains(left.as_ptr().cast(), b, blocks, [c, c.add(PANEL)], stride, add);
        });
    }
}

kernel_512! {
    /// Both chains of pairs of bf16 numbers.
    chains, "avx512f,avx512bf16", LINES, multiply_pairs
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn multiply_pairs(sum: __m512, a: __m512i, b: __m512i) -> __m512 {
    // SAFETY: vectors of 64 bytes, whatever they hold.
    let [a, b] = unsafe { std::mem::transmute::<[__m512i; 2], [__m512bh; 2]>([a, b]) };
    _mm512_dpbf16_ps(sum, a, b)
}
