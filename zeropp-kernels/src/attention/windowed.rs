//! Attention of which a query sees the last keys alone (a sliding window).
//!
//! Query rows are taken in blocks; a block's scores are of the keys that any of its queries sees,
//! so that work and scratch follow the window and not the sample. A query leaves the logarithm of
//! the sum of its exponentials, from which the backward has the probabilities again.

use core::ops::Range;
use std::borrow::Cow;

use super::matrix_rows::MatrixRows;
use super::{
    Dims, Dropped, DroppedHead, EarlierRows, EarlierSums, QkvPart, SliceForward, gathered,
    heads_in, rows_of, tokens,
};
use crate::gemm::{MatMut, MatRef, StoreMode, gemm};
use crate::math::{exp, ln};
use crate::reduce::{max, sum, sum2};
use crate::threads::{Fresh, each_with};
use crate::{simd, update};

/// Query rows processed at a time, of which [`GRID`](crate::tokens::GRID) has a whole number.
const BLOCK: usize = 64;

/// The first key that the query of row `row` sees, of the last `window`, itself included.
pub fn first_key(row: usize, window: usize) -> usize {
    (row + 1).saturating_sub(window)
}

/// The keys and values that a slice's queries see of one group, from token `first` of the sample
/// on: where they lie, or a copy where there are earlier slices.
struct SeenKeys<'a> {
    first: usize,
    width: usize,
    keys: Cow<'a, [f32]>,
    values: Cow<'a, [f32]>,
}

impl<'a> SeenKeys<'a> {
    fn new(
        earlier: &'a [EarlierRows<'a>],
        qkv: &'a [f32],
        d: Dims,
        window: usize,
        [b, group]: [usize; 2],
    ) -> Self {
        let of = |part| rows_of(earlier, qkv, d, b, part, group);
        if earlier.is_empty() {
            let lying = |part| {
                let MatrixRows { data, column, .. } = of(part).next().expect("its own");
                Cow::Borrowed(&data[column..])
            };
            let (keys, values) = (lying(QkvPart::Key), lying(QkvPart::Value));
            return Self { first: 0, width: d.width(), keys, values };
        }
        let first = first_key(tokens(earlier), window);
        let copy = |part| Cow::Owned(gathered(of(part), d.d, first));
        Self { first, width: d.d, keys: copy(QkvPart::Key), values: copy(QkvPart::Value) }
    }
}

/// A block of queries `from..to` of one head of a sample, which see keys from `first` on.
#[derive(Clone, Copy)]
struct WindowBlock<'a> {
    d: Dims,
    window: usize,
    seen: &'a SeenKeys<'a>,
    queries: MatRef<'a>,
    from: usize,
    to: usize,
    first: usize,
}

impl<'a> WindowBlock<'a> {
    /// Queries `rows` of `head` in the sample's rows of `qkv`, which come after `before` tokens.
    fn new(
        d: Dims,
        window: usize,
        head: usize,
        qkv: &'a [f32],
        seen: &'a SeenKeys<'a>,
        before: usize,
        rows: Range<usize>,
    ) -> Self {
        let start = QkvPart::Query.start(d, head, rows.start);
        let queries = MatRef::strided(&qkv[start..], rows.len(), d.d, d.width());
        let (from, to) = (before + rows.start, before + rows.end);
        Self { d, window, seen, queries, from, to, first: first_key(from, window) }
    }

    fn rows(&self) -> usize {
        self.to - self.from
    }

    fn keys(&self) -> usize {
        self.to - self.first
    }

    /// Rows of the keys and values that the block's queries see, counted from the first of them.
    fn seen_rows(&self) -> Range<usize> {
        self.first - self.seen.first..self.to - self.seen.first
    }

    fn part(&self, of: &'a [f32]) -> MatRef<'a> {
        let SeenKeys { width, .. } = *self.seen;
        MatRef::strided(&of[self.seen_rows().start * width..], self.keys(), self.d.d, width)
    }

    fn of_keys(&self) -> MatRef<'a> {
        self.part(&self.seen.keys)
    }

    fn of_values(&self) -> MatRef<'a> {
        self.part(&self.seen.values)
    }

    /// Which columns of the block's scores a row of it sees.
    fn columns(&self, row: usize) -> Range<usize> {
        let query = self.from + row;
        first_key(query, self.window) - self.first..query + 1 - self.first
    }

    /// The factors of dropout into `m: [rows, keys]`, where a query sees a key.
    fn factors(&self, dropped: DroppedHead, m: &mut [f32]) {
        let queries = self.from..self.to;
        dropped.fill(m, self.keys(), queries, self.first, |row| self.columns(row));
    }

    /// Scores, scaled, into `p: [rows, keys]`.
    fn scores(&self, p: &mut [f32]) {
        let p = MatMut::new(p, self.rows(), self.keys());
        gemm(p, StoreMode::Set, self.d.scale(), self.queries, self.of_keys().t());
    }

    /// Probabilities into `p`, zero where a query does not see a key; the logarithms of the sums of
    /// exponentials go to `sums`.
    fn probabilities(&self, p: &mut [f32], mut sums: impl FnMut(f32)) {
        self.scores(p);
        simd(
            #[inline(always)]
            || {
                for (row, p) in p.chunks_exact_mut(self.keys()).enumerate() {
                    let range = self.columns(row);
                    hide(p, &range);
                    let seen = &mut p[range];
                    let top = max(seen);
                    seen.iter_mut().for_each(|x| *x = exp(*x - top));
                    let sum = sum(seen, |x| x);
                    let inverse = 1.0 / sum;
                    seen.iter_mut().for_each(|x| *x *= inverse);
                    sums(top + ln(sum));
                }
            },
        );
    }

    /// The probabilities again, and in `ds` the gradients of the unscaled scores by those of the
    /// probabilities.
    fn slopes(&self, p: &mut [f32], ds: &mut [f32], sums: &[f32]) {
        simd(
            #[inline(always)]
            || {
                let rows = p.chunks_exact_mut(self.keys()).zip(ds.chunks_exact_mut(self.keys()));
                for (row, ((p, ds), log)) in rows.zip(sums).enumerate() {
                    let range = self.columns(row);
                    hide(p, &range);
                    hide(ds, &range);
                    let (p, ds) = (&mut p[range.clone()], &mut ds[range]);
                    p.iter_mut().for_each(|x| *x = exp(*x - *log));
                    // Their sum is 1, but for the logarithm's rounding, which is in all of them.
                    let inverse = 1.0 / sum(p, |x| x);
                    p.iter_mut().for_each(|x| *x *= inverse);
                    let mean = sum2(p, ds, |p, dp| p * dp);
                    ds.iter_mut().zip(p).for_each(|(ds, p)| *ds = (*ds - mean) * *p);
                }
            },
        );
    }
}

/// Zeros outside of `range`.
#[inline(always)]
fn hide(row: &mut [f32], range: &Range<usize>) {
    row[..range.start].fill(0.0);
    row[range.end..].fill(0.0);
}

/// `x` by `m`, element by element; both are zero, or of no account, where a query sees no key.
fn multiply(x: &mut [f32], m: &[f32]) {
    simd(
        #[inline(always)]
        || update(x, m, |x, m| x * m),
    );
}

/// Elements of a block's scores of `keys` keys in all, and of its factors if it has any.
fn scratch_lens(d: Dims, keys: usize, window: usize, dropped: Option<Dropped>) -> (usize, usize) {
    let scores = BLOCK.min(d.s) * window.saturating_add(BLOCK - 1).min(keys);
    (scores, if dropped.is_some() { scores } else { 0 })
}

/// The output of attention, `[b, s, heads·d]`, of which a query sees the last `window` keys, itself
/// included; and of every query the logarithm of the sum of its exponentials, `[b, heads, s]`.
/// Probabilities are dropped if `dropped` says which.
pub fn attention(
    qkv: &[f32],
    d: Dims,
    window: usize,
    dropped: Option<Dropped>,
) -> (Vec<f32>, Vec<f32>) {
    attention_after(&[], qkv, d, window, dropped)
}

/// The same for a slice of a sample, whose queries see the `earlier` slices too.
///
/// # Panics
/// Panics if there are earlier slices, and several samples.
pub fn attention_after(
    earlier: &[EarlierRows<'_>],
    qkv: &[f32],
    d: Dims,
    window: usize,
    dropped: Option<Dropped>,
) -> (Vec<f32>, Vec<f32>) {
    let before = d.check_slice(qkv.len(), earlier);
    let mut out = vec![0.0; d.b * d.s * d.out_width()];
    let mut sums = Fresh::new(d.b * d.heads * d.s);
    let heads = d.heads_of(&mut out).zip(sums.parts(d.s)).enumerate();
    let (len, factors_len) = scratch_lens(d, before + d.s, window, dropped);
    let scratch = || [vec![0.0; len], vec![0.0; factors_len]];
    each_with(heads, scratch, |[p, m], (i, (mut out, mut sums))| {
        let (b, head) = (i / d.heads, i % d.heads);
        let group = head / (d.heads / d.groups);
        let seen = SeenKeys::new(earlier, qkv, d, window, [b, group]);
        let qkv = &qkv[d.sample(b, d.width())];
        for rows in d.blocks(BLOCK) {
            let block = WindowBlock::new(d, window, head, qkv, &seen, before, rows.clone());
            let p = &mut p[..block.rows() * block.keys()];
            block.probabilities(p, |log| sums.push(log));
            if let Some(dropped) = dropped {
                let m = &mut m[..p.len()];
                block.factors(dropped.head(d, b, head), m);
                multiply(p, m);
            }
            let p = MatRef::new(p, block.rows(), block.keys());
            gemm(out.part(rows, 0..d.d), StoreMode::Set, 1.0, p, block.of_values());
        }
    });
    (out, sums.done())
}

/// The gradient of `qkv` for the output gradient `dy`, with the logarithms that the forward left.
pub fn attention_backward(
    dy: &[f32],
    qkv: &[f32],
    sums: &[f32],
    d: Dims,
    window: usize,
    dropped: Option<Dropped>,
) -> Vec<f32> {
    let forward = SliceForward { earlier: &[], qkv, sums };
    attention_backward_after(forward, EarlierSums::default(), dy, d, window, dropped)
}

/// Scratch of a backward: a block's probabilities, their slopes and factors, and the gradients of a
/// group's keys and values, from the first that is seen on.
struct Backward {
    p: Vec<f32>,
    ds: Vec<f32>,
    factors: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

impl Backward {
    fn new(d: Dims, before: usize, window: usize, dropped: Option<Dropped>) -> Self {
        let (len, factors_len) = scratch_lens(d, before + d.s, window, dropped);
        let rows = before + d.s - first_key(before, window);
        let [p, ds, factors] = [len, len, factors_len].map(|len| vec![0.0; len]);
        Self { p, ds, factors, dk: vec![0.0; rows * d.d], dv: vec![0.0; rows * d.d] }
    }

    /// A block of queries of a head: adds to dk and dv, and sets its rows of `dq`.
    fn block(
        &mut self,
        block: WindowBlock<'_>,
        dy: MatRef<'_>,
        sums: &[f32],
        dropped: Option<DroppedHead>,
        dq: MatMut<'_>,
    ) {
        let (d, rows, keys) = (block.d, block.rows(), block.keys());
        let (p, ds) = (&mut self.p[..rows * keys], &mut self.ds[..rows * keys]);
        block.scores(p);
        gemm(MatMut::new(ds, rows, keys), StoreMode::Set, 1.0, dy, block.of_values().t());
        if let Some(dropped) = dropped {
            let m = &mut self.factors[..ds.len()];
            block.factors(dropped, m);
            multiply(ds, m);
        }
        block.slopes(p, ds, sums);
        if dropped.is_some() {
            multiply(p, &self.factors[..p.len()]);
        }
        let (p, ds) = (MatRef::new(p, rows, keys), MatRef::new(ds, rows, keys));
        let Range { start, end } = block.seen_rows();
        let [dk, dv] = [&mut self.dk, &mut self.dv]
            .map(|sums| MatMut::new(&mut sums[start * d.d..end * d.d], keys, d.d));
        gemm(dv, StoreMode::Add, 1.0, p.t(), dy);
        gemm(dk, StoreMode::Add, d.scale(), ds.t(), block.queries);
        gemm(dq, StoreMode::Set, d.scale(), ds, block.of_keys());
    }
}

/// The same for a slice of a sample as in [`attention_after`], which takes up what later slices
/// left for its keys and values, and adds to the sums of earlier ones.
///
/// # Panics
/// Panics if there are earlier slices, and several samples.
pub fn attention_backward_after(
    forward: SliceForward<'_>,
    earlier_sums: EarlierSums<'_>,
    dy: &[f32],
    d: Dims,
    window: usize,
    dropped: Option<Dropped>,
) -> Vec<f32> {
    let SliceForward { earlier, qkv, sums } = forward;
    let before = d.check_slice(qkv.len(), earlier);
    let out_width = d.out_width();
    let mut dqkv = vec![0.0; qkv.len()];
    let scratch = || Backward::new(d, before, window, dropped);
    let groups = d.groups_of(&mut dqkv).zip(earlier_sums.by_group(d, earlier)).enumerate();
    each_with(groups, scratch, |scratch, (i, ([mut dq, dk, dv], mut group_sums))| {
        let (b, group) = (i / d.groups, i % d.groups);
        let seen = SeenKeys::new(earlier, qkv, d, window, [b, group]);
        let first = first_key(before, window);
        group_sums.load([&mut scratch.dk, &mut scratch.dv], d.d, d.d, first);
        let (qkv, dy) = (&qkv[d.sample(b, d.width())], &dy[d.sample(b, out_width)]);
        for rows in d.blocks(BLOCK).rev() {
            for (place, head) in heads_in(d, group).enumerate() {
                let block = WindowBlock::new(d, window, head, qkv, &seen, before, rows.clone());
                let dy = &dy[rows.start * out_width + head * d.d..];
                let dy = MatRef::strided(dy, rows.len(), d.d, out_width);
                let sums = &sums[(b * d.heads + head) * d.s..][rows.clone()];
                let dropped = dropped.map(|dropped| dropped.head(d, b, head));
                let dq = dq.part(rows.clone(), place * d.d..(place + 1) * d.d);
                scratch.block(block, dy, sums, dropped, dq);
            }
        }
        for (mut to, sums) in [(dk, &scratch.dk), (dv, &scratch.dv)] {
            let own = &sums[(before - first) * d.d..];
            for (row, sums) in own.chunks_exact(d.d).enumerate() {
                to.row(row).copy_from_slice(sums);
            }
        }
        group_sums.store([&scratch.dk, &scratch.dv], d.d, first);
    });
    dqkv
}
