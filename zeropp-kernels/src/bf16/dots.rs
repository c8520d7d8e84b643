//! Products by `vdpbf16ps`, which takes a pair of bf16 numbers in each lane: where the pair is two
//! neighbours of one chain, the instruction is two steps of it, in the chain's order.
//!
//! Of a lane it adds the upper product first, rounds, then adds the lower one and rounds again, with
//! denormals flushed whatever the control register says. So the pairs of the even chain are
//! (k = 0, 2), (4, 6), …, and those of the odd one (1, 3), (5, 7), …, the upper half named first.

use std::arch::x86_64::*;
use std::sync::OnceLock;

use super::avx::flushing;
use super::convert::flush;
use super::left::{Chains, check};
use super::packed::{BLOCK, Line, Mat, PANEL, chain_place};
use super::{scalar, transpose};

/// Lines of a block of K in a panel, and lanes of a row of it.
const LINES: usize = BLOCK / 2;

/// Rows whose chains and results are in registers at once, as in the kernel of plain multiply-adds.
const KEPT_ROWS: usize = 4;

pub(super) struct Dots;

/// Whether this CPU has the instruction, and it rounds as described above, as far as [`agrees`] can
/// tell. The vendors describe the rounding in pseudo-code only, and all bits rest on it.
pub(super) fn keep_the_order() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let is_here = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16");
        let mut agrees_here = false;
        if is_here {
            // The thread may round otherwise for itself.
            // SAFETY: both were just detected.
            flushing(|| agrees_here = unsafe { agrees() });
        }
        agrees_here
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
    let (broad_a, broad_b) = (_mm512_set1_epi32(a as i32), _mm512_set1_epi32(b as i32));
    // SAFETY: vectors of 64 bytes, whatever they hold.
    let pairs = unsafe { [broad_a, broad_b].map(|x| std::mem::transmute::<__m512i, __m512bh>(x)) };
    let got = _mm512_cvtss_f32(_mm512_dpbf16_ps(_mm512_set1_ps(c), pairs[0], pairs[1]));
    let step = |c, upper: bool| {
        let number =
            |pair: u32| f32::from_bits(if upper { pair & 0xffff_0000 } else { pair << 16 });
        scalar::fused(flush(number(a)), flush(number(b)), c)
    };
    got.to_bits() == step(step(flush(c), true), false).to_bits()
}

impl Chains for Dots {
    const ROWS: usize = 16;
    const LINES: usize = LINES;

    #[inline(always)]
    fn fill(lines: &mut [Line], a: Mat<'_>, corner: (usize, usize), height: usize, depth: usize) {
        let whole = depth == BLOCK && height == Self::ROWS;
        if whole && a.turned {
            let lines = lines[..Self::ROWS].first_chunk_mut().expect("a row each");
            return transpose::chain_columns(
                lines,
                &a.data[corner.1 * a.stride + corner.0..],
                a.stride,
            );
        }
        if whole {
            let lines = lines[..Self::ROWS].first_chunk_mut().expect("a row each");
            return transpose::chain_rows(
                lines,
                &a.data[corner.0 * a.stride + corner.1..],
                a.stride,
            );
        }
        for (i, line) in lines.iter_mut().enumerate().take(height) {
            for k in 0..depth {
                let (lane, shift) = chain_place(k);
                let bits = u32::from(a.at(corner.0 + i, corner.1 + k).to_bits());
                line.0[lane] |= bits << shift;
            }
        }
    }

    fn run(left: &[Line], panels: [&[Line]; 2], c: &mut [f32], stride: usize, add: bool) {
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

/// A kernel of [`Dots::ROWS`] rows and two vectors, some rows after the others: in each block both
/// chains, then their sum onto the results.
///
/// # Safety
/// Needs AVX-512 with bf16, `blocks` blocks of rows of 16 pairs at `a` and of lines of 64 bytes at
/// both `b`, and as many rows of two vectors at `c`.
#[target_feature(enable = "avx512f,avx512bf16")]
#[inline(never)]
unsafe fn chains(
    a: *const i32,
    b: [*const __m512bh; 2],
    blocks: usize,
    c: [*mut f32; 2],
    stride: usize,
    add: bool,
) {
    for first in (0..Dots::ROWS).step_by(KEPT_ROWS) {
        // SAFETY: the first row is within the tile.
        let c = c.map(|c| unsafe { c.add(first * stride) });
        let mut results = [[_mm512_setzero_ps(); 2]; KEPT_ROWS];
        if add {
            for (row, results) in results.iter_mut().enumerate() {
                // SAFETY: the row is within the tile.
                *results = c.map(|c| unsafe { _mm512_loadu_ps(c.add(row * stride)) });
            }
        }
        for block in 0..blocks {
            // SAFETY: the rows are within the tile, the block within the rows and the panels.
            let a = unsafe { a.add((block * Dots::ROWS + first) * LINES) };
            // SAFETY: the same.
            let b = b.map(|b| unsafe { b.add(block * LINES) });
            let mut chains = [[[_mm512_setzero_ps(); 2]; KEPT_ROWS]; 2];
            for pair in (0..LINES).step_by(2) {
                for (line, chain) in (pair..).zip(&mut chains) {
                    // SAFETY: the line is within the block; lines are aligned as vectors are.
                    let b = b.map(|b| unsafe { b.add(line).read() });
                    for (row, sums) in chain.iter_mut().enumerate() {
                        // SAFETY: the row is within the tile, the pair within the block; vectors
                        // of 64 bytes, whatever they hold.
                        let a: __m512bh = unsafe {
                            std::mem::transmute(_mm512_set1_epi32(*a.add(row * LINES + line)))
                        };
                        sums[0] = _mm512_dpbf16_ps(sums[0], a, b[0]);
                        sums[1] = _mm512_dpbf16_ps(sums[1], a, b[1]);
                    }
                }
            }
            for (row, results) in results.iter_mut().enumerate() {
                for (i, result) in results.iter_mut().enumerate() {
                    let sum = _mm512_add_ps(chains[0][row][i], chains[1][row][i]);
                    *result = _mm512_add_ps(*result, sum);
                }
            }
        }
        for (row, results) in results.iter().enumerate() {
            for (c, result) in c.iter().zip(results) {
                // SAFETY: the row is within the tile.
                unsafe { _mm512_storeu_ps(c.add(row * stride), *result) };
            }
        }
    }
}
