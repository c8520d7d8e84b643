//! Attention that can keep its probabilities, of `[s, s]` a head, for the backward.
//!
//! Query rows are taken in blocks; a block sees only the keys up to its own end, which saves
//! close to half of the products. Scores of a block live in a scratch buffer of [block, s].

use core::ops::Range;

use super::{Dims, QkvPart};
use crate::gemm::{MatMut, MatRef, StoreMode, gemm};
use crate::math::exp;
use crate::reduce::sum2;
use crate::simd;
use crate::threads::{Fresh, each_with};

/// Query rows processed at a time: a multiple of both sides of GEMM's inner tile (16, 6).
const BLOCK: usize = 48;
/// Elements of the widest vector register.
const LANES: usize = 16;

/// One query head of one sample.
#[derive(Clone, Copy)]
struct QueryHead<'a> {
    d: Dims,
    index: usize,
    /// The sample's rows of qkv.
    qkv: &'a [f32],
}

impl<'a> QueryHead<'a> {
    fn part(&self, part: QkvPart, from: usize, rows: usize) -> MatRef<'a> {
        let start = part.start(self.d, self.index, from);
        MatRef::strided(&self.qkv[start..], rows, self.d.d, self.d.width())
    }

    /// First element of this head in row `from` of a sample's output.
    fn out_start(&self, from: usize) -> usize {
        from * self.d.out_width() + self.index * self.d.d
    }

    /// Probabilities of the queries `from..to` into `p: [to - from, s]`; zero where a key lies
    /// after its query.
    fn probabilities(&self, p: &mut [f32], from: usize, to: usize) {
        let s = self.d.s;
        let (q, k) = (self.part(QkvPart::Query, from, to - from), self.part(QkvPart::Key, 0, to));
        gemm(MatMut::strided(p, to - from, to, s), StoreMode::Set, self.d.scale(), q, k.t());
        simd(
            #[inline(always)]
            || {
                for (row, p) in p.chunks_exact_mut(s).take(to - from).enumerate() {
                    softmax(p, from + row + 1);
                }
            },
        );
    }

    /// One block of queries: sets dq, and sets (the first block that reaches them, which sees all
    /// keys) or adds dk and dv, where dq is of the head, and dk and dv of its group. `dy`: rows
    /// `rows` of the output gradient, `ds`: scratch.
    fn block_backward(
        &self,
        [dq, dk, dv]: [MatMut<'_>; 3],
        ds: &mut [f32],
        dy: MatRef<'_>,
        p: &[f32],
        rows: Range<usize>,
    ) {
        let (s, from, to) = (self.d.s, rows.start, rows.end);
        let rows = rows.len();
        let first = to == s && self.index.is_multiple_of(self.d.heads / self.d.groups);
        let store = if first { StoreMode::Set } else { StoreMode::Add };
        let v = self.part(QkvPart::Value, 0, to);
        let seen = MatRef::strided(p, rows, to, s);
        gemm(dv, store, 1.0, seen.t(), dy);
        gemm(MatMut::strided(ds, rows, to, s), StoreMode::Set, 1.0, dy, v.t());
        simd(
            #[inline(always)]
            || {
                for (ds, p) in ds.chunks_exact_mut(s).zip(p.chunks_exact(s)).take(rows) {
                    let (ds, p) = (&mut ds[..to], &p[..to]);
                    let mean = sum2(ds, p, |d, p| d * p);
                    ds.iter_mut().zip(p).for_each(|(d, p)| *d = (*d - mean) * *p);
                }
            },
        );
        let (q, k) = (self.part(QkvPart::Query, from, rows), self.part(QkvPart::Key, 0, to));
        let ds = MatRef::strided(ds, rows, to, s);
        let scale = self.d.scale();
        gemm(dq, StoreMode::Set, scale, ds, k);
        gemm(dk, store, scale, ds.t(), q);
    }
}

/// Softmax over the first `n` elements of `row`; the others become zero.
///
/// Works on whole vectors: what lies between `n` and the end of the last one enters as −∞ and
/// leaves as zero.
#[inline(always)]
fn softmax(row: &mut [f32], n: usize) {
    let end = n.next_multiple_of(LANES).min(row.len());
    let (seen, hidden) = row.split_at_mut(end);
    hidden.fill(0.0);
    seen[n..].fill(f32::NEG_INFINITY);
    let (chunks, rest) = seen.as_chunks_mut::<LANES>();
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut tops = [f32::NEG_INFINITY; LANES];
    for chunk in chunks.iter() {
        for i in 0..LANES {
            tops[i] = larger(tops[i], chunk[i]);
        }
    }
    let top = tops.iter().chain(rest.iter()).fold(f32::NEG_INFINITY, |a, b| larger(a, *b));
    let mut sums = [0.0; LANES];
    for chunk in chunks.iter_mut() {
        for i in 0..LANES {
            chunk[i] = exp(chunk[i] - top);
            sums[i] += chunk[i];
        }
    }
    rest.iter_mut().for_each(|x| *x = exp(*x - top));
    let inverse = 1.0 / sums.iter().chain(rest.iter()).sum::<f32>();
    seen.iter_mut().for_each(|x| *x *= inverse);
}

/// The output of attention, `[b, s, heads·d]`; sets `keep`, if given, to all probabilities,
/// `[b, heads, s, s]`.
pub fn attention(qkv: &[f32], d: Dims, keep: Option<&mut Vec<f32>>) -> Vec<f32> {
    d.check(qkv.len());
    let mut out = vec![0.0; d.b * d.s * d.out_width()];
    let square = d.s * d.s;
    let mut kept = Fresh::new(if keep.is_some() { d.b * d.heads * square } else { 0 });
    // Of nothing there are no parts: then the heads are without.
    let kept_heads = kept.parts(square).map(Some).chain(std::iter::repeat_with(|| None));
    let scratch = || vec![0.0; BLOCK.min(d.s) * d.s];
    let heads = d.heads_of(&mut out).zip(kept_heads).enumerate();
    each_with(heads, scratch, |p, (i, (mut out, mut kept))| {
        let (b, index) = (i / d.heads, i % d.heads);
        let head = QueryHead { d, index, qkv: &qkv[d.sample(b, d.width())] };
        for rows in d.blocks(BLOCK) {
            let (n, to) = (rows.len(), rows.end);
            head.probabilities(p, rows.start, to);
            let seen = MatRef::strided(p, n, to, d.s);
            let out = out.part(rows, 0..d.d);
            gemm(out, StoreMode::Set, 1.0, seen, head.part(QkvPart::Value, 0, to));
            if let Some(kept) = &mut kept {
                kept.extend_from_slice(&p[..n * d.s]);
            }
        }
    });
    if let Some(keep) = keep {
        *keep = kept.done();
    }
    out
}

/// The gradient of `qkv` for the output gradient `dy`. Without the probabilities that the forward
/// kept they are computed again, by the same kernel and so to the same bits.
pub fn attention_backward(dy: &[f32], qkv: &[f32], d: Dims, kept: Option<&[f32]>) -> Vec<f32> {
    d.check(qkv.len());
    let width = d.out_width();
    let mut dqkv = vec![0.0; qkv.len()];
    let scratch = || {
        let block = || vec![0.0; BLOCK.min(d.s) * d.s];
        [block(), block()]
    };
    let share = d.heads / d.groups;
    each_with(
        d.groups_of(&mut dqkv).enumerate(),
        scratch,
        |[own, ds], (i, [mut dq, mut dk, mut dv])| {
            let (b, group) = (i / d.groups, i % d.groups);
            let dy = &dy[d.sample(b, width)];
            for place in 0..share {
                let index = group * share + place;
                let head = QueryHead { d, index, qkv: &qkv[d.sample(b, d.width())] };
                for rows in d.blocks(BLOCK).rev() {
                    let (from, to) = (rows.start, rows.end);
                    let p = match kept {
                        Some(kept) => &kept[((b * d.heads + index) * d.s + from) * d.s..],
                        None => {
                            head.probabilities(own, from, to);
                            &own[..]
                        }
                    };
                    let dy = MatRef::strided(&dy[head.out_start(from)..], rows.len(), d.d, width);
                    let dq = dq.part(rows.clone(), place * d.d..(place + 1) * d.d);
                    let others = [&mut dk, &mut dv].map(|m| m.part(0..to, 0..d.d));
                    let [dk, dv] = others;
                    head.block_backward([dq, dk, dv], ds, dy, p, rows);
                }
            }
        },
    );
    dqkv
}
