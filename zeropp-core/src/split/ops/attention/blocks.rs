//! Attention by tensor operations, a block of queries at a time: the path of GPUs.
//!
//! A block sees only the keys up to its own end, which saves close to half of the products. Its
//! scores live for the block alone; what stays from F to B is one number a query, the logarithm
//! of its sum of exponentials (FlashAttention-2, §3.1.1).
//!
//! Shapes: n = b·groups matrices of keys; `share` query heads read one of them, and a block of
//! `r` queries of each makes share·r rows, so that keys and values are never repeated and their
//! gradients are summed inside of a product.

use std::ops::Range;

use burn::tensor::{Bool, DType, Int, Tensor, TensorData};

use super::hidden::MaskedKeys;
use super::softmax;
#[cfg(feature = "cube")]
use crate::cube::DroppedRows;
use crate::kernels::attention::{Dims, Dropped};
#[cfg(feature = "cube")]
use crate::split::ops::on_gpu;
use crate::split::ops::products;

/// Queries in the smallest block: tensor cores and their tiles want no less.
const BLOCK_MIN: usize = 128;
/// Blocks in a sample, if memory allows: 5/8 of the square is computed where 1/2 would do, but each
/// further block costs nine launches and, where products are tuned by shape, more shapes.
const BLOCKS: usize = 4;
/// Scores that a block may hold over all samples and heads: 0.75 GiB in bf16, 1 GiB in fp32, as
/// scores and their gradients are there twice, in fp32 and in the type of qkv.
const SCORES_MAX: usize = 1 << 26;

/// The queries of every block of an attention: a quarter of the sample, rounded up to whole
/// [`BLOCK_MIN`], unless that many scores are more than [`SCORES_MAX`].
pub(super) fn blocks(d: Dims) -> impl DoubleEndedIterator<Item = Range<usize>> {
    let a_quarter = d.s.div_ceil(BLOCKS).next_multiple_of(BLOCK_MIN);
    let that_fit = SCORES_MAX / (d.b * d.heads * d.s).max(1) / BLOCK_MIN * BLOCK_MIN;
    let block = a_quarter.min(that_fit.max(BLOCK_MIN));
    (0..d.s.div_ceil(block)).map(move |i| i * block..d.s.min((i + 1) * block))
}

/// q as `[n, share, s, d]`; k and v as `[n, s, d]`.
struct Heads {
    q: Tensor<4>,
    k: Tensor<3>,
    v: Tensor<3>,
}

impl Heads {
    fn of(qkv: &Tensor<3>, d: Dims) -> Self {
        let part = |first: usize, heads: usize| {
            by_head(qkv.clone().narrow(2, first * d.d, heads * d.d), heads)
        };
        let keys = [d.b * d.groups, d.s, d.d];
        Self {
            q: by_group(part(0, d.heads), d),
            k: part(d.heads, d.groups).reshape(keys),
            v: part(d.heads + d.groups, d.groups).reshape(keys),
        }
    }
}

/// The output `[b, s, heads·d]` and the logarithms of the sums `[b, heads, s]`, fp32; with what is
/// hidden beside later keys, and dropped, if anything is.
pub(super) fn forward(
    qkv: &Tensor<3>,
    d: Dims,
    masked: Option<&MaskedKeys>,
) -> (Tensor<3>, Tensor<3>) {
    let firsts = masked.filter(|m| m.hides_keys()).map(|masked| firsts(masked, d, qkv));
    let dropped = masked.and_then(MaskedKeys::dropped);
    let Heads { q, k, v } = Heads::of(qkv, d);
    let (mut outs, mut sums) = (Vec::new(), Vec::new());
    for queries in blocks(d) {
        let n = queries.len();
        let (k, v) = (until(&k, queries.end), until(&v, queries.end));
        let scores = products::matmul_f32(rows(&q, &queries), k.swap_dims(1, 2));
        let hidden = firsts.as_ref().map(|firsts| hidden(firsts, &queries, d));
        let shape = softmax_shape(&queries, d);
        let (p, lse) = softmax::forward(scores, shape, hidden, qkv.dtype());
        let p = drop_some(p, dropped, &queries, d);
        outs.push(products::matmul(p, v).reshape([d.b, d.heads, n, d.d]).swap_dims(1, 2));
        sums.push(lse.reshape([d.b, d.heads, n]));
    }
    (join(outs, 1).reshape([d.b, d.s, d.out_width()]), join(sums, 2))
}

/// The gradient of qkv for `dy: [b, s, heads·d]`; `sums` as from [`forward`].
pub(super) fn backward(
    dy: Tensor<3>,
    qkv: &Tensor<3>,
    sums: Tensor<3>,
    d: Dims,
    masked: Option<&MaskedKeys>,
) -> Tensor<3> {
    let firsts = masked.filter(|m| m.hides_keys()).map(|masked| firsts(masked, d, qkv));
    let dropped = masked.and_then(MaskedKeys::dropped);
    let Heads { q, k, v } = Heads::of(qkv, d);
    let dy = by_group(by_head(dy, d.heads), d);
    let mut dqs = Vec::new();
    let (mut dk, mut dv) = (None, None);
    // From the last block, whose queries see all keys, so that the sums start at full size.
    for queries in blocks(d).rev() {
        let n = queries.len();
        let (q, dy) = (rows(&q, &queries), rows(&dy, &queries));
        let (k, v) = (until(&k, queries.end), until(&v, queries.end));
        let scores = products::matmul_f32(q.clone(), k.clone().swap_dims(1, 2));
        let dp = products::matmul_f32(dy.clone(), v.swap_dims(1, 2));
        let dp = drop_some(dp, dropped, &queries, d);
        let sums = sums.clone().narrow(2, queries.start, n);
        let sums = sums.reshape([d.b * d.groups, d.heads / d.groups * n]);
        let shape = softmax_shape(&queries, d);
        let hidden = firsts.as_ref().map(|firsts| hidden(firsts, &queries, d));
        let (p, ds) = softmax::backward(scores, dp, sums, shape, hidden, qkv.dtype());
        let p = drop_some(p, dropped, &queries, d);
        dv = Some(add_until(dv, products::matmul_f32(p.swap_dims(1, 2), dy)));
        dk = Some(add_until(dk, products::matmul_f32(ds.clone().swap_dims(1, 2), q)));
        dqs.push(products::matmul(ds, k).reshape([d.b, d.heads, n, d.d]).swap_dims(1, 2));
    }
    dqs.reverse();
    let dq = join(dqs, 1).reshape([d.b, d.s, d.out_width()]);
    let [dk, dv] = [dk, dv].map(|g| {
        let g = g.expect("a sample has tokens").cast(qkv.dtype());
        g.reshape([d.b, d.groups, d.s, d.d]).swap_dims(1, 2).reshape([d.b, d.s, d.groups * d.d])
    });
    Tensor::cat(vec![dq, dk, dv], 2)
}

/// Probabilities of a block of queries, `[n, share·r, keys]`, or their gradients, by the factors of
/// dropout if there is any.
fn drop_some(p: Tensor<3>, dropped: Option<Dropped>, queries: &Range<usize>, d: Dims) -> Tensor<3> {
    let Some(dropped) = dropped else { return p };
    #[cfg(feature = "cube")]
    if on_gpu(&p) {
        let Dropped { dropout: rule, sample, .. } = dropped;
        let (heads, first) = (d.heads, queries.start);
        let rows = DroppedRows { rule, queries: queries.len(), heads, first, sample };
        return crate::cube::drop_rows(p, rows);
    }
    let factors = TensorData::new(dropped.factors(d, queries.clone(), queries.end), p.dims());
    let factors = Tensor::<3>::from_data(factors, (&p.device(), DType::F32));
    let dtype = p.dtype();
    (p.cast(DType::F32) * factors).cast(dtype)
}

/// The first key that each query sees, `[b, s]`.
fn firsts(masked: &MaskedKeys, d: Dims, on: &Tensor<3>) -> Tensor<2, Int> {
    let firsts: Vec<i32> = masked.firsts(d).into_iter().map(|first| first as i32).collect();
    Tensor::from_data(TensorData::new(firsts, [d.b, d.s]), &on.device())
}

/// Which keys a block's queries do not see, `[n, share·r, keys]`: those before `firsts`, and those
/// after the query.
fn hidden(firsts: &Tensor<2, Int>, queries: &Range<usize>, d: Dims) -> Tensor<3, Bool> {
    let (rows, keys) = (queries.len(), queries.end);
    let device = firsts.device();
    let all = [d.b, d.heads, rows, keys];
    let first = firsts.clone().narrow(1, queries.start, rows).reshape([d.b, 1, rows, 1]);
    let query = Tensor::<1, Int>::arange(queries.start as i64..queries.end as i64, &device);
    let query = query.reshape([1, 1, rows, 1]).expand(all);
    let key = Tensor::<1, Int>::arange(0..keys as i64, &device).reshape([1, 1, 1, keys]);
    let key = key.expand(all);
    let hidden = key.clone().lower(first.expand(all)).bool_or(key.greater(query));
    hidden.reshape([d.b * d.groups, d.heads / d.groups * rows, keys])
}

fn softmax_shape(queries: &Range<usize>, d: Dims) -> softmax::SoftmaxRows {
    softmax::SoftmaxRows {
        first: queries.start,
        queries: queries.len(),
        scale: 1.0 / (d.d as f32).sqrt(),
    }
}

/// `[b, s, heads·d]` to `[b, heads, s, d]`.
fn by_head(x: Tensor<3>, heads: usize) -> Tensor<4> {
    let [b, s, width] = x.dims();
    x.reshape([b, s, heads, width / heads]).swap_dims(1, 2)
}

/// `[b, heads, s, d]` to `[n, share, s, d]`.
fn by_group(x: Tensor<4>, d: Dims) -> Tensor<4> {
    x.reshape([d.b * d.groups, d.heads / d.groups, d.s, d.d])
}

/// A block of queries of `x: [n, share, s, d]` as `[n, share·r, d]`.
fn rows(x: &Tensor<4>, queries: &Range<usize>) -> Tensor<3> {
    let [n, share, _, d] = x.dims();
    x.clone().narrow(2, queries.start, queries.len()).reshape([n, share * queries.len(), d])
}

/// The first `end` keys or values.
fn until(x: &Tensor<3>, end: usize) -> Tensor<3> {
    x.clone().narrow(1, 0, end)
}

/// Adds `part: [n, r, d]` to the first r rows of `sum: [n, s, d]`; the first part is the sum.
fn add_until(sum: Option<Tensor<3>>, part: Tensor<3>) -> Tensor<3> {
    match sum {
        None => part,
        Some(sum) => products::add_first_rows(sum, part),
    }
}

fn join<const D: usize>(mut parts: Vec<Tensor<D>>, dim: usize) -> Tensor<D> {
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, dim) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(b: usize, heads: usize, s: usize) -> Vec<Range<usize>> {
        blocks(Dims { b, s, heads, groups: heads, d: 64, place: 0 }).collect()
    }

    #[test]
    fn blocks_follow_one_another_and_fit() {
        for (b, heads, s) in [(1, 1, 1), (2, 3, 129), (16, 12, 1024), (4, 32, 8192), (1, 8, 65_536)]
        {
            let blocks = of(b, heads, s);
            let ends = blocks.iter().map(|r| r.end);
            let starts: Vec<_> = std::iter::once(0).chain(ends).collect();
            assert_eq!(starts[starts.len() - 1], s);
            for (queries, start) in blocks.iter().zip(&starts) {
                assert_eq!(queries.start, *start);
                let scores = b * heads * s * queries.len();
                assert!(scores <= SCORES_MAX || queries.len() <= BLOCK_MIN, "{queries:?} of {s}");
            }
        }
    }

    #[test]
    fn blocks_are_a_quarter_where_memory_allows() {
        assert_eq!(of(1, 12, 100), [0..100]);
        assert_eq!(of(1, 12, 300), [0..128, 128..256, 256..300]);
        assert_eq!(of(16, 12, 1024), [0..256, 256..512, 512..768, 768..1024]);
        assert_eq!(of(32, 12, 1024).len(), 8);
    }
}
