//! Products by vectors of fp32 numbers with fused multiply-adds, which flush denormals while the
//! thread's control register says so.

use std::arch::asm;
use std::arch::x86_64::*;

use super::left::{TileChains, check, start};
use super::matrix::{BLOCK, CacheLine, PANEL};

/// Rounding to nearest, no exception trapped, denormals flushed (FTZ) and read as zeros (DAZ).
const FLUSHING: u32 = 0x1f80 | 0x8000 | 0x0040;

/// Calls `f`, a kernel that must not be inlined, with denormals flushed; then all is as it was.
///
/// Rust takes the control register to be as it is at the start of a thread, and promises nothing
/// of what computes under another one. What could go wrong is that the compiler computes something
/// itself or moves it to where the register is different. It can do neither with these kernels:
/// they read all their numbers from memory and write them there, between two blocks of assembly
/// that may do the same, and are calls. What they make is compared bit by bit with plain
/// arithmetic, on denormals too. Other arithmetic has no place in `f`.
#[inline(always)]
pub(super) fn flushing(f: impl FnOnce()) {
    let mut before = 0_u32;
    // SAFETY: reads the control register into a number, and sets it to a valid value, which holds
    // for the kernel alone, as described.
    unsafe {
        asm!("stmxcsr [{}]", in(reg) &raw mut before, options(nostack));
        asm!("ldmxcsr [{}]", in(reg) &FLUSHING, options(nostack));
    }
    f();
    // SAFETY: restores what was there.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &before, options(nostack)) };
}

/// Rows of a tile of vectors of 16 numbers, and those of them whose chains and results are in
/// registers at once: 4 · 2 vectors · 3 = 24 of 32, so that nothing but factors moves while K goes
/// by.
pub(super) const TILE_ROWS: usize = 16;
pub(super) const KEPT_ROWS: usize = 4;

/// A kernel of [`TILE_ROWS`] rows and two vectors, some rows after the others: in each block both
/// chains, then their sum onto the results. A row of a block has `$lines` lanes at `a`, a panel as
/// many lines; `$step` goes on in a chain with a lane of the one, everywhere, and a line of the
/// other.
macro_rules! kernel_512 {
    ($(#[$doc:meta])* $name:ident, $features:literal, $lines:expr, $step:ident) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// Needs these features, `blocks` blocks of rows at `a` and of lines of 64 bytes at both
        /// `b`, and as many rows of two vectors at `c`.
        #[target_feature(enable = $features)]
        #[inline(never)]
        unsafe fn $name(
            a: *const i32,
            b: [*const __m512i; 2],
            blocks: usize,
            c: [*mut f32; 2],
            stride: usize,
            add: bool,
        ) {
            for first in (0..TILE_ROWS).step_by(KEPT_ROWS) {
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
                    // SAFETY: the rows are within the tile, the block within rows and panels.
                    let a = unsafe { a.add((block * TILE_ROWS + first) * $lines) };
                    // SAFETY: the same.
                    let b = b.map(|b| unsafe { b.add(block * $lines) });
                    let mut chains = [[[_mm512_setzero_ps(); 2]; KEPT_ROWS]; 2];
                    for pair in (0..$lines).step_by(2) {
                        for (line, chain) in (pair..).zip(&mut chains) {
                            // SAFETY: the line is within the block.
                            let b = b.map(|b| unsafe { _mm512_loadu_si512(b.add(line)) });
                            for (row, sums) in chain.iter_mut().enumerate() {
                                // SAFETY: the row is within the tile, the lane within the block.
                                let a = _mm512_set1_epi32(unsafe { *a.add(row * $lines + line) });
                                sums[0] = $step(sums[0], a, b[0]);
                                sums[1] = $step(sums[1], a, b[1]);
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
    };
}
pub(super) use kernel_512;

kernel_512! {
    /// Both chains of fp32 numbers.
    chains_512, "avx512f", BLOCK, multiply_add
}

#[inline]
#[target_feature(enable = "avx512f")]
fn multiply_add(sum: __m512, a: __m512i, b: __m512i) -> __m512 {
    _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum)
}

/// A kernel of [`Avx2::ROWS`] rows and two vectors: the even chain of a block, then the odd one,
/// then both onto c, as 16 registers hold one chain of them.
///
/// # Safety
/// Needs AVX2 and FMA, `blocks` blocks of rows of 32 numbers at `a` and of lines of 64 bytes at
/// both `b`, and as many rows of two vectors at `c`.
#[target_feature(enable = "avx2,fma")]
#[inline(never)]
unsafe fn chains_256(
    a: *const f32,
    b: [*const f32; 2],
    blocks: usize,
    c: [*mut f32; 2],
    stride: usize,
) {
    for block in 0..blocks {
        // SAFETY: the block is within the rows and the panels.
        let a = unsafe { a.add(block * Avx2::ROWS * BLOCK) };
        // SAFETY: the same.
        let b = b.map(|b| unsafe { b.add(block * BLOCK * PANEL) });
        let mut chains = [[[_mm256_setzero_ps(); 2]; Avx2::ROWS]; 2];
        for (first, sums) in chains.iter_mut().enumerate() {
            let mut own = *sums;
            for k in (first..BLOCK).step_by(2) {
                // SAFETY: k is within the block.
                let b = b.map(|b| unsafe { _mm256_loadu_ps(b.add(k * PANEL)) });
                for (row, sums) in own.iter_mut().enumerate() {
                    // SAFETY: the row is within the tile, k within the block.
                    let a = _mm256_set1_ps(unsafe { *a.add(row * BLOCK + k) });
                    sums[0] = _mm256_fmadd_ps(a, b[0], sums[0]);
                    sums[1] = _mm256_fmadd_ps(a, b[1], sums[1]);
                }
            }
            *sums = own;
        }
        let [even, odd] = &chains;
        for (row, (even, odd)) in even.iter().zip(odd).enumerate() {
            for ((c, even), odd) in c.iter().zip(even).zip(odd) {
                let sum = _mm256_add_ps(*even, *odd);
                // SAFETY: the row is within the tile.
                unsafe {
                    let c = c.add(row * stride);
                    _mm256_storeu_ps(c, _mm256_add_ps(_mm256_loadu_ps(c), sum));
                }
            }
        }
    }
}

pub(super) struct Avx512;

impl TileChains for Avx512 {
    const ROWS: usize = TILE_ROWS;

    fn run(left: &[CacheLine], panels: [&[CacheLine]; 2], c: &mut [f32], stride: usize, add: bool) {
        let blocks = check::<Self>(left, panels, c, stride);
        let b = panels.map(|panel| panel.as_ptr().cast());
        // SAFETY: packed for this path, so that the CPU has it; the sizes were just checked. The
        // second vector of a row begins 16 numbers after the first.
        flushing(|| unsafe {
            let c = c.as_mut_ptr();
            chains_512(left.as_ptr().cast(), b, blocks, [c, c.add(PANEL)], stride, add);
        });
    }
}

pub(super) struct Avx2;

impl TileChains for Avx2 {
    const ROWS: usize = 6;

    fn run(left: &[CacheLine], panels: [&[CacheLine]; 2], c: &mut [f32], stride: usize, add: bool) {
        let blocks = check::<Self>(left, panels, c, stride);
        start::<Self>(c, stride, add);
        // SAFETY: as above; here a panel is two vectors of 8.
        flushing(|| unsafe {
            for (i, panel) in panels.into_iter().enumerate() {
                let b: *const f32 = panel.as_ptr().cast();
                let c = c.as_mut_ptr().add(i * PANEL);
                chains_256(left.as_ptr().cast(), [b, b.add(8)], blocks, [c, c.add(8)], stride);
            }
        });
    }
}
