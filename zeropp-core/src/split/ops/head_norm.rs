//! The norms of queries and keys, head by head, and their turn by position.

use burn::tensor::{DType, Tensor};

#[cfg(feature = "cube")]
use super::norm::for_kernel;
use super::position::{RotaryTurn, turn};
use super::projections::Turns;
#[cfg(feature = "cube")]
use super::rows;
use super::{VectorSums, fast, halves, link, wants_gradient};
use crate::cpu_tensor;
use crate::kernels::bf16::convert::{narrow, widen};
use crate::kernels::head_norm::{self as kernels, HeadRow};
use crate::split::{OpCx, Weight};

/// The norms of a [`head_norm`].
#[derive(Clone)]
pub struct HeadNorms {
    /// Query heads H.
    pub heads: usize,
    /// Key heads, and value heads, G.
    pub groups: usize,
    /// Weight of the queries' norm, `[d]`.
    pub q: Weight<1>,
    /// Weight of the keys' norm, `[d]`.
    pub k: Weight<1>,
    /// Added to each mean square.
    pub eps: f64,
}

/// RMSNorm of every query and every key of `qkv: [b, s, (H + 2G)·d]` over its d elements, then
/// their turn by position where `turns` says so; values pass unchanged.
///
/// Keeps F→B: qkv, and one fp32 number of each token's queries and keys. Keeps B→W: the gradients
/// of both weights (8·d bytes). B can make the output again.
pub fn head_norm(
    qkv: Tensor<3>,
    norms: &HeadNorms,
    turns: Option<Turns<'_>>,
    cx: &OpCx,
) -> Tensor<3> {
    let plain = qkv.clone().inner();
    let turned = turns.map(|turns| turns.of(plain.dims(), cx));
    let (out, rrms) = norms.turned_forward(&plain, turned.as_ref());
    drop(plain);
    let sums = VectorSums::new([&norms.q, &norms.k], cx);
    if !wants_gradient(&qkv, cx) {
        return out;
    }
    let saved = (cx.keep(&qkv), cx.save(rrms));
    let again = (saved.0.clone(), norms.clone(), turned.clone());
    let norms = norms.clone();
    let out = link(qkv, out, cx, move |mut dy| {
        if let Some(by) = &turned {
            dy = turn(dy, by, true);
        }
        let (dx, of_weights) = norms.backward(dy, saved.0.take(), saved.1.take(), sums.begun());
        sums.queue(of_weights);
        dx
    });
    cx.offer(out, move || {
        let (qkv, norms, turned) = again;
        norms.turned_forward(&qkv.take(), turned.as_ref()).0
    })
}

impl HeadNorms {
    fn at(&self) -> HeadRow {
        HeadRow { heads: self.heads, groups: self.groups }
    }

    fn turned_forward(&self, qkv: &Tensor<3>, by: Option<&RotaryTurn>) -> (Tensor<3>, Tensor<1>) {
        let (out, rrms) = self.forward(qkv);
        match by {
            Some(by) => (turn(out, by, false), rrms),
            None => (out, rrms),
        }
    }

    fn forward(&self, qkv: &Tensor<3>) -> (Tensor<3>, Tensor<1>) {
        let ([b, s, _], normed) = (qkv.dims(), self.heads + self.groups);
        let (q, k) = (self.q.get(), self.k.get());
        if let (Some(x), Some(q), Some(k)) = (fast(qkv), fast(&q), fast(&k)) {
            let [x, q, k] = [&x, &q, &k].map(|x| x.as_slice());
            let (y, rrms) = kernels::head_norm(x, self.at(), q, k, self.eps as f32);
            let n = rrms.len();
            return (cpu_tensor::from_vec(y, qkv.dims()), cpu_tensor::from_vec(rrms, [n]));
        }
        if let (Some(x), Some(q), Some(k)) = (halves(qkv), halves(&q), halves(&k)) {
            let [x, q, k] = [&x, &q, &k].map(|x| widen(x.as_slice()));
            let (y, rrms) = kernels::head_norm(&x, self.at(), &q, &k, self.eps as f32);
            let (y, n) = (cpu_tensor::from_halves(narrow(&y), qkv.dims()), rrms.len());
            return (y, cpu_tensor::from_vec(rrms, [n]));
        }
        #[cfg(feature = "cube")]
        if super::on_gpu(qkv) {
            let weights = [q, k].map(|w| for_kernel(w, qkv.dtype()));
            let (y, rrms) = crate::cube::head_norm(rows(qkv.clone()), weights, self.at(), self.eps);
            return (y.reshape(qkv.dims()), rrms);
        }
        let (x, values) = self.parts(qkv.clone());
        let rrms = (x.clone().square().mean_dim(3) + self.eps).sqrt().recip();
        let y = x * rrms.clone() * self.gamma(q, k);
        let y = self.joined(y, values, qkv.dtype());
        (y, rrms.reshape([b * s * normed]))
    }

    /// The gradients of qkv, and of q's weight and k's, to which the kernels add from `sums` on.
    fn backward(
        &self,
        dy: Tensor<3>,
        qkv: Tensor<3>,
        rrms: Tensor<1>,
        mut sums: Vec<f32>,
    ) -> (Tensor<3>, [Tensor<1>; 2]) {
        let ([b, s, _], [d]) = (qkv.dims(), self.q.shape());
        let (q, k) = (self.q.get(), self.k.get());
        let host = (fast(&qkv), fast(&q), fast(&k), fast(&rrms));
        if let (Some(x), Some(q), Some(k), Some(rrms)) = host {
            let dx = cpu_tensor::map_in_place(dy, |dy| {
                let [x, q, k, rrms] = [&x, &q, &k, &rrms].map(|x| x.as_slice());
                kernels::head_norm_backward(dy, x, self.at(), q, k, rrms, &mut sums);
            });
            let dx = dx.expect("gradients live where the values do");
            let dk = sums.split_off(d);
            return (dx, [sums, dk].map(|sums| cpu_tensor::from_vec(sums, [d])));
        }
        let host = (halves(&dy), halves(&qkv), halves(&q), halves(&k), fast(&rrms));
        if let (Some(wide), Some(x), Some(q), Some(k), Some(rrms)) = host {
            let dims = dy.dims();
            let [mut dy, x, q, k] = [&wide, &x, &q, &k].map(|x| widen(x.as_slice()));
            let rrms = rrms.as_slice();
            kernels::head_norm_backward(&mut dy, &x, self.at(), &q, &k, rrms, &mut sums);
            let (dx, dk) = (cpu_tensor::from_halves(narrow(&dy), dims), sums.split_off(d));
            return (dx, [sums, dk].map(|sums| cpu_tensor::from_vec(sums, [d])));
        }
        let dtype = dy.dtype();
        #[cfg(feature = "cube")]
        if super::on_gpu(&dy) {
            let weights = [q, k].map(|w| for_kernel(w, dtype));
            let dims = dy.dims();
            let (dx, sums) =
                crate::cube::head_norm_backward(rows(dy), rows(qkv), weights, rrms, self.at());
            let of = [0, d].map(|from| sums.clone().narrow(0, from, d));
            return (dx.reshape(dims), of);
        }
        let (dy, values) = self.parts(dy);
        let (x, _) = self.parts(qkv);
        let rrms = rrms.reshape([b, s, self.heads + self.groups, 1]);
        let hat = x * rrms.clone();
        let sums = (dy.clone() * hat.clone()).sum_dim(0).sum_dim(1);
        let sum =
            |from: usize, heads: usize| sums.clone().narrow(2, from, heads).sum_dim(2).reshape([d]);
        let (dq, dk) = (sum(0, self.heads), sum(self.heads, self.groups));
        let dhat = dy * self.gamma(q, k);
        let c = (dhat.clone() * hat.clone()).mean_dim(3);
        (self.joined((dhat - hat * c) * rrms, values, dtype), [dq, dk])
    }

    /// Queries and keys in fp32, `[b, s, H + G, d]`, and the values as they are.
    fn parts(&self, qkv: Tensor<3>) -> (Tensor<4>, Tensor<3>) {
        let ([b, s, width], normed) = (qkv.dims(), self.heads + self.groups);
        let [d] = self.q.shape();
        let values = qkv.clone().narrow(2, normed * d, width - normed * d);
        let x = qkv.narrow(2, 0, normed * d).cast(DType::F32);
        (x.reshape([b, s, normed, d]), values)
    }

    fn joined(&self, x: Tensor<4>, values: Tensor<3>, dtype: DType) -> Tensor<3> {
        let [b, s, normed, d] = x.dims();
        Tensor::cat(vec![x.reshape([b, s, normed * d]).cast(dtype), values], 2)
    }

    /// The weight of every head's norm, fp32, `[1, 1, H + G, d]`.
    fn gamma(&self, q: Tensor<1>, k: Tensor<1>) -> Tensor<4> {
        let [d] = self.q.shape();
        let of = |w: Tensor<1>, heads: usize| {
            w.cast(DType::F32).reshape([1, 1, 1, d]).repeat_dim(2, heads)
        };
        Tensor::cat(vec![of(q, self.heads), of(k, self.groups)], 2)
    }
}
