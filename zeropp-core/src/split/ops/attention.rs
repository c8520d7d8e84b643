//! Causal self-attention on a fused projection.

use burn::tensor::{DType, Int, Tensor, activation};

use super::{fast, is_fast};
use crate::host;
use crate::kernels::attention as kernels;
use crate::kernels::attention::Dims;
use crate::split::{OpCx, Saved, custom_vjp};

/// softmax(q·kᵀ/√d, causal)·v for `qkv: [b, s, 3h]`, which holds q, k and v one after another in
/// its last axis and the heads inside of each (GPT-2's layout); the result is `[b, s, h]`.
///
/// Keeps F→B: qkv, and unless [`OpCx::recompute_attention`] the probabilities `[b, heads, s, s]` in
/// the type of qkv. Recomputation repeats the forward bit for bit. Keeps nothing B→W.
///
/// # Panics
/// Panics if `heads` does not divide h.
pub fn attention(qkv: Tensor<3>, heads: usize, cx: &OpCx) -> Tensor<3> {
    grouped_attention(qkv, heads, heads, cx)
}

/// [`attention`] in which every `heads/groups` consecutive query heads share one key and one value
/// head (grouped-query attention): `qkv: [b, s, (heads + 2·groups)·d]` to `[b, s, heads·d]`. Keeps
/// the same.
///
/// # Panics
/// Panics if `groups` does not divide `heads` or the width of qkv is not as above.
pub fn grouped_attention(qkv: Tensor<3>, heads: usize, groups: usize, cx: &OpCx) -> Tensor<3> {
    let [b, s, width] = qkv.dims();
    let parts = heads + 2 * groups;
    assert!(
        width.is_multiple_of(parts) && heads.is_multiple_of(groups),
        "qkv of width {width} cannot hold {heads} query heads and {groups} key and value heads"
    );
    let dims = Dims { b, s, heads, groups, d: width / parts };
    let plain = qkv.clone().inner();
    let keep = qkv.is_tracked() && !cx.recompute_attention;
    let (out, p) = forward(&plain, dims, keep);
    if !qkv.is_tracked() {
        return out;
    }
    let (plain, p) = (cx.save(plain), p.map(|p| cx.save(p)));
    custom_vjp(qkv, out, move |dy| backward(dy, plain.take(), p.map(Saved::take), dims))
}

fn forward(qkv: &Tensor<3>, d: Dims, keep: bool) -> (Tensor<3>, Option<Tensor<4>>) {
    if let Some(qkv) = fast(qkv) {
        let mut p = keep.then(|| Vec::with_capacity(d.b * d.heads * d.s * d.s));
        let out = kernels::attention(qkv.as_slice(), d, p.as_mut());
        let p = p.map(|p| host::from_vec(p, [d.b, d.heads, d.s, d.s]));
        return (host::from_vec(out, [d.b, d.s, d.out_width()]), p);
    }
    let [q, k, v] = split(qkv, d);
    let p = probabilities(q, k);
    let out = merge(p.clone().matmul(v));
    (out, keep.then_some(p))
}

fn backward(dy: Tensor<3>, qkv: Tensor<3>, p: Option<Tensor<4>>, d: Dims) -> Tensor<3> {
    if is_fast(&qkv) {
        let (dy, qkv) = (host::host(&dy).expect("as qkv"), fast(&qkv).expect("checked"));
        let p = p.as_ref().map(|p| host::host(p).expect("as qkv"));
        let p = p.as_ref().map(|p| p.as_slice());
        let dqkv = kernels::attention_backward(dy.as_slice(), qkv.as_slice(), d, p);
        return host::from_vec(dqkv, [d.b, d.s, d.width()]);
    }
    let [q, k, v] = split(&qkv, d);
    let p = p.unwrap_or_else(|| probabilities(q.clone(), k.clone()));
    let dtype = qkv.dtype();
    let dy = heads_of(dy, d.d);
    let dv = p.clone().swap_dims(2, 3).matmul(dy.clone());
    let dp = dy.matmul(v.swap_dims(2, 3)).cast(DType::F32);
    let p = p.cast(DType::F32);
    let mean = (dp.clone() * p.clone()).sum_dim(3);
    let ds = ((dp - mean) * p * scale(d.d)).cast(dtype);
    let dq = ds.clone().matmul(k);
    let dk = ds.swap_dims(2, 3).matmul(q);
    let [dk, dv] = [dk, dv].map(|g| merge(sum_groups(g, d)));
    Tensor::cat(vec![merge(dq), dk, dv], 2)
}

fn scale(head: usize) -> f64 {
    1.0 / (head as f64).sqrt()
}

/// Probabilities `[b, heads, s, s]` of `q`, `k`: `[b, heads, s, d]`; the softmax runs in fp32.
fn probabilities(q: Tensor<4>, k: Tensor<4>) -> Tensor<4> {
    let [_, _, s, head] = q.dims();
    let future = Tensor::<2, Int>::ones([s, s], &q.device()).triu(1).bool().unsqueeze::<4>();
    let dtype = q.dtype();
    let scores = q.matmul(k.swap_dims(2, 3)).cast(DType::F32) * scale(head);
    activation::softmax(scores.mask_fill(future, f32::NEG_INFINITY), 3).cast(dtype)
}

/// q, k and v as `[b, heads, s, d]`; shared keys and values are repeated.
fn split(qkv: &Tensor<3>, d: Dims) -> [Tensor<4>; 3] {
    let part =
        |first: usize, heads: usize| heads_of(qkv.clone().narrow(2, first * d.d, heads * d.d), d.d);
    let (k, v) = (part(d.heads, d.groups), part(d.heads + d.groups, d.groups));
    [part(0, d.heads), repeat_groups(k, d), repeat_groups(v, d)]
}

/// `[b, groups, s, d]` to `[b, heads, s, d]`.
fn repeat_groups(x: Tensor<4>, d: Dims) -> Tensor<4> {
    if d.groups == d.heads {
        return x;
    }
    let x: Tensor<5> = x.unsqueeze_dim(2);
    x.expand([d.b, d.groups, d.heads / d.groups, d.s, d.d]).reshape([d.b, d.heads, d.s, d.d])
}

/// The pullback of [`repeat_groups`].
fn sum_groups(g: Tensor<4>, d: Dims) -> Tensor<4> {
    if d.groups == d.heads {
        return g;
    }
    let dtype = g.dtype();
    let g = g.cast(DType::F32).reshape([d.b, d.groups, d.heads / d.groups, d.s, d.d]);
    g.sum_dim(2).reshape([d.b, d.groups, d.s, d.d]).cast(dtype)
}

fn heads_of(x: Tensor<3>, d: usize) -> Tensor<4> {
    let [b, s, width] = x.dims();
    x.reshape([b, s, width / d, d]).swap_dims(1, 2)
}

fn merge(x: Tensor<4>) -> Tensor<3> {
    let [b, heads, s, d] = x.dims();
    x.swap_dims(1, 2).reshape([b, s, heads * d])
}
