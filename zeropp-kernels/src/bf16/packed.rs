//! The right factor of a product, laid out for the path that will read it.

use std::mem::MaybeUninit;

use super::convert::up;
use super::isa::{self, Isa};
use super::left::Soon;
use super::matrix::{BLOCK, COLS, CacheLine, Mat, PANEL, PairLines, ZERO};
use crate::GRAIN;
use crate::threads::{self, piece};

/// How the panels hold their elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PanelLayout {
    /// A line for each two of K, of bf16 pairs: for tiles.
    Pairs,
    /// The same of pairs of a chain ([`chain_place`]), an even and an odd one in turns.
    Chains,
    /// A line for each of K, in fp32: for vectors.
    Floats,
}

/// A right factor `[k, n]` in panels of 16 columns, k padded to blocks of 32 and n to pairs of
/// panels with zeros. It is made for the path in use, and read by it as often as one likes.
pub struct Packed {
    isa: Isa,
    k: usize,
    n: usize,
    lines: Vec<CacheLine>,
}

impl Packed {
    /// Lays `b: [k, n]` out for the path that this thread's products take.
    pub fn new(b: Mat<'_>) -> Self {
        Self::on(isa::in_use(), b)
    }

    /// The same for a path that is named: helpers do not know the path that was set for the calling
    /// thread.
    pub(crate) fn on(isa: Isa, b: Mat<'_>) -> Self {
        let (k, n) = (b.rows, b.cols);
        let mut packed = Self { isa, k, n, lines: Vec::new() };
        let panels = 2 * n.div_ceil(COLS);
        packed.lines.reserve_exact(packed.panel_lines() * panels);
        let (depth, count) = (packed.panel_lines(), packed.panel_lines() * panels);
        let spare = &mut packed.lines.spare_capacity_mut()[..count];
        let each = piece(panels, 2, GRAIN.div_ceil(PANEL * k.max(1)));
        threads::each(spare.chunks_mut((each * depth).max(1)).enumerate(), |(i, lines)| {
            pack(isa, b, i * each, depth, lines);
        });
        // SAFETY: every block of every panel was written, which is all of the lines.
        unsafe { packed.lines.set_len(count) };
        packed
    }

    /// (k, n), without the padding.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        (self.k, self.n)
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.lines[..])
    }

    /// Bytes that each element takes when packed for the path that this thread's products take.
    /// Elements are counted with both sizes padded to multiples of 32.
    pub fn element_bytes() -> usize {
        block_lines(isa::in_use()) * size_of::<CacheLine>() / (BLOCK * PANEL)
    }

    /// The first `k` rows of the first `n` columns, where it lies.
    ///
    /// # Panics
    /// Panics if there are fewer, or k ends within a block of 32 that goes on.
    pub fn first(&self, k: usize, n: usize) -> Right<'_> {
        assert!(k <= self.k && n <= self.n, "{k} × {n} of {} × {}", self.k, self.n);
        assert!(k == self.k || k.is_multiple_of(BLOCK), "the first {k} of {} rows", self.k);
        let depth = self.panel_lines();
        Right { isa: self.isa, k, n, depth, lines: &self.lines }
    }

    /// Lines of a panel.
    fn panel_lines(&self) -> usize {
        self.k.div_ceil(BLOCK) * block_lines(self.isa)
    }
}

/// Writes panels of `depth` lines each, from panel `first` of `b` on.
fn pack(isa: Isa, b: Mat<'_>, first: usize, depth: usize, lines: &mut [MaybeUninit<CacheLine>]) {
    let panels = lines.len() / depth;
    // Along the rows of the slice: down its columns is a walk from page to page.
    let places = |i: usize, j: usize| if b.turned { (j, i) } else { (i, j) };
    let blocks = b.rows.div_ceil(BLOCK);
    let (outer, inner) = if b.turned { (panels, blocks) } else { (blocks, panels) };
    for (i, j) in (0..outer).flat_map(|i| (0..inner).map(move |j| (i, j))) {
        let (block, panel) = places(i, j);
        let corner = (block * BLOCK, (first + panel) * PANEL);
        match layout(isa) {
            layout @ (PanelLayout::Pairs | PanelLayout::Chains) => {
                let to = &mut lines[panel * depth + block * BLOCK / 2..];
                pack_pairs(b, corner, layout, to.first_chunk_mut().expect("a block's lines"));
            }
            PanelLayout::Floats => {
                let to = &mut lines[panel * depth + block * BLOCK..];
                to[..BLOCK].write_copy_of_slice(&pack_floats(b, corner));
            }
        }
    }
}

/// Tiles for whose time two panels can be fetched.
const LEAST_PARTS: usize = 4;

/// A packed factor, or a corner of one, as a product takes it.
#[derive(Clone, Copy)]
pub struct Right<'a> {
    isa: Isa,
    k: usize,
    n: usize,
    depth: usize,
    lines: &'a [CacheLine],
}

impl<'a> From<&'a Packed> for Right<'a> {
    fn from(packed: &'a Packed) -> Self {
        packed.first(packed.k, packed.n)
    }
}

impl<'a> Right<'a> {
    pub(super) fn isa(&self) -> Isa {
        self.isa
    }

    /// (k, n), without the padding.
    pub(super) fn sizes(&self) -> (usize, usize) {
        (self.k, self.n)
    }

    /// Blocks of K.
    pub(super) fn blocks(&self) -> usize {
        self.k.div_ceil(BLOCK)
    }

    /// Bytes of its panels.
    pub(super) fn bytes(&self) -> usize {
        let lines = self.blocks() * block_lines(self.isa) * self.n.div_ceil(PANEL);
        lines * size_of::<CacheLine>()
    }

    /// A part of the two panels after those from `col` on, one of so many; nothing after the last,
    /// and nothing for few tiles: they would wait for the fetches as they do for the panels.
    pub(super) fn after(&self, col: usize, part: usize, of: usize) -> Soon {
        let len = self.blocks() * block_lines(self.isa);
        if col + COLS >= self.n || len < self.depth || of < LEAST_PARTS {
            return Soon::NOTHING;
        }
        // Of two panels, one behind the other, a pair of lines for each line of one.
        let pairs = block_lines(self.isa).div_ceil(of);
        let first = (col + COLS) / PANEL * self.depth + 2 * part * pairs * self.blocks();
        let start = self.lines.as_ptr().wrapping_add(first);
        Soon { start, pairs }
    }

    /// The two panels of the 32 columns from `col`, a multiple of 32.
    pub(super) fn panels(&self, col: usize) -> [&'a [CacheLine]; 2] {
        let (first, len) = (col / PANEL * self.depth, self.blocks() * block_lines(self.isa));
        let second = first + self.depth;
        [&self.lines[first..first + len], &self.lines[second..second + len]]
    }
}

/// Lines of a block of K in a panel.
fn block_lines(isa: Isa) -> usize {
    match layout(isa) {
        PanelLayout::Pairs | PanelLayout::Chains => BLOCK / 2,
        PanelLayout::Floats => BLOCK,
    }
}

fn layout(isa: Isa) -> PanelLayout {
    match isa {
        Isa::Amx => PanelLayout::Pairs,
        Isa::Avx512Bf16 => PanelLayout::Chains,
        Isa::Avx512 | Isa::Avx2 | Isa::Scalar => PanelLayout::Floats,
    }
}

/// Writes the pairs of a block of K and of a panel, from (k, column) `corner` of `b` on.
#[cfg(target_arch = "x86_64")]
fn pack_pairs(b: Mat<'_>, corner: (usize, usize), layout: PanelLayout, to: &mut PairLines) {
    use super::matrix::chain_place;
    use super::transpose::{pair, turn};
    let (first, from) = corner;
    let chains = layout == PanelLayout::Chains;
    let is_wide = from + PANEL <= b.cols;
    if is_wide && !b.turned {
        let data = &b.data[first * b.stride + from..];
        return pair(to, data, b.stride, b.rows - first, chains);
    }
    if is_wide && first + BLOCK <= b.rows {
        return turn(to, &b.data[from * b.stride + first..], b.stride, chains);
    }
    let mut lines = [ZERO; BLOCK / 2];
    for k in first..b.rows.min(first + BLOCK) {
        for col in from..b.cols.min(from + PANEL) {
            let bits = u32::from(b.at(k, col).to_bits());
            let k = k - first;
            let (line, shift) = if chains { chain_place(k) } else { (k / 2, k % 2 * 16) };
            lines[line].0[col - from] |= bits << shift;
        }
    }
    to.write_copy_of_slice(&lines);
}

#[cfg(not(target_arch = "x86_64"))]
fn pack_pairs(_: Mat<'_>, _: (usize, usize), _: PanelLayout, _: &mut PairLines) {
    unreachable!("only x86-64 reads pairs")
}

/// A block of K and of a panel in fp32, from (k, column) `corner` of `b` on.
fn pack_floats(b: Mat<'_>, corner: (usize, usize)) -> [CacheLine; BLOCK] {
    let ((first, from), mut lines) = (corner, [ZERO; BLOCK]);
    let (depth, cols) = (BLOCK.min(b.rows - first), PANEL.min(b.cols.saturating_sub(from)));
    if b.turned {
        for col in 0..cols {
            let column = &b.data[(from + col) * b.stride + first..][..depth];
            for (line, x) in lines.iter_mut().zip(column) {
                line.0[col] = up(*x).to_bits();
            }
        }
        return lines;
    }
    for (k, line) in lines.iter_mut().enumerate().take(if cols > 0 { depth } else { 0 }) {
        let row = &b.data[(first + k) * b.stride + from..][..cols];
        for (lane, x) in line.0.iter_mut().zip(row) {
            *lane = up(*x).to_bits();
        }
    }
    lines
}
