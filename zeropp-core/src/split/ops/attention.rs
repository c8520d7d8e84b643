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
    let [b, s, width] = qkv.dims();
    let h = width / 3;
    assert_eq!(width, 3 * heads * (h / heads), "width of qkv for {heads} heads");
    let dims = Dims { b, s, h, heads };
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
        return (host::from_vec(out, [d.b, d.s, d.h]), p);
    }
    let [q, k, v] = split(qkv, d);
    let p = probabilities(q, k);
    let out = merge(p.clone().matmul(v), d);
    (out, keep.then_some(p))
}

fn backward(dy: Tensor<3>, qkv: Tensor<3>, p: Option<Tensor<4>>, d: Dims) -> Tensor<3> {
    if is_fast(&qkv) {
        let (dy, qkv) = (host::host(&dy).expect("as qkv"), fast(&qkv).expect("checked"));
        let p = p.as_ref().map(|p| host::host(p).expect("as qkv"));
        let p = p.as_ref().map(|p| p.as_slice());
        let dqkv = kernels::attention_backward(dy.as_slice(), qkv.as_slice(), d, p);
        return host::from_vec(dqkv, [d.b, d.s, 3 * d.h]);
    }
    let [q, k, v] = split(&qkv, d);
    let p = p.unwrap_or_else(|| probabilities(q.clone(), k.clone()));
    let dtype = qkv.dtype();
    let dy = heads_of(dy, d);
    let dv = p.clone().swap_dims(2, 3).matmul(dy.clone());
    let dp = dy.matmul(v.swap_dims(2, 3)).cast(DType::F32);
    let p = p.cast(DType::F32);
    let mean = (dp.clone() * p.clone()).sum_dim(3);
    let ds = ((dp - mean) * p * scale(d.h / d.heads)).cast(dtype);
    let dq = ds.clone().matmul(k);
    let dk = ds.swap_dims(2, 3).matmul(q);
    Tensor::cat(vec![merge(dq, d), merge(dk, d), merge(dv, d)], 2)
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

/// q, k and v as `[b, heads, s, d]`.
fn split(qkv: &Tensor<3>, d: Dims) -> [Tensor<4>; 3] {
    [0, 1, 2].map(|i| heads_of(qkv.clone().narrow(2, i * d.h, d.h), d))
}

fn heads_of(x: Tensor<3>, d: Dims) -> Tensor<4> {
    x.reshape([d.b, d.s, d.heads, d.h / d.heads]).swap_dims(1, 2)
}

fn merge(x: Tensor<4>, d: Dims) -> Tensor<3> {
    x.swap_dims(1, 2).reshape([d.b, d.s, d.h])
}
