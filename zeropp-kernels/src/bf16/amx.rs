//! Products by Intel's matrix tiles: four accumulators of 16 × 16 take all of K before they are
//! stored. The instructions are stable Rust only as assembly.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::cell::Cell;
use std::ops::Range;
use std::sync::OnceLock;

use half::bf16;

use super::left::{Kernel, Soon, TileRows, TileSums};
use super::matrix::{BLOCK, COLS, CacheLine, Mat};
use super::transpose;

/// Whether this CPU has the tiles, its system saves them, and this process may use them.
pub(super) fn is_permitted() -> bool {
    static ASKED: OnceLock<bool> = OnceLock::new();
    *ASKED.get_or_init(|| has_tiles() && system_saves_tiles() && permission())
}

/// AMX-BF16 and AMX-TILE, bits 22 and 24 of leaf 7.
fn has_tiles() -> bool {
    __cpuid(0).eax >= 7 && (__cpuid_count(7, 0).edx >> 22) & 0b101 == 0b101
}

/// The tiles' configuration and data, bits 17 and 18 of the states that the system has enabled.
fn system_saves_tiles() -> bool {
    let os_saves = __cpuid(1).ecx >> 27 & 1 == 1;
    if !os_saves {
        return false;
    }
    let states: u32;
    // SAFETY: `xgetbv` reads a register, and is there where CPUID says that the system uses it.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") states, out("edx") _, options(nomem)) };
    states >> 17 & 0b11 == 0b11
}

/// Asks Linux (5.16 and later) for the tiles, once for all threads of the process:
/// `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`.
#[cfg(target_os = "linux")]
fn permission() -> bool {
    let mut result = 158_u64;
    // SAFETY: the call takes two numbers and touches no memory; a kernel that does not know it
    // returns an error. `syscall` overwrites rcx and r11.
    unsafe {
        asm!(
            "syscall", inlateout("rax") result, in("rdi") 0x1023_u64, in("rsi") 18_u64,
            out("rcx") _, out("r11") _, options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn permission() -> bool {
    false
}

/// Eight tiles of 16 rows of 64 bytes, as `ldtilecfg` reads them.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

const CONFIGURATION: Configuration = Configuration {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

thread_local! {
    static SPARE: Cell<Vec<bf16>> = const { Cell::new(Vec::new()) };
}

/// The tiles of this thread, from configuration to release, and the rows of the left factor that
/// they are to read: in place, but for those that are turned, cut off, or end within a block of K.
/// These are copied into memory that goes back to the thread for the next product.
pub(super) struct Tiles<'a> {
    /// Rows in place, the first loaded one at the start, and the elements between them.
    in_place: (&'a [bf16], usize),
    /// How many.
    rows_in_place: usize,
    copy: Vec<bf16>,
    /// The first element of the copy, at a line of the cache.
    start: usize,
    copy_stride: usize,
    blocks: usize,
    /// Tiles belong to a thread.
    _thread: std::marker::PhantomData<*const ()>,
}

impl Tiles<'_> {
    /// Configures the tiles for products of `blocks` blocks of K.
    pub(super) fn new(blocks: usize) -> Self {
        // SAFETY: packed for `Isa::Amx`, so that the process has its permission; the configuration
        // is a valid one.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &CONFIGURATION, options(nostack, readonly)) };
        Self {
            in_place: (&[], 0),
            rows_in_place: 0,
            copy: SPARE.take(),
            start: 0,
            // Not a power of two: rows would share their sets of the first-level cache.
            copy_stride: (blocks | 1) * BLOCK,
            blocks,
            _thread: std::marker::PhantomData,
        }
    }

    /// Copies `rows` rows of `a` from `from` on, padded with zeros in both directions.
    fn copy(&mut self, a: Mat<'_>, from: usize, rows: usize) {
        let (depth, stride) = (self.blocks * BLOCK, self.copy_stride);
        let need = rows.next_multiple_of(Self::ROWS) * stride + BLOCK;
        if self.copy.len() < need {
            self.copy.resize(need, bf16::ZERO);
        }
        self.start = self.copy.as_ptr().align_offset(64);
        let copy = &mut self.copy[self.start..];
        copy[rows * stride..rows.next_multiple_of(Self::ROWS) * stride].fill(bf16::ZERO);
        if a.turned {
            return turned(copy, stride, a, from..from + rows, depth);
        }
        for (i, to) in copy.chunks_mut(stride).enumerate().take(rows) {
            to[..a.cols].copy_from_slice(&a.data[(from + i) * a.stride..][..a.cols]);
            to[a.cols..depth].fill(bf16::ZERO);
        }
    }
}

/// Rows of a turned matrix, `(from, rows)` of them, into rows of `depth` elements.
fn turned(copy: &mut [bf16], stride: usize, a: Mat<'_>, rows: Range<usize>, depth: usize) {
    let (from, rows) = (rows.start, rows.len());
    for k in (0..depth).step_by(BLOCK) {
        for i in (0..rows).step_by(16) {
            let to = &mut copy[i * stride + k..];
            if i + 16 <= rows && k < a.cols {
                let data = &a.data[k * a.stride + from + i..];
                transpose::rows_to_columns(to, stride, data, a.stride, a.cols - k);
                continue;
            }
            for (i, to) in (i..rows.min(i + 16)).zip(to.chunks_mut(stride)) {
                for (k, to) in (k..).zip(&mut to[..BLOCK]) {
                    *to = if k < a.cols { a.at(from + i, k) } else { bf16::ZERO };
                }
            }
        }
    }
}

impl Drop for Tiles<'_> {
    fn drop(&mut self) {
        // SAFETY: resets the tiles that `new` configured, on the same thread. They need not be
        // saved from here on, and the core may run faster.
        unsafe { asm!("tilerelease", options(nomem, nostack)) };
        SPARE.set(std::mem::take(&mut self.copy));
    }
}

impl<'a> Kernel<'a> for Tiles<'a> {
    const ROWS: usize = 32;

    fn load(&mut self, a: Mat<'a>, from: usize, rows: usize) {
        let ready = !a.turned && a.cols.is_multiple_of(BLOCK);
        self.rows_in_place = if ready { rows / Self::ROWS * Self::ROWS } else { 0 };
        if self.rows_in_place > 0 {
            self.in_place = (&a.data[from * a.stride..], a.stride);
        }
        if self.rows_in_place < rows {
            self.copy(a, from + self.rows_in_place, rows - self.rows_in_place);
        }
    }

    fn tile(&self, rows: TileRows, panels: [&[CacheLine]; 2], sums: TileSums<'_>, soon: Soon) {
        let TileSums { c, stride, add } = sums;
        let (left, left_stride) = match rows.first.checked_sub(self.rows_in_place) {
            None => (&self.in_place.0[rows.first * self.in_place.1..], self.in_place.1),
            Some(row) => (&self.copy[self.start + row * self.copy_stride..], self.copy_stride),
        };
        let last = Self::ROWS - 1;
        assert!(left.len() >= last * left_stride + self.blocks * BLOCK);
        assert!(c.len() >= last * stride + COLS);
        assert!(panels.iter().all(|panel| panel.len() == self.blocks * BLOCK / 2));
        assert!(self.blocks > 0);
        // SAFETY: the tiles are configured. 32 rows of `blocks` blocks lie in `left`, 32 rows of
        // 32 numbers in `c`, and `blocks` blocks in each panel, as just checked.
        unsafe {
            let half = rows.wanted <= 16;
            begin(c.as_ptr(), stride, half, add);
            multiply(Rows { start: left.as_ptr(), stride: left_stride, half }, panels, soon);
            store(c.as_mut_ptr(), stride, half);
        }
    }
}

/// Rows of the left factor that are multiplied: 32, or half of them.
struct Rows {
    start: *const bf16,
    stride: usize,
    half: bool,
}

// Tiles 0 to 3 hold c, of which the last two are rows from the 16th on, 4 and 5 the left factor, 6
// and 7 the panels. Rust code never uses tiles, so that they hold from one function to the next.

/// Sets the tiles of c to zeros, or to what is there if `add`.
///
/// # Safety
/// Needs configured tiles, and rows of 32 numbers at `c`, `stride` apart.
#[inline(always)]
unsafe fn begin(c: *const f32, stride: usize, half: bool, add: bool) {
    if !add {
        // SAFETY: touches tiles alone.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                options(nostack, nomem),
            );
        }
        return;
    }
    // SAFETY: reads the caller's rows.
    unsafe {
        asm!(
            "tileloadd tmm0, [{c} + {next}*1]", "tileloadd tmm1, [{c} + {next}*1 + 64]",
            c = in(reg) c, next = in(reg) stride * 4, options(nostack, readonly),
        );
        if !half {
            asm!(
                "tileloadd tmm2, [{c} + {next}*1]", "tileloadd tmm3, [{c} + {next}*1 + 64]",
                c = in(reg) c.add(16 * stride), next = in(reg) stride * 4,
                options(nostack, readonly),
            );
        }
    }
}

/// Writes the tiles of c.
///
/// # Safety
/// As for [`begin`].
#[inline(always)]
unsafe fn store(c: *mut f32, stride: usize, half: bool) {
    // SAFETY: writes the caller's rows.
    unsafe {
        asm!(
            "tilestored [{c} + {next}*1], tmm0", "tilestored [{c} + {next}*1 + 64], tmm1",
            c = in(reg) c, next = in(reg) stride * 4, options(nostack),
        );
        if !half {
            asm!(
                "tilestored [{c} + {next}*1], tmm2", "tilestored [{c} + {next}*1 + 64], tmm3",
                c = in(reg) c.add(16 * stride), next = in(reg) stride * 4, options(nostack),
            );
        }
    }
}

/// Adds the products of the rows and two panels to the tiles of c.
///
/// # Safety
/// Needs configured tiles, one block of K or more in each panel, and as many in each row.
#[inline(always)]
unsafe fn multiply(left: Rows, panels: [&[CacheLine]; 2], soon: Soon) {
    // SAFETY: all addresses are the caller's, but for those of `soon`: prefetches take any.
    unsafe {
        asm!(
            "2:",
            "tileloadd tmm6, [{b0} + {line}*1]",
            "tileloadd tmm4, [{a0} + {lda}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b1} + {line}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "test {half:e}, {half:e}",
            "jnz 3f",
            "tileloadd tmm5, [{a1} + {lda}*1]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "3:",
            // Some with each block: all at once, they would wait for each other, and the tiles for
            // them.
            "mov {count}, {pairs}",
            "test {count}, {count}",
            "jz 5f",
            "4:",
            "prefetcht1 [{soon}]", "prefetcht1 [{soon} + 64]",
            "add {soon}, 128",
            "dec {count}",
            "jnz 4b",
            "5:",
            "add {a0}, 64", "add {a1}, 64", "add {b0}, 1024", "add {b1}, 1024",
            "dec {n}",
            "jnz 2b",
            half = in(reg) u32::from(left.half),
            a0 = inout(reg) left.start => _,
            a1 = inout(reg) left.start.add(16 * left.stride) => _,
            b0 = inout(reg) panels[0].as_ptr() => _,
            b1 = inout(reg) panels[1].as_ptr() => _,
            n = inout(reg) panels[0].len() / (BLOCK / 2) => _,
            lda = in(reg) left.stride * 2,
            line = in(reg) 64_u64,
            soon = inout(reg) soon.start => _,
            pairs = in(reg) soon.pairs,
            count = out(reg) _,
            options(nostack, readonly),
        );
    }
}
