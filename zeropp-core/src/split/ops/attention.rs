//! Causal self-attention on a fused projection.

mod blocks;
#[cfg(feature = "cube")]
mod fused;
mod hidden;
mod row_kernel;
mod sliced;
mod softmax;

use burn::tensor::Tensor;

use super::{fast, halves, is_fast, is_tracked};
use crate::cpu_tensor;
#[cfg(feature = "cube")]
use crate::cube::FusedAttention;
use crate::kernels::attention::{Dims, EarlierSums, keeps_probabilities, kept, recomputed};
use crate::kernels::bf16::attention as half_kernels;
use crate::split::{DropoutPlace, OpCx, Saved, custom_vjp};

use hidden::MaskedKeys;

/// softmax(q·kᵀ/√d, causal)·v for `qkv: [b, s, 3h]`, which holds q, k and v one after another in
/// its last axis and the heads inside of each (GPT-2's layout); the result is `[b, s, h]`.
///
/// Keeps F→B: qkv, and on the CPU in fp32 for short samples ([`keeps_probabilities`]),
/// unless with selective recomputation ([`OpCx::makers`]), the probabilities `[b, heads, s, s]`.
/// Else the probabilities of all queries are never there at once: it keeps one fp32 number of
/// each query and head, `[b, heads, s]`, and B computes the probabilities again whatever the
/// switch says; with the fused kernels of NVIDIA's GPUs (`cube`) also the output.
/// Recomputation repeats the forward bit for bit. Keeps nothing B→W.
///
/// Where the micro-batch has documents ([`Masks::documents`](crate::split::Masks)), a query sees
/// those keys alone that are of its own document; that keeps no probabilities anywhere. Nor does a
/// micro-batch with dropout ([`Masks::dropout`](crate::split::Masks)), or a slice of a sample
/// ([`OpCx::slice`]), whose queries see the keys of the slices before it, too.
///
/// # Panics
/// Panics if `heads` does not divide h, and for a slice off the CPU.
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
    windowed_attention(qkv, [heads, groups], None, cx)
}

/// [`grouped_attention`] of `[heads, groups]` in which a query sees the last `window` keys alone,
/// itself included, if there is one (a sliding window). One that is shorter than the samples keeps
/// no probabilities anywhere.
///
/// # Panics
/// As [`grouped_attention`].
pub fn windowed_attention(
    qkv: Tensor<3>,
    heads: [usize; 2],
    window: Option<usize>,
    cx: &OpCx,
) -> Tensor<3> {
    attend(qkv, heads, window, None, cx)
}

/// [`windowed_attention`] that drops probabilities of this `place` where the micro-batch has
/// dropout: they and their mask are computed again in B.
///
/// # Panics
/// As [`grouped_attention`].
pub fn dropout_attention(
    qkv: Tensor<3>,
    heads: [usize; 2],
    window: Option<usize>,
    place: DropoutPlace<'_>,
    cx: &OpCx,
) -> Tensor<3> {
    attend(qkv, heads, window, Some(place), cx)
}

fn attend(
    qkv: Tensor<3>,
    [heads, groups]: [usize; 2],
    window: Option<usize>,
    place: Option<DropoutPlace<'_>>,
    cx: &OpCx,
) -> Tensor<3> {
    let [b, s, width] = qkv.dims();
    let parts = heads + 2 * groups;
    assert!(
        width.is_multiple_of(parts) && heads.is_multiple_of(groups),
        "qkv of width {width} cannot hold {heads} query heads and {groups} key and value heads"
    );
    let dims = Dims { b, s, heads, groups, d: width / parts, place: 0 };
    let plain = qkv.clone().inner();
    if let Some(slice) = &cx.slice {
        let kernel = sliced::kernel(dims, window, place, slice, cx);
        return sliced::attend(qkv, plain, kernel, slice, cx);
    }
    let hidden = MaskedKeys::new(window.filter(|window| *window < s), place, cx);
    #[cfg(feature = "cube")]
    if !super::takes_blocks() && FusedAttention::fits(&plain, dims.d) {
        return fused::attention(qkv, plain, dims, hidden, cx);
    }
    if let Some(hidden) = hidden {
        return within(qkv, plain, dims, hidden, cx);
    }
    if let Some(host) = halves(&plain) {
        let (out, sums) = half_kernels::attention(host.as_slice(), dims);
        let out = cpu_tensor::from_halves(out, [b, s, dims.out_width()]);
        if !is_tracked(&qkv) {
            return out;
        }
        let sums = cpu_tensor::from_vec(sums, [b, heads, s]);
        let (plain, sums) = (cx.keep(&qkv), cx.save(sums));
        return custom_vjp(qkv, out, move |dy| {
            half_backward(&dy, &plain.take(), &sums.take(), dims)
        });
    }
    if !is_fast(&plain) {
        let (out, sums) = blocks::forward(&plain, dims, None);
        if !is_tracked(&qkv) {
            return out;
        }
        let (plain, sums) = (cx.keep(&qkv), cx.save(sums));
        return custom_vjp(qkv, out, move |dy| {
            blocks::backward(dy, &plain.take(), sums.take(), dims, None)
        });
    }
    if !keeps_probabilities(s) {
        return long(qkv, plain, dims, cx);
    }
    let keep = is_tracked(&qkv) && cx.makers.is_none();
    let (out, p) = forward(&plain, dims, keep);
    if !is_tracked(&qkv) {
        return out;
    }
    let (plain, p) = (cx.keep(&qkv), p.map(|p| cx.save(p)));
    custom_vjp(qkv, out, move |dy| backward(dy, plain.take(), p.map(Saved::take), dims))
}

/// Attention of which more is hidden than what comes later, or something dropped, on any device.
fn within(qkv: Tensor<3>, plain: Tensor<3>, d: Dims, hidden: MaskedKeys, cx: &OpCx) -> Tensor<3> {
    let kernel = hidden.kernel(d);
    let on_kernels = kernel.forward(&[], &plain);
    let is_generic = on_kernels.is_none();
    let (out, sums) = on_kernels.unwrap_or_else(|| blocks::forward(&plain, d, Some(&hidden)));
    if !is_tracked(&qkv) {
        return out;
    }
    let (plain, sums) = (cx.keep(&qkv), cx.save(sums));
    custom_vjp(qkv, out, move |dy| {
        let (qkv, sums) = (plain.take(), sums.take());
        match is_generic {
            true => blocks::backward(dy, &qkv, sums, d, Some(&hidden)),
            false => kernel.backward(&[], [&qkv, &sums, &dy], EarlierSums::default()),
        }
    })
}

/// The CPU's kernels on long samples.
fn long(qkv: Tensor<3>, plain: Tensor<3>, d: Dims, cx: &OpCx) -> Tensor<3> {
    let (out, sums) = {
        let qkv = fast(&plain).expect("checked by the caller");
        recomputed::attention(qkv.as_slice(), d, None)
    };
    let out = cpu_tensor::from_vec(out, [d.b, d.s, d.out_width()]);
    if !is_tracked(&qkv) {
        return out;
    }
    let sums: Tensor<3> = cpu_tensor::from_vec(sums, [d.b, d.heads, d.s]);
    let (plain, sums) = (cx.keep(&qkv), cx.save(sums));
    custom_vjp(qkv, out, move |dy| {
        let tensors = [dy, plain.take(), sums.take()];
        let [dy, qkv, sums] =
            tensors.each_ref().map(|t| cpu_tensor::on_cpu(t).expect("as in the forward"));
        let (dy, qkv, sums) = (dy.as_slice(), qkv.as_slice(), sums.as_slice());
        let dqkv = recomputed::attention_backward(dy, qkv, sums, d, None);
        cpu_tensor::from_vec(dqkv, [d.b, d.s, d.width()])
    })
}

fn half_backward(dy: &Tensor<3>, qkv: &Tensor<3>, sums: &Tensor<3>, d: Dims) -> Tensor<3> {
    let [dy, qkv] = [dy, qkv].map(|t| halves(t).expect("checked by the forward"));
    let sums = fast(sums).expect("made by the forward");
    let sums = sums.as_slice();
    let dqkv = half_kernels::attention_backward(dy.as_slice(), qkv.as_slice(), sums, d);
    cpu_tensor::from_halves(dqkv, [d.b, d.s, d.width()])
}

fn forward(qkv: &Tensor<3>, d: Dims, keep: bool) -> (Tensor<3>, Option<Tensor<4>>) {
    let qkv = fast(qkv).expect("checked by the caller");
    let mut p = keep.then(Vec::new);
    let out = kept::attention(qkv.as_slice(), d, p.as_mut());
    let p = p.map(|p| cpu_tensor::from_vec(p, [d.b, d.heads, d.s, d.s]));
    (cpu_tensor::from_vec(out, [d.b, d.s, d.out_width()]), p)
}

fn backward(dy: Tensor<3>, qkv: Tensor<3>, p: Option<Tensor<4>>, d: Dims) -> Tensor<3> {
    let (dy, qkv) =
        (cpu_tensor::on_cpu(&dy).expect("as qkv"), fast(&qkv).expect("checked by the forward"));
    let p = p.as_ref().map(|p| cpu_tensor::on_cpu(p).expect("as qkv"));
    let p = p.as_ref().map(|p| p.as_slice());
    let dqkv = kept::attention_backward(dy.as_slice(), qkv.as_slice(), d, p);
    cpu_tensor::from_vec(dqkv, [d.b, d.s, d.width()])
}
