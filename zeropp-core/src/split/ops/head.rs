//! The last linear map and its cross-entropy in one, a chunk of tokens at a time, so that nothing
//! of size tokens × vocabulary outlives a chunk.
//!
//! The CPU's kernels also take a block of the vocabulary at a time (`blocks.rs`), and the order of
//! their sums is that of blocks: so no bit of them would change if other ranks had some.
//!
//! Shapes: n = b·s tokens, h hidden, V rows of the weight, of which the first `ids` are token ids
//! and the rest, if any, is there to make a multiple.

use burn::tensor::{Int, Tensor};

pub use zeropp_model::head::head_chunk;

use self::blocks::HostGrads;
use self::chunks::ChunkedHead;
pub use self::chunks::force_head_chunk;
use super::{fast, halves, is_fast, link, loss, products, rows, wants_gradient};
use crate::cpu_tensor;
use crate::split::{ForwardGrads, OpCx, Saved, Weight};

mod blocks;
mod chunks;
mod slice;
mod tensors;

pub use slice::{HeadSlice, SliceLogits, SplitHead, input_gradient, join_sums, sums_len};

/// Mean over all tokens of −log `softmax(x·Wᵀ)[target]` for `x: [b, s, h]`, `w: [V, h]` and
/// `targets: [b, s]`; fp32, shape `[1]`. Only the first `ids` rows of W take part.
///
/// Where [`Masks::scored`](crate::split::Masks) is given, the loss is the sum over the tokens whose
/// target is not [`NOT_SCORED`](crate::split::NOT_SCORED), divided by that. The loss of a slice
/// ([`OpCx::slice`]) has those of the slices before in it, so that the last one's is the sample's.
///
/// Where gradients are wanted they are computed here, in F: W's, if it trains, is added to
/// [`OpCx::forward_grads`] at once, B only hands on x's. Keeps F→B: the gradient of x. Keeps
/// nothing B→W. While it runs it holds the logits of [`head_chunk`] tokens, and on the CPU's
/// kernels what [`workspace_bytes`](zeropp_model::head::workspace_bytes) counts beside them.
///
/// # Panics
/// Panics if gradients are wanted and there is no place for them, if W has fewer rows than `ids`,
/// or if B brings another gradient than [`ForwardGrads::loss_scale`]: the loss cannot be scaled
/// after the fact. On the CPU also if a target that is scored is not below `ids`; on a GPU the loss
/// is NaN then.
pub fn linear_cross_entropy(
    x: Tensor<3>,
    w: &Weight<2>,
    targets: Tensor<2, Int>,
    ids: usize,
    cx: &OpCx,
) -> Tensor<1> {
    let (targets, plain) = (targets.inner(), x.clone().inner());
    let head = ChunkedHead::new(&plain, w, ids, cx);
    if !wants_gradient(&x, cx) {
        return head.forward(plain, targets, None).0;
    }
    let sink = cx.forward_grads.clone();
    let sink = sink.expect("a head whose gradients are made in F is told where they go");
    let scale = sink.loss_scale;
    let (loss, dx) = head.forward(plain, targets, Some(&sink));
    let dx = dx.expect("there is a place for the other gradient");
    link(x, loss, cx, move |dy: Tensor<1>| {
        // Asking a GPU would mean to wait for it.
        if let Some(dy) = cpu_tensor::on_cpu(&dy) {
            let dy = dy.as_slice()[0];
            assert!(dy == scale, "the loss's gradient is {dy}, but F was made for {scale}");
        }
        dx.take()
    })
}

impl ChunkedHead<'_> {
    /// The loss and, with a place for the weight's gradient, that of x.
    fn forward(
        &self,
        x: Tensor<3>,
        targets: Tensor<2, Int>,
        sink: Option<&ForwardGrads>,
    ) -> (Tensor<1>, Option<Saved<3>>) {
        if halves(&x).is_some() {
            return self.in_halves(&x, targets, sink);
        }
        if !is_fast(&x) {
            return self.by_tensors(x, targets, sink);
        }
        let (dims, targets) = (x.dims(), self.known(targets));
        let x = fast(&x).expect("checked above");
        let (x, n) = (x.as_slice(), self.divisor(targets.len()));
        let Some(sink) = sink else { return (self.on_host(x, &targets, None), None) };
        let held = self.cx.workspace(size_of_val(x));
        let mut dx = Vec::with_capacity(x.len());
        let mut all = sink.grads.lock();
        let dw = self.w.trains().then(|| all.host_mut(self.w.slot()).expect("on the CPU"));
        let grads = HostGrads { dx: &mut dx, dw, weight: sink.loss_scale / n as f32 };
        let loss = self.on_host(x, &targets, Some(grads));
        drop(held);
        (loss, Some(self.cx.save(cpu_tensor::from_vec(dx, dims))))
    }

    /// The same by tensor operations, for GPUs.
    fn by_tensors(
        &self,
        x: Tensor<3>,
        targets: Tensor<2, Int>,
        sink: Option<&ForwardGrads>,
    ) -> (Tensor<1>, Option<Saved<3>>) {
        let dims = x.dims();
        let n = dims[0] * dims[1];
        let element = x.dtype().size();
        let (x, targets) = (rows(x), targets.reshape([n]));
        let w = self.w.get();
        let _logits = self.cx.workspace(self.chunk * self.w.shape()[0] * element);
        let held = sink.map(|_| self.cx.workspace(n * dims[2] * element));
        let (divisor, masked) = (self.divisor(n), self.cx.masks.scored.is_some());
        let weight = sink.map(|sink| sink.loss_scale / divisor as f32);
        let (mut total, mut dxs) = (None, Vec::new());
        for tokens in self.chunks(n) {
            let x = x.clone().narrow(0, tokens.start, tokens.len());
            let targets = targets.clone().narrow(0, tokens.start, tokens.len());
            let logits = products::matmul(x.clone(), w.clone().transpose());
            let logits = tensors::without_padding(logits, self.ids);
            let (sum, slope) = loss::of_rows(logits, targets, masked, weight);
            total = Some(match total.take() {
                Some(total) => total + sum,
                None => sum,
            });
            if let (Some(sink), Some(slope)) = (sink, slope) {
                dxs.push(products::matmul(slope.clone(), w.clone()));
                if self.w.trains() {
                    let (mut grads, slot) = (sink.grads.lock(), self.w.slot());
                    products::add_gradient(&mut grads, slot, None, slope.transpose(), x);
                }
            }
        }
        drop(held);
        let dx = sink.map(|_| self.cx.save(Tensor::cat(dxs, 0).reshape(dims)));
        (total.expect("a micro-batch has tokens") / divisor, dx)
    }
}
