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
use crate::attention::{Dims, Dropped, DroppedHead, QkvPart};
use crate::mat_mut::MatMut;
use crate::math::{exp, ln};
use crate::reduce::{max, sum, sum2};
use crate::threads::{self, Fresh, each_with};
use crate::{simd, update};

/// Query rows processed at a time: whole blocks of a product's K.
const BLOCK: usize = 128;

/// The queries of a block: `from..to` of a sample, with rows of `stride` scores.
#[derive(Clone, Copy)]
struct QueryBlock {
    from: usize,
    to: usize,
    stride: usize,
    window: usize,
}

impl QueryBlock {
    fn rows(&self) -> usize {
        self.to - self.from
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

/// The blocks of queries of a sample.
fn blocks(s: usize, window: usize) -> impl Iterator<Item = QueryBlock> {
    let stride = s.next_multiple_of(32);
    (0..s.div_ceil(BLOCK)).map(move |i| {
        let from = i * BLOCK;
        QueryBlock { from, to: s.min(from + BLOCK), stride, window }
    })
}

/// Matrix `part` of query head `head`: `rows` of sample `b` of `qkv`.
fn part<'a>(
    qkv: &'a [bf16],
    d: Dims,
    b: usize,
    part: QkvPart,
    head: usize,
    rows: Range<usize>,
) -> Mat<'a> {
    let start = b * d.s * d.width() + part.start(d, head, rows.start);
    Mat::strided(&qkv[start..], rows.len(), d.d, d.width())
}

/// Rows `from..to` of head `head` in `[b, s, heads·d]`.
fn of_output<'a>(y: &'a [bf16], d: Dims, b: usize, head: usize, block: QueryBlock) -> Mat<'a> {
    let start = (b * d.s + block.from) * d.out_width() + head * d.d;
    Mat::strided(&y[start..], block.rows(), d.d, d.out_width())
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
    fn new(d: Dims, backward: bool, dropped: Option<Dropped>) -> Self {
        let rows = BLOCK.min(d.s);
        let len = rows * d.s.next_multiple_of(32);
        let if_backward = |len: usize| if backward { len } else { 0 };
        Self {
            scores: vec![0.0; len],
            slopes: vec![0.0; if_backward(len)],
            p: vec![bf16::ZERO; len],
            ds: vec![bf16::ZERO; if_backward(len)],
            rows: vec![bf16::ZERO; rows * d.d],
            dk: vec![0.0; if_backward(d.s * d.d)],
            dv: vec![0.0; if_backward(d.s * d.d)],
            factors: vec![0.0; if dropped.is_some() { len } else { 0 }],
        }
    }
}

/// Copies rows of `d` columns to the rows from `first` on of a matrix of so many.
fn give(to: &mut MatMut<'_, bf16>, first: usize, rows: &[bf16], d: usize) {
    for (i, row) in rows.chunks_exact(d).enumerate() {
        to.row(first + i).copy_from_slice(row);
    }
}

/// softmax(q·kᵀ/√d, causal)·v, `[b, s, heads·d]`, and the logarithm of each query's sum of
/// exponentials, `[b, heads, s]`.
pub fn attention(qkv: &[bf16], d: Dims) -> (Vec<bf16>, Vec<f32>) {
    attention_in(qkv, d, usize::MAX, None)
}

/// The same, of which a query sees the last `window` keys alone, itself included, and whose
/// probabilities are dropped if `dropped` says which.
pub fn attention_in(
    qkv: &[bf16],
    d: Dims,
    window: usize,
    dropped: Option<Dropped>,
) -> (Vec<bf16>, Vec<f32>) {
    d.check(qkv.len());
    let isa = isa::in_use();
    let mut out = vec![bf16::ZERO; d.b * d.s * d.out_width()];
    let mut sums = Fresh::new(d.b * d.heads * d.s);
    let heads = d.heads_of(&mut out).zip(sums.parts(d.s)).enumerate();
    each_with(
        heads,
        || Scratch::new(d, false, dropped),
        |scratch, (i, (mut out, mut sums))| {
            let (b, head) = (i / d.heads, i % d.heads);
            let whole = |which| part(qkv, d, b, which, head, 0..d.s);
            let keys = Packed::on(isa, whole(QkvPart::Key).t());
            let values = Packed::on(isa, whole(QkvPart::Value));
            for block in blocks(d.s, window) {
                let q = part(qkv, d, b, QkvPart::Query, head, block.from..block.to);
                product_set(&mut scratch.scores, block.stride, q, keys.first(d.d, block.to));
                softmax(scratch, block, d.scale(), &mut sums);
                if let Some(dropped) = dropped {
                    factors(scratch, block, dropped.head(d, b, head));
                    drop_probabilities(scratch, block, true);
                }
                let p = Mat::strided(&scratch.p, block.rows(), block.to, block.stride);
                let rows = &mut scratch.rows[..block.rows() * d.d];
                product_into(rows, d.d, p, values.first(block.to, d.d), None);
                give(&mut out, block.from, rows, d.d);
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
                p[range.end..block.to].fill(bf16::ZERO);
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
    attention_backward_in(dy, qkv, sums, d, usize::MAX, None)
}

/// The same for [`attention_in`].
pub fn attention_backward_in(
    dy: &[bf16],
    qkv: &[bf16],
    sums: &[f32],
    d: Dims,
    window: usize,
    dropped: Option<Dropped>,
) -> Vec<bf16> {
    d.check(qkv.len());
    let isa = isa::in_use();
    let mut dqkv = vec![bf16::ZERO; qkv.len()];
    let groups = d.groups_of(&mut dqkv).enumerate();
    each_with(
        groups,
        || Scratch::new(d, true, dropped),
        |scratch, (i, [mut dq, dk, dv])| {
            let (b, group) = (i / d.groups, i % d.groups);
            let share = d.heads / d.groups;
            let first = group * share;
            let whole = |which| part(qkv, d, b, which, first, 0..d.s);
            let keys = Packed::on(isa, whole(QkvPart::Key).t());
            let values = Packed::on(isa, whole(QkvPart::Value).t());
            let key_rows = Packed::on(isa, whole(QkvPart::Key));
            scratch.dk.fill(0.0);
            scratch.dv.fill(0.0);
            let all = |place| blocks(d.s, window).map(move |block| (place, block));
            for (place, block) in (0..share).flat_map(all) {
                let head = first + place;
                let q = part(qkv, d, b, QkvPart::Query, head, block.from..block.to);
                let dy = of_output(dy, d, b, head, block);
                product_set(&mut scratch.scores, block.stride, q, keys.first(d.d, block.to));
                product_set(&mut scratch.slopes, block.stride, dy, values.first(d.d, block.to));
                let sums = &sums[(b * d.heads + head) * d.s + block.from..][..block.rows()];
                if let Some(dropped) = dropped {
                    factors(scratch, block, dropped.head(d, b, head));
                    drop_slopes(scratch, block);
                }
                slopes(scratch, block, d.scale(), sums);
                if dropped.is_some() {
                    drop_probabilities(scratch, block, false);
                }
                let p = Mat::strided(&scratch.p, block.rows(), block.to, block.stride);
                let ds = Mat::strided(&scratch.ds, block.rows(), block.to, block.stride);
                let rows = &mut scratch.rows[..block.rows() * d.d];
                product_into(rows, d.d, ds, key_rows.first(block.to, d.d), None);
                let mut dq = dq.part(0..d.s, place * d.d..(place + 1) * d.d);
                give(&mut dq, block.from, rows, d.d);
                add_product(&mut scratch.dv, d.d, p.t(), &Packed::on(isa, dy));
                add_product(&mut scratch.dk, d.d, ds.t(), &Packed::on(isa, q));
            }
            for (mut to, sums) in [(dk, &scratch.dk), (dv, &scratch.dv)] {
                for (row, sums) in sums.chunks_exact(d.d).enumerate() {
                    let to = to.row(row).iter_mut().zip(sums);
                    to.for_each(|(to, x)| *to = down(*x));
                }
            }
        },
    );
    dqkv
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
                p[range.end..block.to].fill(bf16::ZERO);
                ds[range.end..block.to].fill(bf16::ZERO);
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
mod tests {
    use super::*;
    use crate::bf16::convert::{narrow, up, widen};
    use crate::bf16::{available, force};

    fn numbers(n: usize, seed: usize) -> Vec<bf16> {
        let value = |i: usize| ((i * 7 + seed).wrapping_mul(2_654_435_761) >> 7) % 1000;
        narrow(&(0..n).map(|i| value(i) as f32 / 500.0 - 1.0).collect::<Vec<_>>())
    }

    /// The same bits on every path, and within bf16's rounding of the fp32 kernel.
    #[test]
    fn agrees_with_fp32_and_between_paths() {
        for (b, s, heads, groups, d) in [(2, 37, 4, 2, 16), (1, 300, 2, 2, 32), (1, 1, 1, 1, 5)] {
            let dims = Dims { b, s, heads, groups, d };
            let qkv = numbers(b * s * dims.width(), 1);
            let dy = numbers(b * s * dims.out_width(), 2);
            let on = |isa| {
                force(Some(isa));
                let (out, sums) = attention(&qkv, dims);
                let dqkv = attention_backward(&dy, &qkv, &sums, dims);
                force(None);
                (out, sums, dqkv)
            };
            let first = on(available()[0]);
            available().iter().for_each(|isa| assert!(on(*isa) == first, "{isa:?}, s = {s}"));
            let want = crate::attention::kept::attention(&widen(&qkv), dims, None);
            let near = |got: &[bf16], want: &[f32]| {
                let apart = got.iter().zip(want).map(|(g, w)| (up(*g) - w).abs());
                let size = want.iter().fold(0.0_f32, |top, w| top.max(w.abs()));
                apart.fold(0.0, f32::max) / size
            };
            assert!(near(&first.0, &want) < 0.01, "{}", near(&first.0, &want));
            let want =
                crate::attention::kept::attention_backward(&widen(&dy), &widen(&qkv), dims, None);
            assert!(near(&first.2, &want) < 0.02, "{}", near(&first.2, &want));
        }
    }

    /// With dropped probabilities: the same bits on every path, and near fp32's kernels, which are
    /// held against the definition.
    #[test]
    fn dropped_probabilities_are_fp32s() {
        use crate::attention::{recomputed, windowed};
        let sizes = [(2, 37, 4, 2, 16, usize::MAX), (1, 300, 2, 2, 32, 300), (1, 300, 2, 1, 8, 70)];
        for (b, s, heads, groups, d, window) in sizes {
            let dims = Dims { b, s, heads, groups, d };
            let qkv = numbers(b * s * dims.width(), 1);
            let dy = numbers(b * s * dims.out_width(), 2);
            let dropout = crate::dropout::DropoutRule::new([7, 1], 3, 0.3);
            let dropped = Some(Dropped { dropout, sample: 9, token: 21 });
            let on = |isa| {
                force(Some(isa));
                let (out, sums) = attention_in(&qkv, dims, window, dropped);
                let dqkv = attention_backward_in(&dy, &qkv, &sums, dims, window, dropped);
                force(None);
                (out, sums, dqkv)
            };
            let first = on(available()[0]);
            available().iter().for_each(|isa| assert!(on(*isa) == first, "{isa:?}, s = {s}"));
            let (qkv, dy) = (widen(&qkv), widen(&dy));
            let (out, dqkv) = if window < s {
                let (out, sums) = windowed::attention(&qkv, dims, window, dropped);
                let of = windowed::attention_backward(&dy, &qkv, &sums, dims, window, dropped);
                (out, of)
            } else {
                let (out, sums) = recomputed::attention(&qkv, dims, dropped);
                (out, recomputed::attention_backward(&dy, &qkv, &sums, dims, dropped))
            };
            for (got, want, most) in [(&first.0, out, 0.01), (&first.2, dqkv, 0.02)] {
                let apart = got.iter().zip(&want).map(|(g, w)| (up(*g) - w).abs());
                let size = want.iter().fold(0.0_f32, |top, w| top.max(w.abs()));
                let apart = apart.fold(0.0, f32::max) / size;
                assert!(apart < most, "{apart}");
            }
        }
    }
}
