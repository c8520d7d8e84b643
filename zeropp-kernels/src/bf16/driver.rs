//! The loops that all paths share, over blocks of rows, panels and tiles, and where results go.

use std::mem::MaybeUninit;
use std::ops::Range;

use half::bf16;

use super::convert::down;
use super::left::{Kernel, Soon, TileRows, TileSums};
use super::matrix::{BLOCK, COLS, CacheLine, Mat};
use super::packed::Right;
use crate::simd;

/// Most rows of a tile.
const ROWS_MAX: usize = 32;
/// Bytes of the rows of the left factor that are used with every panel before the next rows: they
/// stay in the second-level cache.
const ROWS_BYTES: usize = 512 << 10;

/// Where a product goes: rows `stride` apart.
pub(super) enum Sink<'a> {
    /// To fp32 numbers, set or added to.
    Floats { c: &'a mut [f32], stride: usize, add: bool },
    /// To bf16 numbers, rounded once, after the bias of each column was added.
    Halves { c: &'a mut [MaybeUninit<bf16>], stride: usize, bias: &'a [f32] },
}

impl<'a> Sink<'a> {
    /// The sinks of blocks of `rows` of all `count` rows: first row, rows, sink.
    pub(super) fn blocks(
        self,
        count: usize,
        rows: usize,
    ) -> impl Iterator<Item = (usize, usize, Sink<'a>)> {
        let mut rest = Some(self);
        (0..count).step_by(rows).map(move |from| {
            let height = rows.min(count - from);
            let (block, others) = rest.take().expect("put back").split(height);
            rest = Some(others);
            (from, height, block)
        })
    }

    /// The sink of the first `rows` rows, and of the others.
    fn split(self, rows: usize) -> (Self, Self) {
        match self {
            Sink::Floats { c, stride, add } => {
                let (first, rest) = c.split_at_mut((rows * stride).min(c.len()));
                (Sink::Floats { c: first, stride, add }, Sink::Floats { c: rest, stride, add })
            }
            Sink::Halves { c, stride, bias } => {
                let (first, rest) = c.split_at_mut((rows * stride).min(c.len()));
                (Sink::Halves { c: first, stride, bias }, Sink::Halves { c: rest, stride, bias })
            }
        }
    }
}

/// A tile of results on their way.
#[repr(C, align(64))]
struct TileScratch([f32; ROWS_MAX * COLS]);

impl TileScratch {
    fn sums(&mut self, add: bool) -> TileSums<'_> {
        TileSums { c: &mut self.0, stride: COLS, add }
    }
}

/// A tile's place in the product: its first row and column, and how much of it is inside.
#[derive(Clone, Copy)]
struct TilePlace {
    row: usize,
    col: usize,
    rows: usize,
    cols: usize,
}

/// Sums of products: of the left factors `a`, a kernel each, with as many right factors at a time,
/// tile by tile.
pub(super) fn run<'a, K: Kernel<'a>, const TERMS: usize>(
    mut kernels: [K; TERMS],
    a: [Mat<'a>; TERMS],
    products: &mut [([Right<'_>; TERMS], Sink<'_>)],
) {
    let blocks = products[0].0.map(|b| b.blocks()).into_iter().sum::<usize>();
    let block = ROWS_BYTES / (blocks * BLOCK * 2).max(1) / K::ROWS * K::ROWS;
    let block = block.clamp(2 * K::ROWS, 8 * ROWS_MAX / K::ROWS * K::ROWS);
    let mut scratch = TileScratch([0.0; ROWS_MAX * COLS]);
    for from in (0..a[0].rows).step_by(block) {
        let rows = from..a[0].rows.min(from + block);
        kernels.iter_mut().zip(a).for_each(|(kernel, a)| kernel.load(a, from, rows.len()));
        for (b, sink) in &mut *products {
            tiles(&kernels, rows.clone(), *b, sink, &mut scratch);
        }
    }
}

/// Bytes of a right factor that may be gone through for every tile of rows: they stay in the
/// second-level cache.
const PANELS_BYTES: usize = 1 << 20;

/// The product of the loaded `rows` and `b`: along the rows of what is added to where it is larger
/// than `b`, else along the panels of `b`. So what is larger is gone through once, in its order,
/// and fetched ahead.
fn tiles<'a, K: Kernel<'a>, const TERMS: usize>(
    kernels: &[K; TERMS],
    rows: Range<usize>,
    b: [Right<'_>; TERMS],
    sink: &mut Sink<'_>,
    scratch: &mut TileScratch,
) {
    let (from, n, along_rows) = (rows.start, b[0].sizes().1, along_rows(b[0], sink));
    let mut at = |row: usize, col: usize, soon| {
        let (height, cols) = (K::ROWS.min(rows.len() - row), COLS.min(n - col));
        let place = TilePlace { row: from + row, col, rows: height, cols };
        tile(kernels, row, place, b, soon, sink, scratch);
    };
    let (heights, widths) = ((0..rows.len()).step_by(K::ROWS), (0..n).step_by(COLS));
    if along_rows {
        for (row, col) in heights.flat_map(|row| widths.clone().map(move |col| (row, col))) {
            at(row, col, Next::Sums);
        }
        return;
    }
    let count = heights.len();
    for col in widths {
        for (i, row) in heights.clone().enumerate() {
            at(row, col, Next::Panels { part: i, of: count });
        }
    }
}

/// Whether what is added to is larger than the right factor, which stays in the cache.
fn along_rows(b: Right<'_>, sink: &Sink<'_>) -> bool {
    let bytes = b.bytes();
    matches!(sink, Sink::Floats { c, add: true, .. } if size_of_val(*c) > bytes)
        && bytes <= PANELS_BYTES
}

/// Numbers in a pair of lines of the cache.
const PAIR: usize = 2 * size_of::<CacheLine>() / size_of::<f32>();

/// What is read after a tile.
#[derive(Clone, Copy)]
enum Next {
    /// What the next rows are added to.
    Sums,
    /// The next panels, a part of them.
    Panels { part: usize, of: usize },
}

/// One tile, whose rows are those of the kernels from `row` on.
fn tile<'a, K: Kernel<'a>, const TERMS: usize>(
    kernels: &[K; TERMS],
    row: usize,
    place: TilePlace,
    b: [Right<'_>; TERMS],
    next: Next,
    sink: &mut Sink<'_>,
    scratch: &mut TileScratch,
) {
    let rows = TileRows { first: row, wanted: place.rows };
    let whole = place.rows == K::ROWS && place.cols == COLS;
    let mut soon = match (next, &*sink) {
        (Next::Sums, Sink::Floats { c, stride, .. }) => {
            // As much of the next rows as this tile is of its own, in the order of memory.
            let first = (place.row + K::ROWS) * stride + place.col * K::ROWS;
            Soon {
                start: c.as_ptr().wrapping_add(first).cast(),
                pairs: (K::ROWS * COLS / PAIR).div_ceil(b[0].blocks().max(1)),
            }
        }
        (Next::Panels { part, of }, _) => b[0].after(place.col, part, of),
        _ => Soon::NOTHING,
    };
    let mut multiply = |TileSums { c, stride, add }: TileSums<'_>| {
        for (i, (kernel, b)) in kernels.iter().zip(b).enumerate() {
            let sums = TileSums { c: &mut *c, stride, add: add || i > 0 };
            let soon = std::mem::replace(&mut soon, Soon::NOTHING);
            kernel.tile(rows, b.panels(place.col), sums, soon);
        }
    };
    match sink {
        Sink::Floats { c, stride, add } if whole => {
            let c = &mut c[place.row * *stride + place.col..];
            multiply(TileSums { c, stride: *stride, add: *add });
        }
        Sink::Floats { c, stride, add } => {
            if *add {
                fetch(scratch, c, *stride, place);
            }
            multiply(scratch.sums(*add));
            give_floats(scratch, c, *stride, place);
        }
        Sink::Halves { c, stride, bias } => {
            // Of nothing the sum is zero, as the scratch is.
            if b[0].blocks() > 0 {
                multiply(scratch.sums(false));
            }
            give_halves(scratch, c, *stride, bias, place);
        }
    }
}

fn fetch(scratch: &mut TileScratch, c: &[f32], stride: usize, place: TilePlace) {
    for (i, to) in scratch.0.chunks_mut(COLS).enumerate().take(place.rows) {
        let from = (place.row + i) * stride + place.col;
        to[..place.cols].copy_from_slice(&c[from..from + place.cols]);
    }
}

fn give_floats(scratch: &TileScratch, c: &mut [f32], stride: usize, place: TilePlace) {
    for (i, from) in scratch.0.chunks(COLS).enumerate().take(place.rows) {
        let to = (place.row + i) * stride + place.col;
        c[to..to + place.cols].copy_from_slice(&from[..place.cols]);
    }
}

/// Rounds a tile on its way out. Without a bias nothing is added: −0 stays what it is.
fn give_halves(
    scratch: &TileScratch,
    c: &mut [MaybeUninit<bf16>],
    stride: usize,
    bias: &[f32],
    place: TilePlace,
) {
    let bias = (!bias.is_empty()).then(|| &bias[place.col..place.col + place.cols]);
    simd(
        #[inline(always)]
        || {
            for (i, from) in scratch.0.chunks_exact(COLS).enumerate().take(place.rows) {
                let to = (place.row + i) * stride + place.col;
                let to = &mut c[to..to + place.cols];
                // Most rows are whole: of a known length, nothing is left over.
                match place.cols {
                    COLS => give_row(&mut to[..COLS], &from[..COLS], bias.map(|b| &b[..COLS])),
                    cols => give_row(to, &from[..cols], bias),
                }
            }
        },
    );
}

#[inline(always)]
fn give_row(to: &mut [MaybeUninit<bf16>], from: &[f32], bias: Option<&[f32]>) {
    match bias {
        Some(bias) => {
            for ((to, x), b) in to.iter_mut().zip(from).zip(bias) {
                to.write(down(*x + *b));
            }
        }
        None => to.iter_mut().zip(from).for_each(|(to, x)| {
            to.write(down(*x));
        }),
    }
}
