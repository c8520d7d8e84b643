//! Packed factors of attention's products.

use core::ops::Range;

use super::super::matrix_rows::MatrixRows;
use crate::simd;
use crate::tile::{Left, PANEL, ROW, RUN, SQUARE, Tile, multiply, transpose};

/// Rows that are a left factor, and that tiles of scores are written to: `[runs, rows, ROW]`.
pub(super) struct ScoreRows {
    data: Vec<f32>,
    rows: usize,
}

/// Elements of the widest vector register.
pub(super) const LANES: usize = 16;

impl ScoreRows {
    pub(super) fn new(rows: usize, terms: usize) -> Self {
        Self { data: vec![0.0; terms.div_ceil(RUN) * rows * ROW], rows }
    }

    /// Where term `term` of row `i` is.
    fn at(&self, i: usize, term: usize) -> usize {
        (term / RUN * self.rows + i) * ROW + term % RUN
    }

    pub(super) fn copy(&mut self, from: MatrixRows<'_>, d: usize) {
        for (i, row) in from.iter(d).enumerate() {
            for (run, part) in row.chunks(RUN).enumerate() {
                let at = self.at(i, run * RUN);
                self.data[at..at + part.len()].copy_from_slice(part);
            }
        }
    }

    /// The vectors of the first `n` elements of row `i`, run by run.
    #[inline(always)]
    pub(super) fn runs(&mut self, i: usize, n: usize) -> impl Iterator<Item = &mut [[f32; LANES]]> {
        let runs = self.data.chunks_exact_mut(self.rows * ROW).enumerate().take(n.div_ceil(RUN));
        runs.map(
            #[inline(always)]
            move |(run, part)| {
                let vectors = RUN.min(n - run * RUN).div_ceil(LANES);
                &mut part[i * ROW..][..ROW].as_chunks_mut().0[..vectors]
            },
        )
    }

    /// Sets what is behind the first `n` elements of row `i` in the vector of the last.
    #[inline(always)]
    pub(super) fn hide(&mut self, i: usize, n: usize, value: f32) {
        let seen = (n - 1) % LANES;
        let at = self.at(i, n - 1 - seen);
        for (lane, x) in self.data[at..at + LANES].iter_mut().enumerate() {
            *x = if lane > seen { value } else { *x };
        }
    }

    /// Zeros behind the vector of the last of `n` elements, as far as products of the row read:
    /// tiles have fewer rows than a vector has elements.
    #[inline(always)]
    pub(super) fn clear(&mut self, i: usize, n: usize) {
        let end = n.next_multiple_of(LANES);
        if end < self.data.len() / (self.rows * ROW) * RUN {
            let at = self.at(i, end);
            self.data[at..at + LANES].copy_from_slice(&[0.0; LANES]);
        }
    }

    /// The tile of some rows and a panel of columns, to be set to a product times `scale`.
    pub(super) fn tile(&mut self, rows: Range<usize>, panel: usize, scale: f32) -> Tile<'_> {
        let at = self.at(rows.start, panel * PANEL);
        Tile { c: &mut self.data[at..], stride: ROW, rows: rows.len(), add: false, scale }
    }
}

/// A right factor: panels of [`PANEL`] columns, each `[terms, PANEL]`, zero behind the last column.
#[derive(Default)]
pub(super) struct Panels {
    data: Vec<f32>,
    pub(super) terms: usize,
    panels: usize,
}

impl Panels {
    /// Columns, those of zeros too.
    pub(super) fn columns(&self) -> usize {
        self.panels * PANEL
    }

    fn resize(&mut self, terms: usize, columns: usize) {
        let panels = columns.div_ceil(PANEL);
        if (self.terms, self.panels) != (terms, panels) {
            self.data = vec![0.0; panels * terms * PANEL];
        }
        (self.terms, self.panels) = (terms, panels);
    }

    /// A row of `m` is a term, its `d` columns are the columns.
    pub(super) fn of_columns(&mut self, m: MatrixRows<'_>, d: usize) {
        self.of_parts(m.to - m.from, [m].into_iter(), d);
    }

    /// The same of `terms` rows in several parts that follow each other.
    pub(super) fn of_parts<'a>(
        &mut self,
        terms: usize,
        parts: impl Iterator<Item = MatrixRows<'a>>,
        d: usize,
    ) {
        self.resize(terms, d);
        let size = self.terms * PANEL;
        let rows = parts.flat_map(|part| part.iter(d));
        simd(
            #[inline(always)]
            || {
                for (term, row) in rows.enumerate() {
                    let (whole, rest) = row.as_chunks::<PANEL>();
                    for (panel, part) in whole.iter().enumerate() {
                        self.data[panel * size + term * PANEL..][..PANEL].copy_from_slice(part);
                    }
                    if !rest.is_empty() {
                        let at = whole.len() * size + term * PANEL;
                        self.data[at..at + rest.len()].copy_from_slice(rest);
                    }
                }
            },
        );
    }

    /// A row of `parts`, of `columns` in all, is a column, its `d` columns are the terms.
    pub(super) fn of_rows<'a>(
        &mut self,
        columns: usize,
        parts: impl Iterator<Item = MatrixRows<'a>>,
        d: usize,
    ) {
        self.resize(d, columns);
        let mut column = 0;
        for m in parts {
            let mut from = m.from;
            while from < m.to {
                let to = m.to.min(from + PANEL - column % PANEL);
                let at = column / PANEL * d * PANEL + column % PANEL;
                to_panel(&mut self.data[at..], MatrixRows { from, to, ..m }, d);
                column += to - from;
                from = to;
            }
        }
    }

    /// `tile = scale·left·panel` for rows of `left` from `first` on and the first `terms` terms.
    pub(super) fn multiply(
        &self,
        panel: usize,
        left: &ScoreRows,
        first: usize,
        terms: usize,
        tile: Tile<'_>,
    ) {
        let panel = &self.data[panel * self.terms * PANEL..][..self.terms * PANEL];
        for run in (0..terms).step_by(RUN) {
            let a = &left.data[left.at(first, run)..];
            let tile = Tile { c: &mut *tile.c, add: run > 0, ..tile };
            multiply(tile, RUN.min(terms - run), a, Left::Plain, &panel[run * PANEL..]);
        }
    }

    /// `tile += scale·leftᵀ·panel` for columns of `left` from `first` on, all of one run, and its
    /// rows from `unseen` on.
    pub(super) fn multiply_transposed(
        &self,
        panel: usize,
        left: &ScoreRows,
        first: usize,
        unseen: usize,
        tile: Tile<'_>,
    ) {
        if unseen >= self.terms {
            return;
        }
        let panel = &self.data[panel * self.terms * PANEL..][..self.terms * PANEL];
        let a = &left.data[left.at(unseen, first)..];
        multiply(tile, self.terms - unseen, a, Left::Transposed, &panel[unseen * PANEL..]);
    }
}

/// Writes rows of `m`, a panel at most, as columns of one.
fn to_panel(to: &mut [f32], m: MatrixRows<'_>, d: usize) {
    let rows = m.to - m.from;
    let data = &m.data[m.from * m.width + m.column..];
    for (i, j) in squares(rows, d) {
        let (rows, columns) = (SQUARE.min(rows - i), SQUARE.min(d - j));
        let (to, from) = (&mut to[j * PANEL + i..], &data[i * m.width + j..]);
        if (rows, columns) == (SQUARE, SQUARE) {
            transpose(to, from, m.width);
        } else {
            for (i, j) in (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j))) {
                to[j * PANEL + i] = from[i * m.width + j];
            }
        }
    }
}

/// First row and column of the squares of a matrix.
fn squares(rows: usize, columns: usize) -> impl Iterator<Item = (usize, usize)> {
    let rows = (0..rows).step_by(SQUARE);
    rows.flat_map(move |i| (0..columns).step_by(SQUARE).map(move |j| (i, j)))
}
