//! Products by vectors of fp32 numbers with fused multiply-adds, which flush denormals while the
//! thread's control register says so.

use std::arch::asm;
use std::arch::x86_64::*;

use super::left::Chains;
use super::packed::{BLOCK, COLS, Line, PANEL};

/// Rounding to nearest, no exception trapped, denormals flushed (FTZ) and read as zeros (DAZ).
const FLUSHING: u32 = 0x1f80 | 0x8000 | 0x0040;

/// Calls `f`, which must not be inlined, with denormals flushed; then all is as it was.
#[inline(always)]
fn flushing(f: impl FnOnce()) {
    let mut before = 0_u32;
    // SAFETY: reads the control register into a number, and sets it to a valid value. No Rust code
    // but the kernel, whose instructions are given one by one, runs until it is restored.
    unsafe {
        asm!("stmxcsr [{}]", in(reg) &raw mut before, options(nostack));
        asm!("ldmxcsr [{}]", in(reg) &FLUSHING, options(nostack));
    }
    f();
    // SAFETY: restores what was there.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &before, options(nostack)) };
}

/// A kernel of `$rows` rows and two vectors: the even chain of a block, then the odd one, then both
/// onto c.
macro_rules! kernel {
    ($name:ident, $features:literal, $rows:literal, $zero:ident, $load:ident, $store:ident,
     $all:ident, $fma:ident, $add:ident) => {
        /// # Safety
        /// Needs the features, `blocks` blocks of rows of 32 numbers at `a` and of lines of 64
        /// bytes at both `b`, and `$rows` rows of two vectors at `c`.
        #[target_feature(enable = $features)]
        #[inline(never)]
        unsafe fn $name(
            mut a: *const f32,
            mut b: [*const f32; 2],
            blocks: usize,
            c: [*mut f32; 2],
            stride: usize,
        ) {
            for _ in 0..blocks {
                let mut chains = [[[$zero(); 2]; $rows]; 2];
                for (first, sums) in chains.iter_mut().enumerate() {
                    let mut own = *sums;
                    for k in (first..BLOCK).step_by(2) {
                        // SAFETY: k is within the block.
                        let b = b.map(|b| unsafe { $load(b.add(k * PANEL)) });
                        for (row, sums) in own.iter_mut().enumerate() {
                            // SAFETY: the row is within the tile, k within the block.
                            let a = $all(unsafe { *a.add(row * BLOCK + k) });
                            sums[0] = $fma(a, b[0], sums[0]);
                            sums[1] = $fma(a, b[1], sums[1]);
                        }
                    }
                    *sums = own;
                }
                for row in 0..$rows {
                    for (i, c) in c.iter().enumerate() {
                        let sum = $add(chains[0][row][i], chains[1][row][i]);
                        // SAFETY: the row is within the tile.
                        unsafe {
                            let c = c.add(row * stride);
                            $store(c, $add($load(c), sum));
                        }
                    }
                }
                // SAFETY: the next block, or the end.
                unsafe {
                    a = a.add($rows * BLOCK);
                    b = b.map(|b| b.add(BLOCK * PANEL));
                }
            }
        }
    };
}

kernel!(
    chains_512,
    "avx512f",
    12,
    _mm512_setzero_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_set1_ps,
    _mm512_fmadd_ps,
    _mm512_add_ps
);
kernel!(
    chains_256,
    "avx2,fma",
    6,
    _mm256_setzero_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_set1_ps,
    _mm256_fmadd_ps,
    _mm256_add_ps
);

/// Checks what the kernels rely on; the number of blocks.
fn check(rows: usize, left: &[Line], panels: [&[Line]; 2], c: &[f32], stride: usize) -> usize {
    let blocks = panels[0].len() / BLOCK;
    assert!(panels.iter().all(|panel| panel.len() == blocks * BLOCK));
    assert!(left.len() == blocks * rows * BLOCK / 16);
    assert!(c.len() >= (rows - 1) * stride + COLS);
    blocks
}

pub(super) struct Avx512;

impl Chains for Avx512 {
    const ROWS: usize = 12;

    fn run(left: &[Line], panels: [&[Line]; 2], c: &mut [f32], stride: usize) {
        let blocks = check(Self::ROWS, left, panels, c, stride);
        let b = panels.map(|panel| panel.as_ptr().cast());
        // SAFETY: packed for this path, so that the CPU has it; the sizes were just checked. The
        // second vector of a row begins 16 numbers after the first.
        flushing(|| unsafe {
            let c = c.as_mut_ptr();
            chains_512(left.as_ptr().cast(), b, blocks, [c, c.add(PANEL)], stride);
        });
    }
}

pub(super) struct Avx2;

impl Chains for Avx2 {
    const ROWS: usize = 6;

    fn run(left: &[Line], panels: [&[Line]; 2], c: &mut [f32], stride: usize) {
        let blocks = check(Self::ROWS, left, panels, c, stride);
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
