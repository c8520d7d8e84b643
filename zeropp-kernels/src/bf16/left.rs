//! The left factor of a product, some rows at a time, laid out for vectors: the rows of a tile side
//! by side, in fp32 or as the path has it.

use std::cell::Cell;
use std::marker::PhantomData;

use super::convert::up;
use super::matrix::{BLOCK, COLS, CacheLine, Mat, ZERO};
use crate::simd;

/// A path: how it holds rows of the left factor, and how it multiplies them with two panels.
pub(super) trait Kernel<'a> {
    /// Rows of a tile.
    const ROWS: usize;

    /// Gets `rows` rows of `a`, from `from` on, ready.
    fn load(&mut self, a: Mat<'a>, from: usize, rows: usize);

    /// The tile of `ROWS` loaded rows and two panels, set or added to `sums`; what is needed `soon`
    /// may be fetched meanwhile.
    fn tile(&self, rows: TileRows, panels: [&[CacheLine]; 2], sums: TileSums<'_>, soon: Soon);
}

/// The rows of a tile among those that are loaded.
#[derive(Clone, Copy)]
pub(super) struct TileRows {
    /// The first one.
    pub(super) first: usize,
    /// Those that are wanted: of the others anything may be made.
    pub(super) wanted: usize,
}

/// Where the sums of a tile go.
pub(super) struct TileSums<'a> {
    /// Rows of 32 numbers.
    pub(super) c: &'a mut [f32],
    /// Numbers from one to the next.
    pub(super) stride: usize,
    /// Whether they are added to.
    pub(super) add: bool,
}

/// Memory that the tiles after this one will read: pairs of lines of the cache, some for each block
/// of K of this tile.
#[derive(Clone, Copy)]
pub(super) struct Soon {
    /// The first line. It is an address and no more: a fetch into the cache reads nothing.
    pub(super) start: *const CacheLine,
    /// Pairs for each block of K.
    pub(super) pairs: usize,
}

impl Soon {
    /// Nothing.
    pub(super) const NOTHING: Self = Self { start: std::ptr::null(), pairs: 0 };
}

/// The two chains of sums of a tile of rows.
pub(super) trait TileChains {
    /// Rows of a tile.
    const ROWS: usize;
    /// Lines of a block of K in a panel. A row of the left factor takes one for each 16 of them.
    const LINES: usize = BLOCK;
    /// Lines of a row of a block of K.
    const ROW_LINES: usize = Self::LINES / 16;

    /// Lays `height` rows and `depth` columns of `a`, from `corner` on, out in rows of
    /// `ROW_LINES` lines. Where that is less than `ROWS` or a block, the lines come zeroed, and the
    /// rest of them stays so; otherwise they hold anything, and all are written.
    #[inline(always)]
    fn fill(
        lines: &mut [CacheLine],
        a: Mat<'_>,
        corner: (usize, usize),
        height: usize,
        depth: usize,
    ) {
        fill_floats(lines, a, corner, height, depth);
    }

    /// `c = left·panels`, or `c +=` if `add`, for [`COLS`](super::matrix::COLS) columns; `left`
    /// holds `ROWS` rows of 32 elements a block of K, `c` rows `stride` apart.
    fn run(left: &[CacheLine], panels: [&[CacheLine]; 2], c: &mut [f32], stride: usize, add: bool);
}

/// Checks what the kernels rely on; the number of blocks.
#[cfg(target_arch = "x86_64")]
pub(super) fn check<C: TileChains>(
    left: &[CacheLine],
    panels: [&[CacheLine]; 2],
    c: &[f32],
    stride: usize,
) -> usize {
    let blocks = panels[0].len() / C::LINES;
    assert!(panels.iter().all(|panel| panel.len() == blocks * C::LINES));
    assert!(left.len() == blocks * C::ROWS * C::ROW_LINES);
    assert!(c.len() >= (C::ROWS - 1) * stride + COLS);
    blocks
}

/// Prepares `c` for a path that adds each block to it.
pub(super) fn start<C: TileChains>(c: &mut [f32], stride: usize, add: bool) {
    if !add {
        c.chunks_mut(stride).take(C::ROWS).for_each(|row| row[..COLS].fill(0.0));
    }
}

thread_local! {
    static SPARE: Cell<Vec<CacheLine>> = const { Cell::new(Vec::new()) };
}

/// Rows of a left factor: tile, block of K, row, 32 elements. The memory goes back to the thread
/// for the next product.
pub(super) struct PackedRows<C> {
    lines: Vec<CacheLine>,
    tile_lines: usize,
    chains: PhantomData<C>,
}

impl<C: TileChains> PackedRows<C> {
    /// Rows of `blocks` blocks of K.
    pub(super) fn new(blocks: usize) -> Self {
        let tile_lines = blocks * C::ROWS * C::ROW_LINES;
        Self { lines: SPARE.take(), tile_lines, chains: PhantomData }
    }
}

impl<C> Drop for PackedRows<C> {
    fn drop(&mut self) {
        SPARE.set(std::mem::take(&mut self.lines));
    }
}

impl<C: TileChains> Kernel<'_> for PackedRows<C> {
    const ROWS: usize = C::ROWS;

    fn load(&mut self, a: Mat<'_>, from: usize, rows: usize) {
        let part = C::ROWS * C::ROW_LINES;
        let (tiles, blocks) = (rows.div_ceil(C::ROWS), self.tile_lines / part);
        if self.lines.len() < tiles * self.tile_lines {
            self.lines.resize(tiles * self.tile_lines, ZERO);
        }
        // Along the rows of the slice, as it lies in memory.
        let (outer, inner) = if a.turned { (blocks, tiles) } else { (tiles, blocks) };
        simd(
            #[inline(always)]
            || {
                for (i, j) in (0..outer).flat_map(|i| (0..inner).map(move |j| (i, j))) {
                    let (tile, block) = if a.turned { (j, i) } else { (i, j) };
                    let (row, k) = (tile * C::ROWS, block * BLOCK);
                    let (height, depth) = (C::ROWS.min(rows - row), BLOCK.min(a.cols - k));
                    let start = tile * self.tile_lines + block * part;
                    let lines = &mut self.lines[start..start + part];
                    if height < C::ROWS || depth < BLOCK {
                        lines.fill(ZERO);
                    }
                    C::fill(lines, a, (from + row, k), height, depth);
                }
            },
        );
    }

    fn tile(&self, rows: TileRows, panels: [&[CacheLine]; 2], sums: TileSums<'_>, _: Soon) {
        let first = rows.first / C::ROWS * self.tile_lines;
        let TileSums { c, stride, add } = sums;
        C::run(&self.lines[first..first + self.tile_lines], panels, c, stride, add);
    }
}

/// `height` rows and `depth` columns of `a`, from `corner` on, into rows of two lines in fp32.
#[inline(always)]
fn fill_floats(
    lines: &mut [CacheLine],
    a: Mat<'_>,
    corner: (usize, usize),
    height: usize,
    depth: usize,
) {
    let rows = lines.chunks_exact_mut(BLOCK / 16).take(height);
    if a.turned {
        let mut rows: Vec<_> = rows.collect();
        for k in 0..depth {
            let column = &a.data[(corner.1 + k) * a.stride + corner.0..][..height];
            for (row, x) in rows.iter_mut().zip(column) {
                row[k / 16].0[k % 16] = up(*x).to_bits();
            }
        }
        return;
    }
    for (i, row) in rows.enumerate() {
        let data = &a.data[(corner.0 + i) * a.stride + corner.1..][..depth];
        for (line, data) in row.iter_mut().zip(data.chunks(16)) {
            line.0.iter_mut().zip(data).for_each(|(lane, x)| *lane = up(*x).to_bits());
        }
    }
}
