//! The last linear map and its cross-entropy in one, a chunk of tokens at a time, so that nothing
//! of size tokens × vocabulary outlives a chunk.
//!
//! Shapes: n = b·s tokens, h hidden, V rows of the weight, of which the first `ids` are token ids
//! and the rest, if any, is there to make a multiple.

use std::cell::Cell;
use std::ops::Range;

use burn::tensor::{Int, Tensor, bf16 as Half};

pub use zeropp_model::head::head_chunk;
use zeropp_model::head::logit_bytes;

use super::linear::row_block;
use super::{fast, halves, is_fast, link, loss, products, rows, wants_gradient};
use crate::cpu_tensor;
use crate::kernels::bf16::{self, Mat, Packed};
use crate::kernels::gemm::{MatMut, MatRef, StoreMode, gemm, product};
use crate::kernels::loss as kernels;
use crate::split::weight::Side;
use crate::split::{ForwardGrads, OpCx, Saved, Weight};

/// Rows of a bf16 weight that are packed at a time; whole blocks of a product's K.
const PACKED_ROWS: usize = 4096;

thread_local! {
    static CHUNK: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Makes the heads of this thread take this many tokens at a time. For tests of chunks.
#[doc(hidden)]
pub fn force_head_chunk(tokens: Option<usize>) {
    CHUNK.set(tokens);
}

/// Mean over all tokens of −log `softmax(x·Wᵀ)[target]` for `x: [b, s, h]`, `w: [V, h]` and
/// `targets: [b, s]`; fp32, shape `[1]`. Only the first `ids` rows of W take part.
///
/// Where [`Masks::scored`](crate::split::Masks) is given, the loss is the sum over the tokens whose
/// target is not [`NOT_SCORED`](crate::split::NOT_SCORED), divided by that.
///
/// Where gradients are wanted they are computed here, in F: W's, if it trains, is added to
/// [`OpCx::forward_grads`] at once, B only hands on x's. Keeps F→B: the gradient of x. Keeps
/// nothing B→W. While it runs it holds the logits of [`head_chunk`] tokens.
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

/// The map, and how it is cut.
struct ChunkedHead<'a> {
    w: &'a Weight<2>,
    ids: usize,
    chunk: usize,
    cx: &'a OpCx,
}

impl<'a> ChunkedHead<'a> {
    fn new(x: &Tensor<3>, w: &'a Weight<2>, ids: usize, cx: &'a OpCx) -> Self {
        let [b, s, _] = x.dims();
        let shape = w.shape();
        assert!(ids <= shape[0], "{ids} token ids, but the head has {} rows", shape[0]);
        let on_kernels = is_fast(x) || halves(x).is_some();
        let chunk = head_chunk(b * s, shape, x.dtype().size(), on_kernels);
        let chunk = CHUNK.get().unwrap_or(chunk);
        Self { w, ids, chunk, cx }
    }

    /// The divisor of the loss of `n` tokens.
    fn divisor(&self, n: usize) -> f64 {
        self.cx.masks.scored.unwrap_or(n as f64)
    }

    fn known(&self, targets: Tensor<2, Int>) -> Vec<usize> {
        loss::known_targets(targets, self.ids, self.cx.masks.scored.is_some())
    }

    /// The chunks of `n` tokens, first tokens first.
    fn chunks(&self, n: usize) -> impl Iterator<Item = Range<usize>> {
        let chunk = self.chunk.max(1);
        (0..n.div_ceil(chunk)).map(move |i| i * chunk..n.min((i + 1) * chunk))
    }

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

    fn on_host(&self, x: &[f32], targets: &[usize], mut grads: Option<HostGrads>) -> Tensor<1> {
        let ([_, h], ids, n) = (self.w.shape(), self.ids, targets.len());
        let w = self.w.get();
        let w = fast(&w).expect("as x");
        let w = MatRef::new(w.as_slice(), ids, h);
        let _held = self.cx.workspace(self.chunk * ids * size_of::<f32>());
        let mut sum = 0.0;
        for tokens in self.chunks(n) {
            let (c, targets) = (tokens.len(), &targets[tokens.clone()]);
            let x_rows = &x[tokens.start * h..tokens.end * h];
            // Fresh vectors: a product writes them whole, so that they need not be zeroed.
            let mut logits = product(1.0, MatRef::new(x_rows, c, h), w.t());
            let Some(grads) = &mut grads else {
                sum += kernels::cross_entropy(&logits, ids, targets);
                continue;
            };
            sum += kernels::cross_entropy_gradient(&mut logits, ids, targets, grads.weight);
            let dx = product(1.0, MatRef::new(&logits, c, ids), w);
            match c == n {
                true => *grads.dx = dx,
                false => grads.dx.extend_from_slice(&dx),
            }
            let Some(dw) = &mut grads.dw else { continue };
            // As many rows at a time as stay in the cache, as for any weight.
            let block = row_block(ids * h);
            for (x, slope) in x_rows.chunks(block * h).zip(logits.chunks(block * ids)) {
                let n = x.len() / h;
                let (x, slope) = (MatRef::new(x, n, h), MatRef::new(slope, n, ids));
                gemm(MatMut::new(dw, ids, h), StoreMode::Add, 1.0, slope.t(), x);
            }
        }
        loss::mean(sum, self.divisor(n))
    }

    /// The same in bf16: logits, loss and sums in fp32, the factors of products in bf16. The
    /// weight is packed some rows at a time.
    fn in_halves(
        &self,
        x: &Tensor<3>,
        targets: Tensor<2, Int>,
        sink: Option<&ForwardGrads>,
    ) -> (Tensor<1>, Option<Saved<3>>) {
        let (dims, targets) = (x.dims(), self.known(targets));
        let ([_, h], ids, n) = (self.w.shape(), self.ids, targets.len());
        let (x, w) = (halves(x).expect("checked by the caller"), self.w.get());
        let (x, w) = (x.as_slice(), halves(&w).expect("as x"));
        let w = &w.as_slice()[..ids * h];
        let _logits = self.cx.workspace(self.chunk * ids * logit_bytes(2, true));
        let held = sink.map(|_| self.cx.workspace(size_of_val(x)));
        let (mut sum, mut dx) = (0.0, Vec::new());
        for tokens in self.chunks(n) {
            let (c, targets) = (tokens.len(), &targets[tokens.clone()]);
            let x = Mat::new(&x[tokens.start * h..tokens.end * h], c, h);
            let mut logits = vec![0.0; c * ids];
            self.each_part(Side::Forward, w, |rows, w| {
                bf16::product_set(&mut logits[rows.start..], ids, x, w);
            });
            let Some(sink) = sink else {
                sum += kernels::cross_entropy(&logits, ids, targets);
                continue;
            };
            let weight = sink.loss_scale / self.divisor(n) as f32;
            sum += kernels::cross_entropy_gradient(&mut logits, ids, targets, weight);
            let slope = bf16::convert::narrow(&logits);
            drop(logits);
            let mut sums = vec![0.0; c * h];
            self.each_part(Side::Backward, w, |rows, w| {
                let slope = Mat::strided(&slope[rows.start..], c, rows.len(), ids);
                bf16::add_product(&mut sums, h, slope, w);
            });
            dx.extend(bf16::convert::narrow(&sums));
            if !self.w.trains() {
                continue;
            }
            let mut grads = sink.grads.lock();
            let dw = grads.host_mut(self.w.slot()).expect("on the CPU");
            bf16::add_product(dw, h, Mat::new(&slope, c, ids).t(), &Packed::new(x));
        }
        drop(held);
        let dx = sink.map(|_| self.cx.save(cpu_tensor::from_halves(dx, dims)));
        (loss::mean(sum, self.divisor(n)), dx)
    }

    /// Calls `f` with the rows of the bf16 weight, some after others, and how products on `side`
    /// read them: kept, or packed anew each time.
    fn each_part(&self, side: Side, w: &[Half], mut f: impl FnMut(Range<usize>, &Packed)) {
        let [_, h] = self.w.shape();
        let pack = |rows: &[Half]| {
            let m = Mat::new(rows, rows.len() / h, h);
            Packed::new(if side == Side::Forward { m.t() } else { m })
        };
        let kept = self
            .w
            .keeps_packed()
            .then(|| self.w.packed(side, || w.chunks(PACKED_ROWS * h).map(pack).collect()));
        for (i, part) in w.chunks(PACKED_ROWS * h).enumerate() {
            let rows = i * PACKED_ROWS..i * PACKED_ROWS + part.len() / h;
            match &kept {
                Some(kept) => f(rows, &kept[i]),
                None => f(rows, &pack(part)),
            }
        }
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
            let logits = self.without_padding(x.clone().matmul(w.clone().transpose()));
            let (sum, slope) = loss::of_rows(logits, targets, masked, weight);
            total = Some(match total.take() {
                Some(total) => total + sum,
                None => sum,
            });
            if let (Some(sink), Some(slope)) = (sink, slope) {
                dxs.push(slope.clone().matmul(w.clone()));
                if self.w.trains() {
                    let dw = products::matmul_f32(slope.transpose(), x);
                    sink.grads.lock().add(self.w.slot(), dw);
                }
            }
        }
        drop(held);
        let dx = sink.map(|_| self.cx.save(Tensor::cat(dxs, 0).reshape(dims)));
        (total.expect("a micro-batch has tokens") / divisor, dx)
    }

    /// Logits of rows that are no token ids, so low that nothing of them is left in any sum.
    fn without_padding(&self, logits: Tensor<2>) -> Tensor<2> {
        let [c, rows] = logits.dims();
        if rows == self.ids {
            return logits;
        }
        let low = Tensor::full([c, rows - self.ids], -1e30, (&logits.device(), logits.dtype()));
        logits.slice_assign([0..c, self.ids..rows], low)
    }
}

/// Where the gradients of a head on the CPU go.
struct HostGrads<'a> {
    /// Of x, `[n, h]`; empty at first.
    dx: &'a mut Vec<f32>,
    /// Of the weight, `[V, h]`; added to. None where it does not train.
    dw: Option<&'a mut [f32]>,
    /// Factor on every token's loss.
    weight: f32,
}
