//! Causal attention on the fused projection in bf16: scores, softmax and sums in fp32, the factors
//! of its products in bf16. Keys and values are packed once a head; of the scores only a block of
//! queries is there, and one number a query is left of them.

use core::ops::Range;

use half::bf16;

use super::convert::down;
use super::gemm::{add_product, product_into, product_set};
use super::isa;
use super::matrix::Mat;
use super::packed::Packed;
use crate::attention::windowed::first_key;
use crate::attention::{
    Dims, Dropped, DroppedHead, EarlierRows, EarlierSums, QkvPart, SliceForward, gathered,
    heads_in, rows_of,
};
use crate::mat_mut::MatMut;
use crate::math::{exp, ln};
use crate::reduce::{max, sum, sum2};
use crate::threads::{self, Fresh, each_with};
use crate::{simd, update};

/// Query rows processed at a time: whole blocks of a product's K.
const BLOCK: usize = 128;

/// The queries of a block: `from..to` of a sample, with rows of `stride` scores. `before` of the
/// sample's tokens are of earlier slices.
#[derive(Clone, Copy)]
struct QueryBlock {
    before: usize,
    from: usize,
    to: usize,
    /// Keys that products go over: whole blocks of their K, or all.
    keys: usize,
    stride: usize,
    window: usize,
}

impl QueryBlock {
    fn rows(&self) -> usize {
        self.to - self.from
    }

    /// Its rows in the slice.
    fn own_rows(&self) -> Range<usize> {
        self.from - self.before..self.to - self.before
    }

    /// The keys that a row's query sees.
    fn seen(&self, row: usize) -> Range<usize> {
        let query = self.from + row;
        first_key(query, self.window)..query + 1
    }

    /// Where their scores are.
    fn elements(&self, row: usize) -> Range<usize> {
        let (seen, start) = (self.seen(row), row * self.stride);
        start + seen.start..start + seen.end
    }
}

/// The blocks of queries of a slice after `before` other tokens.
fn blocks(
    before: usize,
    d: Dims,
    window: usize,
) -> impl DoubleEndedIterator<Item = QueryBlock> + Clone {
    let stride = (before + d.s).next_multiple_of(32);
    d.blocks(BLOCK).map(move |own| {
        let (from, to) = (before + own.start, before + own.end);
        let keys = to.next_multiple_of(32).min(before + d.s);
        QueryBlock { before, from, to, keys, stride, window }
    })
}

/// The queries of head `head` of a block, in sample `b` of `qkv`.
fn queries<'a>(qkv: &'a [bf16], d: Dims, b: usize, head: usize, block: QueryBlock) -> Mat<'a> {
    let own = block.own_rows();
    let start = b * d.s * d.width() + QkvPart::Query.start(d, head, own.start);
    Mat::strided(&qkv[start..], own.len(), d.d, d.width())
}

/// Rows of a block of head `head` in `[b, s, heads·d]`.
fn of_output<'a>(y: &'a [bf16], d: Dims, b: usize, head: usize, block: QueryBlock) -> Mat<'a> {
    let start = (b * d.s + block.own_rows().start) * d.out_width() + head * d.d;
    Mat::strided(&y[start..], block.rows(), d.d, d.out_width())
}

/// The keys or values of a group of sample `b`, those of earlier slices first: where they lie, or
/// gathered in `copy`.
fn whole<'a>(
    earlier: &'a [EarlierRows<'a, bf16>],
    qkv: &'a [bf16],
    d: Dims,
    [b, group]: [usize; 2],
    part: QkvPart,
    copy: &'a mut Vec<bf16>,
) -> Mat<'a> {
    let mut rows = rows_of(earlier, qkv, d, b, part, group);
    if earlier.is_empty() {
        let own = rows.next().expect("its own");
        return Mat::strided(&own.data[own.column..], d.s, d.d, own.width);
    }
    *copy = gathered(rows, d.d, 0);
    Mat::new(copy, copy.len() / d.d, d.d)
}

/// Buffers for a block of scores and what is made of it, and for the gradients of a group.
struct Scratch {
    scores: Vec<f32>,
    slopes: Vec<f32>,
    p: Vec<bf16>,
    ds: Vec<bf16>,
    rows: Vec<bf16>,
    dk: Vec<f32>,
    dv: Vec<f32>,
    /// Of dropout.
    factors: Vec<f32>,
}

impl Scratch {
    /// For `keys` keys in all.
    fn new(d: Dims, keys: usize, backward: bool, dropped: Option<Dropped>) -> Self {
        let rows = BLOCK.min(d.s);
        let len = rows * keys.next_multiple_of(32);
        let if_backward = |len: usize| if backward { len } else { 0 };
        Self {
            scores: vec![0.0; len],
            slopes: vec![0.0; if_backward(len)],
            p: vec![bf16::ZERO; len],
            ds: vec![bf16::ZERO; if_backward(len)],
            rows: vec![bf16::ZERO; rows * d.d],
            dk: vec![0.0; if_backward(keys * d.d)],
            dv: vec![0.0; if_backward(keys * d.d)],
            factors: vec![0.0; if dropped.is_some() { len } else { 0 }],
        }
    }
}

/// Copies rows of `d` columns to those of a matrix of so many.
fn give(to: &mut MatMut<'_, bf16>, rows: &[bf16], d: usize) {
    for (i, row) in rows.chunks_exact(d).enumerate() {
        to.row(i).copy_from_slice(row);
    }
}

/// softmax(q·kᵀ/√d, causal)·v, `[b, s, heads·d]`, and the logarithm of each query's sum of
/// exponentials, `[b, heads, s]`.
pub fn attention(qkv: &[bf16], d: Dims) -> (Vec<bf16>, Vec<f32>) {
    attention_after(&[], qkv, d, usize::MAX, None)
}

/// The same for a slice of a sample, whose queries see the `earlier` slices too, of all the last
/// `window` keys alone, itself included; probabilities are dropped if `dropped` says which.
///
/// # Panics
/// Panics if there are earlier slices, and several samples.
pub fn attention_after(
    earlier: &[EarlierRows<'_, bf16>],
    qkv: &[bf16],
    d: Dims,
    window: usize,
    dropped: Option<Dropped>,
) -> (Vec<bf16>, Vec<f32>) {
    let before = d.check_slice(qkv.len(), earlier);
    let isa = isa::in_use();
    let mut out = vec![bf16::ZERO; d.b * d.s * d.out_width()];
    let mut sums = Fresh::new(d.b * d.heads * d.s);
    let heads = d.heads_of(&mut out).zip(sums.parts(d.s)).enumerate();
    each_with(
        heads,
        || Scratch::new(d, before + d.s, false, dropped),
        |scratch, (i, (mut out, mut sums))| {
            let (b, head) = (i / d.heads, i % d.heads);
            let (at, mut copy) = ([b, head / (d.heads / d.groups)], Vec::new());
            let keys = whole(earlier, qkv, d, at, QkvPart::Key, &mut copy);
            let keys = Packed::on(isa, keys.t());
            let values = whole(earlier, qkv, d, at, QkvPart::Value, &mut copy);
            let values = Packed::on(isa, values);
            for block in blocks(before, d, window) {
                let q = queries(qkv, d, b, head, block);
                product_set(&mut scratch.scores, block.stride, q, keys.first(d.d, block.to));
                softmax(scratch, block, d.scale(), &mut sums);
                if let Some(dropped) = dropped {
                    factors(scratch, block, dropped.head(d, b, head));
                    drop_probabilities(scratch, block, true);
                }
                let p = Mat::strided(&scratch.p, block.rows(), block.keys, block.stride);
                let rows = &mut scratch.rows[..block.rows() * d.d];
                product_into(rows, d.d, p, values.first(block.keys, d.d), None);
                give(&mut out.part(block.own_rows(), 0..d.d), rows, d.d);
            }
        },
    );
    (out, sums.done())
}

/// Probabilities of a block from its scores; the logarithms of the sums go to the end of `sums`.
fn softmax(
    scratch: &mut Scratch,
    block: QueryBlock,
    scale: f32,
    sums: &mut threads::FreshPart<'_, f32>,
) {
    simd(
        #[inline(always)]
        || {
            let rows = scratch.scores.chunks_exact_mut(block.stride);
            let rows = rows.zip(scratch.p.chunks_exact_mut(block.stride)).take(block.rows());
            for (row, (scores, p)) in rows.enumerate() {
                let range = block.seen(row);
                p[..range.start].fill(bf16::ZERO);
                p[range.end..block.keys].fill(bf16::ZERO);
                let (seen, scores) = (&mut p[range.clone()], &mut scores[range]);
                scores.iter_mut().for_each(|x| *x *= scale);
                let top = max(scores);
                scores.iter_mut().for_each(|x| *x = exp(*x - top));
                let sum = sum(scores, |x| x);
                let inverse = 1.0 / sum;
                seen.iter_mut().zip(scores).for_each(|(p, e)| *p = down(*e * inverse));
                sums.push(top + ln(sum));
            }
        },
    );
}

/// The factors of dropout of a block.
fn factors(scratch: &mut Scratch, block: QueryBlock, of: DroppedHead) {
    let queries = block.from..block.to;
    of.fill(&mut scratch.factors, block.stride, queries, 0, |row| block.seen(row));
}

/// Sets the probabilities of a block to those of `scores`, which [`softmax`] leaves as exponentials
/// and [`slopes`] as probabilities, by their factors; rounded once.
fn drop_probabilities(scratch: &mut Scratch, block: QueryBlock, are_exponentials: bool) {
    let Scratch { scores, factors, p, .. } = scratch;
    simd(
        #[inline(always)]
        || {
            for row in 0..block.rows() {
                let at = block.elements(row);
                let (e, m) = (&scores[at.clone()], &factors[at.clone()]);
                let scale = if are_exponentials { 1.0 / sum(e, |x| x) } else { 1.0 };
                let p = p[at].iter_mut().zip(e).zip(m);
                p.for_each(|((p, e), m)| *p = down(*e * scale * *m));
            }
        },
    );
}

/// Turns gradients of dropped probabilities into those of the probabilities.
fn drop_slopes(scratch: &mut Scratch, block: QueryBlock) {
    let Scratch { slopes, factors, .. } = scratch;
    simd(
        #[inline(always)]
        || {
            for row in 0..block.rows() {
                let at = block.elements(row);
                update(&mut slopes[at.clone()], &factors[at], |x, m| x * m);
            }
        },
    );
}

/// The gradient of `qkv` for the output gradient `dy` and the forward's `sums`.
pub fn attention_backward(dy: &[bf16], qkv: &[bf16], sums: &[f32], d: Dims) -> Vec<bf16> {
    let forward = SliceForward { earlier: &[], qkv, sums };
    attention_backward_after(forward, EarlierSums::default(), dy, d, usize::MAX, None)
}

/// The same for a slice of a sample as in [`attention_after`], which takes up what later slices
/// left for its keys and values, and adds to the sums of earlier ones. Gradients of keys and values
/// are rounded once, by the backward of their own slice.
///
/// # Panics
/// Panics if there are earlier slices, and several samples.
pub fn attention_backward_after(
    forward: SliceForward<'_, bf16>,
    earlier_sums: EarlierSums<'_>,
    dy: &[bf16],
    d: Dims,
    window: usize,
    dropped: Option<Dropped>,
) -> Vec<bf16> {
    let SliceForward { earlier, qkv, sums } = forward;
    let before = d.check_slice(qkv.len(), earlier);
    let isa = isa::in_use();
    let mut dqkv = vec![bf16::ZERO; qkv.len()];
    let groups = d.groups_of(&mut dqkv).zip(earlier_sums.by_group(d, earlier)).enumerate();
    each_with(
        groups,
        || Scratch::new(d, before + d.s, true, dropped),
        |scratch, (i, ([mut dq, dk, dv], mut group_sums))| {
            let (b, group) = (i / d.groups, i % d.groups);
            let packed = GroupPacked::new(isa, earlier, qkv, d, [b, group]);
            group_sums.load([&mut scratch.dk, &mut scratch.dv], d.d, d.d, 0);
            for block in blocks(before, d, window).rev() {
                for (place, head) in heads_in(d, group).enumerate() {
                    let factors =
                        [queries(qkv, d, b, head, block), of_output(dy, d, b, head, block)];
                    let sums = &sums[(b * d.heads + head) * d.s..][block.own_rows()];
                    let dropped = dropped.map(|dropped| dropped.head(d, b, head));
                    backward_block(scratch, &packed, block, factors, sums, dropped);
                    let mut dq = dq.part(block.own_rows(), place * d.d..(place + 1) * d.d);
                    give(&mut dq, &scratch.rows[..block.rows() * d.d], d.d);
                }
            }
            for (mut to, sums) in [(dk, &scratch.dk), (dv, &scratch.dv)] {
                for (row, sums) in sums[before * d.d..].chunks_exact(d.d).enumerate() {
                    let to = to.row(row).iter_mut().zip(sums);
                    to.for_each(|(to, x)| *to = down(*x));
                }
            }
            group_sums.store([&scratch.dk, &scratch.dv], d.d, 0);
        },
    );
    dqkv
}

/// The keys and values of a group as a backward multiplies by them.
struct GroupPacked {
    d: Dims,
    isa: isa::Isa,
    keys: Packed,
    key_rows: Packed,
    values: Packed,
}

impl GroupPacked {
    fn new(
        isa: isa::Isa,
        earlier: &[EarlierRows<'_, bf16>],
        qkv: &[bf16],
        d: Dims,
        at: [usize; 2],
    ) -> Self {
        let mut copy = Vec::new();
        let key_rows = whole(earlier, qkv, d, at, QkvPart::Key, &mut copy);
        let (keys, key_rows) = (Packed::on(isa, key_rows.t()), Packed::on(isa, key_rows));
        let values = whole(earlier, qkv, d, at, QkvPart::Value, &mut copy);
        Self { d, isa, keys, key_rows, values: Packed::on(isa, values.t()) }
    }
}

/// A block of queries `q` of a head, with the output's gradient `dy`: adds to dk and dv, and leaves
/// dq in the scratch's rows.
fn backward_block(
    scratch: &mut Scratch,
    packed: &GroupPacked,
    block: QueryBlock,
    [q, dy]: [Mat<'_>; 2],
    sums: &[f32],
    dropped: Option<DroppedHead>,
) {
    let GroupPacked { d, isa, keys, key_rows, values } = packed;
    let (d, scale) = (d.d, d.scale());
    product_set(&mut scratch.scores, block.stride, q, keys.first(d, block.to));
    product_set(&mut scratch.slopes, block.stride, dy, values.first(d, block.to));
    if let Some(dropped) = dropped {
        factors(scratch, block, dropped);
        drop_slopes(scratch, block);
    }
    slopes(scratch, block, scale, sums);
    if dropped.is_some() {
        drop_probabilities(scratch, block, false);
    }
    let p = Mat::strided(&scratch.p, block.rows(), block.keys, block.stride);
    let ds = Mat::strided(&scratch.ds, block.rows(), block.keys, block.stride);
    let rows = &mut scratch.rows[..block.rows() * d];
    product_into(rows, d, ds, key_rows.first(block.keys, d), None);
    add_product(&mut scratch.dv, d, p.t(), &Packed::on(*isa, dy));
    add_product(&mut scratch.dk, d, ds.t(), &Packed::on(*isa, q));
}

/// Probabilities of a block again, and the gradients of its unscaled scores.
fn slopes(scratch: &mut Scratch, block: QueryBlock, scale: f32, sums: &[f32]) {
    simd(
        #[inline(always)]
        || {
            let Scratch { scores, slopes, p, ds, .. } = scratch;
            let floats =
                scores.chunks_exact_mut(block.stride).zip(slopes.chunks_exact(block.stride));
            let halves = p.chunks_exact_mut(block.stride).zip(ds.chunks_exact_mut(block.stride));
            for (row, (((scores, slopes), (p, ds)), log)) in
                floats.zip(halves).zip(sums).enumerate()
            {
                let range = block.seen(row);
                p[..range.start].fill(bf16::ZERO);
                ds[..range.start].fill(bf16::ZERO);
                p[range.end..block.keys].fill(bf16::ZERO);
                ds[range.end..block.keys].fill(bf16::ZERO);
                let (scores, slopes) = (&mut scores[range.clone()], &slopes[range.clone()]);
                let (p, ds) = (&mut p[range.clone()], &mut ds[range]);
                scores.iter_mut().for_each(|x| *x = exp(*x * scale - *log));
                let mean = sum2(scores, slopes, |p, dp| p * dp);
                for ((p, ds), (e, dp)) in
                    p.iter_mut().zip(ds.iter_mut()).zip(scores.iter().zip(slopes))
                {
                    *p = down(*e);
                    *ds = down((*dp - mean) * *e * scale);
                }
            }
        },
    );
}

#[cfg(test)]
mod tests;
