//! Causal attention straight on the fused projection: `qkv: [b, s, 3h]` in, `[b, s, h]` out.
//!
//! Query rows are taken in blocks; a block sees only the keys up to its own end, which saves
//! close to half of the products. Scores of a block live in a scratch buffer of [block, s].

use super::gemm::{MatMut, MatRef, Store, gemm};
use super::math::exp;
use super::reduce::sum2;
use super::simd;

/// Query rows processed at a time: a multiple of both sides of GEMM's inner tile (16, 6).
const BLOCK: usize = 48;
/// Elements of the widest vector register.
const LANES: usize = 16;

/// Sizes of one attention.
#[derive(Clone, Copy, Debug)]
pub struct Dims {
    /// Samples.
    pub b: usize,
    /// Tokens of a sample.
    pub s: usize,
    /// Hidden size.
    pub h: usize,
    /// Heads; divides `h`.
    pub heads: usize,
}

impl Dims {
    fn head(&self) -> usize {
        self.h / self.heads
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head() as f32).sqrt()
    }

    /// The `part`-th (q, k, v) matrix of one head from row `from`, `rows` rows.
    fn part<'a>(&self, qkv: &'a [f32], part: usize, from: usize, rows: usize) -> MatRef<'a> {
        MatRef::strided(&qkv[from * 3 * self.h + part * self.h..], rows, self.head(), 3 * self.h)
    }

    fn part_mut<'a>(
        &self,
        qkv: &'a mut [f32],
        part: usize,
        from: usize,
        rows: usize,
    ) -> MatMut<'a> {
        let from = from * 3 * self.h + part * self.h;
        MatMut::strided(&mut qkv[from..], rows, self.head(), 3 * self.h)
    }

    /// First element of sample `b` and head `head` in a buffer of `width` elements a token.
    fn start(&self, b: usize, head: usize, width: usize) -> usize {
        b * self.s * width + head * self.head()
    }

    /// (first row, end row) of every block of queries.
    fn blocks(self) -> impl DoubleEndedIterator<Item = (usize, usize)> {
        (0..self.s.div_ceil(BLOCK)).map(move |i| (i * BLOCK, self.s.min((i + 1) * BLOCK)))
    }

    fn check(&self, qkv: &[f32]) {
        assert_eq!(qkv.len(), self.b * self.s * 3 * self.h);
        assert_eq!(self.h % self.heads, 0, "{} heads do not divide {}", self.heads, self.h);
    }
}

/// Probabilities of the queries `from..to` of one head into `p: [to - from, s]`; zero where a key
/// lies after its query.
fn probabilities(p: &mut [f32], qkv: &[f32], d: Dims, from: usize, to: usize) {
    let q = d.part(qkv, 0, from, to - from);
    let k = d.part(qkv, 1, 0, to);
    gemm(MatMut::strided(p, to - from, to, d.s), Store::Set, d.scale(), q, k.t());
    simd(
        #[inline(always)]
        || {
            for (row, p) in p.chunks_exact_mut(d.s).take(to - from).enumerate() {
                softmax(p, from + row + 1);
            }
        },
    );
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

/// The output of attention; appends all probabilities, `[b, heads, s, s]`, to `keep` if given.
pub fn attention(qkv: &[f32], d: Dims, mut keep: Option<&mut Vec<f32>>) -> Vec<f32> {
    d.check(qkv);
    let mut out = vec![0.0; d.b * d.s * d.h];
    let mut p = vec![0.0; BLOCK.min(d.s) * d.s];
    for (b, head) in (0..d.b).flat_map(|b| (0..d.heads).map(move |head| (b, head))) {
        let qkv = &qkv[d.start(b, head, 3 * d.h)..];
        let out = &mut out[d.start(b, head, d.h)..];
        for (from, to) in d.blocks() {
            probabilities(&mut p, qkv, d, from, to);
            let out = MatMut::strided(&mut out[from * d.h..], to - from, d.head(), d.h);
            let seen = MatRef::strided(&p, to - from, to, d.s);
            gemm(out, Store::Set, 1.0, seen, d.part(qkv, 2, 0, to));
            if let Some(keep) = keep.as_deref_mut() {
                keep.extend_from_slice(&p[..(to - from) * d.s]);
            }
        }
    }
    out
}

/// The gradient of `qkv` for the output gradient `dy: [b, s, h]`. Without the probabilities that
/// the forward kept they are computed again, by the same kernel and so to the same bits.
pub fn attention_backward(dy: &[f32], qkv: &[f32], d: Dims, kept: Option<&[f32]>) -> Vec<f32> {
    d.check(qkv);
    let mut dqkv = vec![0.0; qkv.len()];
    let mut own = vec![0.0; BLOCK.min(d.s) * d.s];
    let mut ds = vec![0.0; BLOCK.min(d.s) * d.s];
    for (b, head) in (0..d.b).flat_map(|b| (0..d.heads).map(move |head| (b, head))) {
        let first = d.start(b, head, 3 * d.h);
        let (qkv, dqkv) = (&qkv[first..], &mut dqkv[first..]);
        let dy = &dy[d.start(b, head, d.h)..];
        for (from, to) in d.blocks().rev() {
            let p = match kept {
                Some(kept) => &kept[((b * d.heads + head) * d.s + from) * d.s..],
                None => {
                    probabilities(&mut own, qkv, d, from, to);
                    &own[..]
                }
            };
            let dy = MatRef::strided(&dy[from * d.h..], to - from, d.head(), d.h);
            block_backward(dqkv, &mut ds, dy, p, qkv, d, from, to);
        }
    }
    dqkv
}

/// One block of queries: sets dq, and sets (last block, which sees all keys) or adds dk and dv.
#[expect(clippy::too_many_arguments, reason = "one loop body, split out for its length")]
fn block_backward(
    dqkv: &mut [f32],
    ds: &mut [f32],
    dy: MatRef<'_>,
    p: &[f32],
    qkv: &[f32],
    d: Dims,
    from: usize,
    to: usize,
) {
    let rows = to - from;
    let store = if to == d.s { Store::Set } else { Store::Add };
    let seen = MatRef::strided(p, rows, to, d.s);
    gemm(d.part_mut(dqkv, 2, 0, to), store, 1.0, seen.t(), dy);
    gemm(MatMut::strided(ds, rows, to, d.s), Store::Set, 1.0, dy, d.part(qkv, 2, 0, to).t());
    simd(
        #[inline(always)]
        || {
            for (ds, p) in ds.chunks_exact_mut(d.s).zip(p.chunks_exact(d.s)).take(rows) {
                let (ds, p) = (&mut ds[..to], &p[..to]);
                let mean = sum2(ds, p, |d, p| d * p);
                ds.iter_mut().zip(p).for_each(|(d, p)| *d = (*d - mean) * *p);
            }
        },
    );
    let ds = MatRef::strided(ds, rows, to, d.s);
    let scale = d.scale();
    gemm(d.part_mut(dqkv, 0, from, rows), Store::Set, scale, ds, d.part(qkv, 1, 0, to));
    gemm(d.part_mut(dqkv, 1, 0, to), store, scale, ds.t(), d.part(qkv, 0, from, rows));
}
