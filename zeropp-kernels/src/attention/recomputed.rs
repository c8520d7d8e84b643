//! Attention that keeps one number a query for the backward.
//!
//! Keys and values of a group are packed once. Queries are taken in blocks, whose scores are a
//! scratch buffer of `[block, s]`: nothing of `[s, s]` is ever there. A query leaves the logarithm
//! of the sum of its exponentials, from which the backward has the probabilities again.

mod buffers;

use core::ops::Range;

use buffers::{LANES, Panels, ScoreRows};

use super::earlier::GroupSums;
use super::matrix_rows::MatrixRows;
use super::{
    Dims, Dropped, DroppedHead, EarlierRows, EarlierSums, QkvPart, SliceForward, heads_in, rows_of,
};
use crate::mat_mut::MatMut;
use crate::math::exp;
use crate::reduce::fold;
use crate::simd;
use crate::threads::each_with;
use crate::tile::{PANEL, RUN, Tile, rows};

/// Query rows of which the scores are there at a time.
const BLOCK: usize = 64;

/// Turns the first `n` scores of row `i` of `p` into exp(score − max); the others become zero as
/// far as products read. Returns the maximum and the sum.
#[inline(always)]
fn exponentials(p: &mut ScoreRows, i: usize, n: usize) -> (f32, f32) {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    p.hide(i, n, f32::NEG_INFINITY);
    let mut tops = [f32::NEG_INFINITY; LANES];
    for run in p.runs(i, n) {
        for chunk in run {
            for lane in 0..LANES {
                tops[lane] = larger(tops[lane], chunk[lane]);
            }
        }
    }
    let top = fold(tops, larger);
    (top, exponentials_from(p, i, n, top))
}

/// Turns the first `n` scores of row `i` of `p` into exp(score − top) and returns their sum; the
/// others become zero as far as products read.
#[inline(always)]
fn exponentials_from(p: &mut ScoreRows, i: usize, n: usize, top: f32) -> f32 {
    p.hide(i, n, f32::NEG_INFINITY);
    let mut sums = [0.0; LANES];
    for run in p.runs(i, n) {
        for chunk in run {
            chunk.iter_mut().for_each(|x| *x = exp(*x - top));
            sums.iter_mut().zip(chunk).for_each(|(sum, x)| *sum += *x);
        }
    }
    p.clear(i, n);
    fold(sums, |a, b| a + b)
}

/// Turns row `i` of `dp`, gradients of the probabilities, into those of the scores, and that of
/// `p` into the probabilities, of which it has the exponentials whose sum is `sum`: 1, but for the
/// rounding of the logarithm that they were made with, which would be in all of them.
#[inline(always)]
fn softmax_backward(dp: &mut ScoreRows, p: &mut ScoreRows, i: usize, n: usize, sum: f32) {
    dp.hide(i, n, 0.0);
    let inverse = 1.0 / sum;
    let mut means = [0.0; LANES];
    for (dp, p) in dp.runs(i, n).zip(p.runs(i, n)) {
        for (dp, p) in dp.iter().zip(p) {
            for lane in 0..LANES {
                p[lane] *= inverse;
                means[lane] += dp[lane] * p[lane];
            }
        }
    }
    let mean = fold(means, |a, b| a + b);
    for (dp, p) in dp.runs(i, n).zip(p.runs(i, n)) {
        for (dp, p) in dp.iter_mut().zip(p) {
            for lane in 0..LANES {
                dp[lane] = (dp[lane] - mean) * p[lane];
            }
        }
    }
    dp.clear(i, n);
}

/// Factors of dropout for a block of queries, rows of whole groups of vectors.
#[derive(Default)]
struct Factors {
    data: Vec<f32>,
    stride: usize,
}

impl Factors {
    /// For `keys` keys, where probabilities are dropped at all.
    fn new(d: Dims, keys: usize, dropped: Option<Dropped>) -> Self {
        let stride = keys.next_multiple_of(LANES);
        match dropped {
            Some(_) => Self { data: vec![0.0; BLOCK.min(d.s) * stride], stride },
            None => Self::default(),
        }
    }

    /// Sets those of `queries` for the keys that each sees.
    fn fill(&mut self, of: DroppedHead, queries: Range<usize>) {
        let from = queries.start;
        of.fill(&mut self.data, self.stride, queries, 0, |row| 0..from + row + 1);
    }

    /// Multiplies the rows of `queries` in `p` by them.
    fn multiply(&self, p: &mut ScoreRows, queries: Range<usize>) {
        simd(
            #[inline(always)]
            || {
                for (i, m) in self.data.chunks_exact(self.stride).take(queries.len()).enumerate() {
                    let vectors = p.runs(i, queries.start + i + 1).flatten();
                    for (p, m) in vectors.zip(m.as_chunks::<LANES>().0) {
                        p.iter_mut().zip(m).for_each(|(p, m)| *p *= *m);
                    }
                }
            },
        );
    }
}

/// Rows of a block, as the tiles of its products take them.
fn tiles(rows_there: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let count = rows_there.div_ceil(rows());
    (0..count).map(move |t| t * rows_there / count..(t + 1) * rows_there / count)
}

/// Scores of the `queries` in `left`, for the keys in `panels`: a tile for the keys up to its last
/// query.
fn scores(
    out: &mut ScoreRows,
    left: &ScoreRows,
    panels: &Panels,
    scale: f32,
    queries: Range<usize>,
) {
    let from = queries.start;
    for panel in 0..queries.end.div_ceil(PANEL) {
        for rows in tiles(queries.len()).filter(|rows| from + rows.end > panel * PANEL) {
            let tile = out.tile(rows.clone(), panel, scale);
            panels.multiply(panel, left, rows.start, panels.terms, tile);
        }
    }
}

/// `out = scale·p·m` for the `queries` in `p` and the keys in `m`, every tile for the keys up to
/// its last query.
fn weighted(out: &mut [f32], p: &ScoreRows, m: &Panels, scale: f32, queries: Range<usize>) {
    let stride = m.columns();
    for panel in 0..stride / PANEL {
        for rows in tiles(queries.len()) {
            let c = &mut out[rows.start * stride + panel * PANEL..];
            let tile = Tile { c, stride, rows: rows.len(), add: false, scale };
            m.multiply(panel, p, rows.start, queries.start + rows.end, tile);
        }
    }
}

/// `out += scale·pᵀ·m` for the `queries` in `p` and `m`: a tile of keys for the queries that see
/// its first.
fn transposed(out: &mut [f32], p: &ScoreRows, m: &Panels, scale: f32, queries: Range<usize>) {
    let stride = m.columns();
    for run in (0..queries.end).step_by(RUN) {
        for keys in tiles(RUN.min(queries.end - run)) {
            let (first, rows) = (run + keys.start, keys.len());
            let unseen = first.saturating_sub(queries.start);
            for panel in 0..stride / PANEL {
                let c = &mut out[first * stride + panel * PANEL..];
                let tile = Tile { c, stride, rows, add: true, scale };
                m.multiply_transposed(panel, p, first, unseen, tile);
            }
        }
    }
}

/// Scratch of a forward: a block of queries and its scores, and the keys and values of a group.
struct Forward {
    d: Dims,
    /// Tokens of earlier slices.
    before: usize,
    q: ScoreRows,
    p: ScoreRows,
    keys: Panels,
    values: Panels,
    result: Vec<f32>,
    inverse: [f32; BLOCK],
    factors: Factors,
}

impl Forward {
    fn new(d: Dims, before: usize, dropped: Option<Dropped>) -> Self {
        let (rows, keys) = (BLOCK.min(d.s), before + d.s);
        Self {
            d,
            before,
            factors: Factors::new(d, keys, dropped),
            q: ScoreRows::new(rows, d.d),
            p: ScoreRows::new(rows, keys),
            keys: Panels::default(),
            values: Panels::default(),
            result: vec![0.0; rows * d.d.next_multiple_of(PANEL)],
            inverse: [0.0; BLOCK],
        }
    }

    /// One block of queries of a head: sets its rows of `out`; their logarithms of sums.
    fn block(
        &mut self,
        q: MatrixRows<'_>,
        out: &mut MatMut<'_>,
        sums: &mut [f32],
        dropped: Option<DroppedHead>,
    ) {
        let (d, queries) = (self.d.d, self.before + q.from..self.before + q.to);
        self.q.copy(q, d);
        scores(&mut self.p, &self.q, &self.keys, self.d.scale(), queries.clone());
        let (p, inverse) = (&mut self.p, &mut self.inverse);
        simd(
            #[inline(always)]
            || {
                for (i, (log, inverse)) in sums.iter_mut().zip(inverse).enumerate() {
                    let (top, sum) = exponentials(p, i, queries.start + i + 1);
                    *log = top + sum.ln();
                    *inverse = 1.0 / sum;
                }
            },
        );
        if let Some(dropped) = dropped {
            self.factors.fill(dropped, queries.clone());
            self.factors.multiply(&mut self.p, queries.clone());
        }
        weighted(&mut self.result, &self.p, &self.values, 1.0, queries);
        let rows = self.result.chunks_exact(self.values.columns()).take(q.to - q.from);
        for (i, row) in rows.enumerate() {
            let out = out.row(q.from + i).iter_mut().zip(row);
            out.for_each(|(out, x)| *out = *x * self.inverse[i]);
        }
    }
}

/// The output of attention, `[b, s, heads·d]`, and of every query the logarithm of the sum of its
/// exponentials, `[b, heads, s]`, which the backward needs. Probabilities are dropped if `dropped`
/// says which.
pub fn attention(qkv: &[f32], d: Dims, dropped: Option<Dropped>) -> (Vec<f32>, Vec<f32>) {
    attention_after(&[], qkv, d, dropped)
}

/// The same for a slice of a sample, whose queries see the `earlier` slices too.
///
/// # Panics
/// Panics if there are earlier slices, and several samples.
pub fn attention_after(
    earlier: &[EarlierRows<'_>],
    qkv: &[f32],
    d: Dims,
    dropped: Option<Dropped>,
) -> (Vec<f32>, Vec<f32>) {
    let before = d.check_slice(qkv.len(), earlier);
    let mut out = vec![0.0; d.b * d.s * d.out_width()];
    let mut sums = vec![0.0; d.b * d.heads * d.s];
    let share = d.heads / d.groups;
    let samples = d.samples(&mut out, d.out_width());
    let groups = samples.flat_map(|sample| sample.bands(share * d.d).map(|(_, group)| group));
    let groups = groups.zip(sums.chunks_mut(share * d.s)).enumerate();
    each_with(
        groups,
        || Forward::new(d, before, dropped),
        |scratch, (i, (out, sums))| {
            let (b, group) = (i / d.groups, i % d.groups);
            let of = |part| rows_of(earlier, qkv, d, b, part, group);
            scratch.keys.of_rows(before + d.s, of(QkvPart::Key), d.d);
            scratch.values.of_parts(before + d.s, of(QkvPart::Value), d.d);
            let (data, width) = (&qkv[d.sample(b, d.width())], d.width());
            let heads = out.bands(d.d).zip(sums.chunks_mut(d.s));
            for (head, ((_, mut out), sums)) in heads_in(d, group).zip(heads) {
                let dropped = dropped.map(|dropped| dropped.head(d, b, head));
                for Range { start: from, end: to } in d.blocks(BLOCK) {
                    let q = MatrixRows { data, width, column: d.query(head), from, to };
                    scratch.block(q, &mut out, &mut sums[from..to], dropped);
                }
            }
        },
    );
    (out, sums)
}

/// Scratch of a backward: what belongs to a block of queries, and the gradients of a group.
struct Backward {
    d: Dims,
    /// Tokens of earlier slices.
    before: usize,
    /// Query and output gradient of a block, to be on the left of products and on the right.
    q: ScoreRows,
    dy: ScoreRows,
    right_q: Panels,
    right_dy: Panels,
    p: ScoreRows,
    dp: ScoreRows,
    dq: Vec<f32>,
    keys: Panels,
    values: Panels,
    /// The keys as factors of dq.
    right_keys: Panels,
    dk: Vec<f32>,
    dv: Vec<f32>,
    factors: Factors,
}

impl Backward {
    fn new(d: Dims, before: usize, dropped: Option<Dropped>) -> Self {
        let (rows, columns) = (BLOCK.min(d.s), d.d.next_multiple_of(PANEL));
        let (keys, block) = (before + d.s, |terms| ScoreRows::new(rows, terms));
        Self {
            d,
            before,
            q: block(d.d),
            dy: block(d.d),
            right_q: Panels::default(),
            right_dy: Panels::default(),
            p: block(keys),
            dp: block(keys),
            dq: vec![0.0; rows * columns],
            keys: Panels::default(),
            values: Panels::default(),
            right_keys: Panels::default(),
            dk: vec![0.0; keys * columns],
            dv: vec![0.0; keys * columns],
            factors: Factors::new(d, keys, dropped),
        }
    }

    /// Takes up the keys and values of a group, and the sums that later slices left for it.
    fn begin<'a>(
        &mut self,
        keys: impl Iterator<Item = MatrixRows<'a>> + Clone,
        values: impl Iterator<Item = MatrixRows<'a>>,
        sums: &mut GroupSums<'_>,
    ) {
        let (d, tokens) = (self.d.d, self.before + self.d.s);
        self.keys.of_rows(tokens, keys.clone(), d);
        self.right_keys.of_parts(tokens, keys, d);
        self.values.of_rows(tokens, values, d);
        sums.load([&mut self.dk, &mut self.dv], d.next_multiple_of(PANEL), d, 0);
    }

    /// One block of queries of a head: adds to dk and dv, and sets dq.
    fn block(
        &mut self,
        q: MatrixRows<'_>,
        dy: MatrixRows<'_>,
        sums: &[f32],
        dropped: Option<DroppedHead>,
    ) {
        let (d, scale) = (self.d.d, self.d.scale());
        let queries = self.before + q.from..self.before + q.to;
        self.q.copy(q, d);
        self.dy.copy(dy, d);
        self.right_q.of_columns(q, d);
        self.right_dy.of_columns(dy, d);
        scores(&mut self.p, &self.q, &self.keys, scale, queries.clone());
        scores(&mut self.dp, &self.dy, &self.values, 1.0, queries.clone());
        if let Some(dropped) = dropped {
            self.factors.fill(dropped, queries.clone());
            self.factors.multiply(&mut self.dp, queries.clone());
        }
        let (p, dp) = (&mut self.p, &mut self.dp);
        simd(
            #[inline(always)]
            || {
                for (i, log) in sums.iter().enumerate() {
                    let seen = queries.start + i + 1;
                    let sum = exponentials_from(p, i, seen, *log);
                    softmax_backward(dp, p, i, seen, sum);
                }
            },
        );
        if dropped.is_some() {
            self.factors.multiply(&mut self.p, queries.clone());
        }
        transposed(&mut self.dv, &self.p, &self.right_dy, 1.0, queries.clone());
        transposed(&mut self.dk, &self.dp, &self.right_q, scale, queries.clone());
        weighted(&mut self.dq, &self.dp, &self.right_keys, scale, queries);
    }
}

/// Copies rows of a whole number of panels into `to`.
fn unpad(to: &mut MatMut<'_>, from: &[f32]) {
    let width = to.cols;
    for (i, row) in from.chunks_exact(width.next_multiple_of(PANEL)).enumerate() {
        to.row(i).copy_from_slice(&row[..width]);
    }
}

/// The gradient of `qkv` for the output gradient `dy`, with the logarithms that the forward left.
/// The probabilities are computed again in any case.
pub fn attention_backward(
    dy: &[f32],
    qkv: &[f32],
    sums: &[f32],
    d: Dims,
    dropped: Option<Dropped>,
) -> Vec<f32> {
    let forward = SliceForward { earlier: &[], qkv, sums };
    attention_backward_after(forward, EarlierSums::default(), dy, d, dropped)
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
    dropped: Option<Dropped>,
) -> Vec<f32> {
    let SliceForward { earlier, qkv, sums } = forward;
    let before = d.check_slice(qkv.len(), earlier);
    let (width, out_width, columns) = (d.width(), d.out_width(), d.d.next_multiple_of(PANEL));
    let mut dqkv = vec![0.0; qkv.len()];
    let groups = d.groups_of(&mut dqkv).zip(earlier_sums.by_group(d, earlier)).enumerate();
    each_with(
        groups,
        || Backward::new(d, before, dropped),
        |scratch, (i, ([mut dq, mut dk, mut dv], mut group_sums))| {
            let (b, group) = (i / d.groups, i % d.groups);
            let of = |part| rows_of(earlier, qkv, d, b, part, group);
            scratch.begin(of(QkvPart::Key), of(QkvPart::Value), &mut group_sums);
            let (qkv, dy) = (&qkv[d.sample(b, width)], &dy[d.sample(b, out_width)]);
            for Range { start: from, end: to } in d.blocks(BLOCK).rev() {
                for (place, head) in heads_in(d, group).enumerate() {
                    let dropped = dropped.map(|dropped| dropped.head(d, b, head));
                    let column = d.query(head);
                    let q = MatrixRows { data: qkv, width, column, from, to };
                    let dy = MatrixRows { data: dy, width: out_width, column, from, to };
                    let sums = &sums[(b * d.heads + head) * d.s..][from..to];
                    scratch.block(q, dy, sums, dropped);
                    let mut dq = dq.part(from..to, place * d.d..(place + 1) * d.d);
                    unpad(&mut dq, &scratch.dq[..(to - from) * columns]);
                }
            }
            unpad(&mut dk, &scratch.dk[before * columns..]);
            unpad(&mut dv, &scratch.dv[before * columns..]);
            group_sums.store([&scratch.dk, &scratch.dv], columns, 0);
        },
    );
    dqkv
}
