//! Attention that keeps one number a query for the backward.
//!
//! Keys and values of a group are packed once. Queries are taken in blocks, whose scores are a
//! scratch buffer of `[block, s]`: nothing of `[s, s]` is ever there. A query leaves the logarithm
//! of the sum of its exponentials, from which the backward has the probabilities again.

mod buffers;
mod matrix_rows;

use core::ops::Range;

use buffers::{LANES, Panels, ScoreRows};
use matrix_rows::MatrixRows;

use super::{Dims, Dropped, DroppedHead};
use crate::mat_mut::MatMut;
use crate::math::exp;
use crate::reduce::fold;
use crate::simd;
use crate::threads::each_with;
use crate::tile::{PANEL, RUN, Tile, rows};

/// Query rows of which the scores are there at a time.
const BLOCK: usize = 64;

/// The heads that share a group's keys and values.
fn heads_of(d: Dims, group: usize) -> Range<usize> {
    let share = d.heads / d.groups;
    group * share..(group + 1) * share
}

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
    /// Where probabilities are dropped at all.
    fn new(d: Dims, dropped: Option<Dropped>) -> Self {
        let stride = d.s.next_multiple_of(LANES);
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
    q: ScoreRows,
    p: ScoreRows,
    keys: Panels,
    values: Panels,
    result: Vec<f32>,
    inverse: [f32; BLOCK],
    factors: Factors,
}

impl Forward {
    fn new(d: Dims, dropped: Option<Dropped>) -> Self {
        let rows = BLOCK.min(d.s);
        Self {
            d,
            factors: Factors::new(d, dropped),
            q: ScoreRows::new(rows, d.d),
            p: ScoreRows::new(rows, d.s),
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
        let (d, queries) = (self.d.d, q.from..q.to);
        self.q.copy(q, d);
        scores(&mut self.p, &self.q, &self.keys, self.d.scale(), queries.clone());
        let (p, inverse) = (&mut self.p, &mut self.inverse);
        simd(
            #[inline(always)]
            || {
                for (i, (log, inverse)) in sums.iter_mut().zip(inverse).enumerate() {
                    let (top, sum) = exponentials(p, i, q.from + i + 1);
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
    d.check(qkv.len());
    let width = d.width();
    let mut out = vec![0.0; d.b * d.s * d.out_width()];
    let mut sums = vec![0.0; d.b * d.heads * d.s];
    let share = d.heads / d.groups;
    let samples = d.samples(&mut out, d.out_width());
    let groups = samples.flat_map(|sample| sample.bands(share * d.d).map(|(_, group)| group));
    let groups = groups.zip(sums.chunks_mut(share * d.s)).enumerate();
    each_with(
        groups,
        || Forward::new(d, dropped),
        |scratch, (i, (out, sums))| {
            let (b, group) = (i / d.groups, i % d.groups);
            let data = &qkv[d.sample(b, width)];
            let all = |column| MatrixRows { data, width, column, from: 0, to: d.s };
            scratch.keys.of_rows(all(d.key(group)), d.d);
            scratch.values.of_columns(all(d.value(group)), d.d);
            let heads = out.bands(d.d).zip(sums.chunks_mut(d.s));
            for (head, ((_, mut out), sums)) in heads_of(d, group).zip(heads) {
                let dropped = dropped.map(|dropped| dropped.head(d, b, head));
                for Range { start: from, end: to } in d.blocks(BLOCK) {
                    let q = MatrixRows { from, to, ..all(d.query(head)) };
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
    fn new(d: Dims, dropped: Option<Dropped>) -> Self {
        let (rows, columns) = (BLOCK.min(d.s), d.d.next_multiple_of(PANEL));
        let block = |terms| ScoreRows::new(rows, terms);
        Self {
            d,
            q: block(d.d),
            dy: block(d.d),
            right_q: Panels::default(),
            right_dy: Panels::default(),
            p: block(d.s),
            dp: block(d.s),
            dq: vec![0.0; rows * columns],
            keys: Panels::default(),
            values: Panels::default(),
            right_keys: Panels::default(),
            dk: vec![0.0; d.s * columns],
            dv: vec![0.0; d.s * columns],
            factors: Factors::new(d, dropped),
        }
    }

    fn begin(&mut self, keys: MatrixRows<'_>, values: MatrixRows<'_>) {
        let d = self.d.d;
        self.keys.of_rows(keys, d);
        self.right_keys.of_columns(keys, d);
        self.values.of_rows(values, d);
        self.dk.fill(0.0);
        self.dv.fill(0.0);
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
        let queries = q.from..q.to;
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
                    let sum = exponentials_from(p, i, q.from + i + 1, *log);
                    softmax_backward(dp, p, i, q.from + i + 1, sum);
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

/// Copies rows of a whole number of panels into `to`, from its row `first` on.
fn unpad(to: &mut MatMut<'_>, first: usize, from: &[f32]) {
    let width = to.cols;
    for (i, row) in from.chunks_exact(width.next_multiple_of(PANEL)).enumerate() {
        to.row(first + i).copy_from_slice(&row[..width]);
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
    d.check(qkv.len());
    let (width, out_width) = (d.width(), d.out_width());
    let mut dqkv = vec![0.0; qkv.len()];
    let groups = d.groups_of(&mut dqkv).enumerate();
    each_with(
        groups,
        || Backward::new(d, dropped),
        |scratch, (i, [dq, mut dk, mut dv])| {
            let (b, group) = (i / d.groups, i % d.groups);
            let data = &qkv[d.sample(b, width)];
            let all = |column| MatrixRows { data, width, column, from: 0, to: d.s };
            scratch.begin(all(d.key(group)), all(d.value(group)));
            for (head, (_, mut dq)) in heads_of(d, group).zip(dq.bands(d.d)) {
                let dropped = dropped.map(|dropped| dropped.head(d, b, head));
                let dy = &dy[d.sample(b, out_width)];
                let column = d.query(head);
                for Range { start: from, end: to } in d.blocks(BLOCK) {
                    let q = MatrixRows { from, to, ..all(column) };
                    let dy = MatrixRows { data: dy, width: out_width, column, from, to };
                    let sums = &sums[(b * d.heads + head) * d.s..][from..to];
                    scratch.block(q, dy, sums, dropped);
                    let rows = (to - from) * d.d.next_multiple_of(PANEL);
                    unpad(&mut dq, from, &scratch.dq[..rows]);
                }
            }
            unpad(&mut dk, 0, &scratch.dk);
            unpad(&mut dv, 0, &scratch.dv);
        },
    );
    dqkv
}
