//! Attention of which a query sees the last keys alone (a sliding window).
//!
//! Query rows are taken in blocks; a block's scores are of the keys that any of its queries sees,
//! so that work and scratch follow the window and not the sample. A query leaves the logarithm of
//! the sum of its exponentials, from which the backward has the probabilities again.

use core::ops::Range;

use super::{Dims, Dropped, DroppedHead, QkvPart};
use crate::gemm::{MatMut, MatRef, StoreMode, gemm};
use crate::math::{exp, ln};
use crate::reduce::{max, sum, sum2};
use crate::threads::{Fresh, each_with};
use crate::{simd, update};

/// Query rows processed at a time, as for short samples.
const BLOCK: usize = 48;

/// The first key that the query of row `row` sees, of the last `window`, itself included.
pub fn first_key(row: usize, window: usize) -> usize {
    (row + 1).saturating_sub(window)
}

/// A block of queries `from..to` of one head of a sample, which see keys from `first` on.
#[derive(Clone, Copy)]
struct WindowBlock<'a> {
    d: Dims,
    window: usize,
    head: usize,
    /// The sample's rows of qkv.
    qkv: &'a [f32],
    from: usize,
    to: usize,
    first: usize,
}

impl<'a> WindowBlock<'a> {
    fn new(d: Dims, window: usize, head: usize, qkv: &'a [f32], rows: Range<usize>) -> Self {
        let Range { start: from, end: to } = rows;
        Self { d, window, head, qkv, from, to, first: first_key(from, window) }
    }

    fn rows(&self) -> usize {
        self.to - self.from
    }

    fn keys(&self) -> usize {
        self.to - self.first
    }

    fn part(&self, part: QkvPart, from: usize, to: usize) -> MatRef<'a> {
        let start = part.start(self.d, self.head, from);
        MatRef::strided(&self.qkv[start..], to - from, self.d.d, self.d.width())
    }

    fn queries(&self) -> MatRef<'a> {
        self.part(QkvPart::Query, self.from, self.to)
    }

    fn of_keys(&self, part: QkvPart) -> MatRef<'a> {
        self.part(part, self.first, self.to)
    }

    /// Which columns of the block's scores a row of it sees.
    fn seen(&self, row: usize) -> Range<usize> {
        let query = self.from + row;
        first_key(query, self.window) - self.first..query + 1 - self.first
    }

    /// The factors of dropout into `m: [rows, keys]`, where a query sees a key.
    fn factors(&self, dropped: DroppedHead, m: &mut [f32]) {
        let queries = self.from..self.to;
        dropped.fill(m, self.keys(), queries, self.first, |row| self.seen(row));
    }

    /// Scores, scaled, into `p: [rows, keys]`.
    fn scores(&self, p: &mut [f32]) {
        let p = MatMut::new(p, self.rows(), self.keys());
        gemm(p, StoreMode::Set, self.d.scale(), self.queries(), self.of_keys(QkvPart::Key).t());
    }

    /// Probabilities into `p`, zero where a query does not see a key; the logarithms of the sums of
    /// exponentials go to `sums`.
    fn probabilities(&self, p: &mut [f32], mut sums: impl FnMut(f32)) {
        self.scores(p);
        simd(
            #[inline(always)]
            || {
                for (row, p) in p.chunks_exact_mut(self.keys()).enumerate() {
                    let range = self.seen(row);
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
                    let range = self.seen(row);
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

/// Elements of a block's scores, and of its factors if it has any.
fn scratch_lens(d: Dims, window: usize, dropped: Option<Dropped>) -> (usize, usize) {
    let scores = BLOCK.min(d.s) * (window + BLOCK - 1).min(d.s);
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
    d.check(qkv.len());
    let mut out = vec![0.0; d.b * d.s * d.out_width()];
    let mut sums = Fresh::new(d.b * d.heads * d.s);
    let heads = d.heads_of(&mut out).zip(sums.parts(d.s)).enumerate();
    let (len, factors_len) = scratch_lens(d, window, dropped);
    let scratch = || [vec![0.0; len], vec![0.0; factors_len]];
    each_with(heads, scratch, |[p, m], (i, (mut out, mut sums))| {
        let (b, head) = (i / d.heads, i % d.heads);
        let qkv = &qkv[d.sample(b, d.width())];
        for rows in d.blocks(BLOCK) {
            let block = WindowBlock::new(d, window, head, qkv, rows);
            let p = &mut p[..block.rows() * block.keys()];
            block.probabilities(p, |log| sums.push(log));
            if let Some(dropped) = dropped {
                let m = &mut m[..p.len()];
                block.factors(dropped.head(d, b, head), m);
                multiply(p, m);
            }
            let p = MatRef::new(p, block.rows(), block.keys());
            let out = out.part(block.from..block.to, 0..d.d);
            gemm(out, StoreMode::Set, 1.0, p, block.of_keys(QkvPart::Value));
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
    d.check(qkv.len());
    let (out_width, share) = (d.out_width(), d.heads / d.groups);
    let mut dqkv = vec![0.0; qkv.len()];
    let (len, factors_len) = scratch_lens(d, window, dropped);
    let scratch = || [len, len, factors_len].map(|len| vec![0.0; len]);
    let groups = d.groups_of(&mut dqkv).enumerate();
    each_with(groups, scratch, |[p, ds, m], (i, [mut dq, mut dk, mut dv])| {
        let (b, group) = (i / d.groups, i % d.groups);
        let (qkv, dy) = (&qkv[d.sample(b, d.width())], &dy[d.sample(b, out_width)]);
        let blocks = |place| d.blocks(BLOCK).map(move |rows| (place, rows));
        for (place, rows) in (0..share).flat_map(blocks) {
            let head = group * share + place;
            let block = WindowBlock::new(d, window, head, qkv, rows);
            let (rows, keys) = (block.rows(), block.keys());
            let (p, ds) = (&mut p[..rows * keys], &mut ds[..rows * keys]);
            let dy = &dy[block.from * out_width + head * d.d..];
            let dy = MatRef::strided(dy, rows, d.d, out_width);
            block.scores(p);
            let v = block.of_keys(QkvPart::Value);
            gemm(MatMut::new(ds, rows, keys), StoreMode::Set, 1.0, dy, v.t());
            let sums = &sums[(b * d.heads + head) * d.s..][block.from..block.to];
            if let Some(dropped) = dropped {
                let m = &mut m[..ds.len()];
                block.factors(dropped.head(d, b, head), m);
                multiply(ds, m);
            }
            block.slopes(p, ds, sums);
            if dropped.is_some() {
                multiply(p, &m[..p.len()]);
            }
            let (p, ds) = (MatRef::new(p, rows, keys), MatRef::new(ds, rows, keys));
            // They begin as zeros.
            let [dk, dv] = [&mut dk, &mut dv].map(|m| m.part(block.first..block.to, 0..d.d));
            gemm(dv, StoreMode::Add, 1.0, p.t(), dy);
            gemm(dk, StoreMode::Add, d.scale(), ds.t(), block.queries());
            let dq = dq.part(block.from..block.to, place * d.d..(place + 1) * d.d);
            gemm(dq, StoreMode::Set, d.scale(), ds, block.of_keys(QkvPart::Key));
        }
    });
    dqkv
}
