//! Views of the factors of a product, and the blocks and lines that paths cut them into.

use std::mem::MaybeUninit;

use half::bf16;

/// Elements of K that a product takes at a time.
pub(super) const BLOCK: usize = 32;
/// Columns of a panel.
pub(super) const PANEL: usize = 16;
/// Columns that a kernel computes at a time: two panels.
pub(super) const COLS: usize = 2 * PANEL;

/// A matrix of `rows × cols` elements of a slice.
#[derive(Clone, Copy, Debug)]
pub struct Mat<'a> {
    pub(super) data: &'a [bf16],
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Elements between the rows of the slice, which are columns if `turned`.
    pub(super) stride: usize,
    pub(super) turned: bool,
}

impl<'a> Mat<'a> {
    /// Rows one after another in `data`.
    ///
    /// # Panics
    /// Panics if `data` is too short, as [`strided`](Self::strided) does.
    pub fn new(data: &'a [bf16], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// Rows that start `stride` elements apart.
    ///
    /// # Panics
    /// Panics if the last element lies outside of `data`.
    pub fn strided(data: &'a [bf16], rows: usize, cols: usize, stride: usize) -> Self {
        let need = reach(rows, cols, stride);
        assert!(need <= data.len(), "a matrix of {need} elements in a slice of {}", data.len());
        Self { data, rows, cols, stride, turned: false }
    }

    /// Its rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The transposed view.
    pub fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, turned: !self.turned, ..self }
    }

    /// `rows` of its rows, from `from` on.
    pub(super) fn some_rows(self, from: usize, rows: usize) -> Self {
        assert!(from + rows <= self.rows, "{rows} rows from {from} of {}", self.rows);
        let start = if self.turned { from } else { from * self.stride };
        Self { data: &self.data[start.min(self.data.len())..], rows, ..self }
    }

    #[cfg(any(target_arch = "x86_64", test))]
    pub(super) fn at(&self, row: usize, col: usize) -> bf16 {
        self.data[match self.turned {
            true => col * self.stride + row,
            false => row * self.stride + col,
        }]
    }
}

/// Elements that a slice must have for the last element of a matrix to be in it.
pub(super) fn reach(rows: usize, cols: usize, stride: usize) -> usize {
    if rows == 0 || cols == 0 {
        return 0;
    }
    let last = (rows - 1).checked_mul(stride).and_then(|r| r.checked_add(cols));
    last.expect("matrix sizes fit into usize")
}

/// A line of the cache: 16 fp32 numbers, or 16 pairs of bf16 numbers. For tiles the number of
/// the lower k is in the lower half, for chains in the upper one.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct CacheLine(pub(super) [u32; 16]);

pub(super) const ZERO: CacheLine = CacheLine([0; 16]);

/// The lines of pairs of a block of K, not written yet.
pub(super) type PairLines = [MaybeUninit<CacheLine>; BLOCK / 2];

/// Where element k of a block of K is among the pairs of the chains: which pair, and its bit there.
#[cfg(target_arch = "x86_64")]
pub(super) fn chain_place(k: usize) -> (usize, usize) {
    (k / 4 * 2 + k % 2, if k % 4 < 2 { 16 } else { 0 })
}
