//! The head by the CPU's kernels, in blocks of the vocabulary: a product for each block, whose
//! shape follows from sizes alone, and sums over blocks in one order.

use std::borrow::Cow;
use std::ops::Range;

use burn::tensor::{Int, Tensor, bf16 as Half};
use zeropp_model::head::{block_rows, workspace_bytes};

use super::super::{fast, halves};
use super::chunks::ChunkedHead;
use crate::cpu_tensor;
use crate::kernels::bf16::{self, Mat, Packed};
use crate::kernels::gemm::{MatMut, MatRef, StoreMode, add_by_blocks, gemm, product};
use crate::kernels::head::{BlockLogits, TreeSum, cross_entropy, totals};
use crate::kernels::tokens;
use crate::meter::Hold;
use crate::split::weight::Side;
use crate::split::{ForwardGrads, Saved};

/// Where the gradients of a head in fp32 go.
pub(crate) struct HostGrads<'a> {
    /// Of x, `[n, h]`; empty at first.
    pub(crate) dx: &'a mut Vec<f32>,
    /// Of the weight, `[V, h]`; added to. None where it does not train.
    pub(crate) dw: Option<&'a mut [f32]>,
    /// Factor on every token's loss.
    pub(crate) weight: f32,
}

impl ChunkedHead<'_> {
    pub(crate) fn on_host(
        &self,
        x: &[f32],
        targets: &[usize],
        mut grads: Option<HostGrads>,
    ) -> Tensor<1> {
        let ([_, h], n) = (self.w.shape(), targets.len());
        let w = self.w.get();
        let w = fast(&w).expect("as x");
        let w = w.as_slice();
        let _held = self.chunk_workspace(size_of::<f32>());
        let mut sum = self.begun();
        for tokens in self.chunks(n) {
            let (c, targets) = (tokens.len(), &targets[tokens.clone()]);
            let x = &x[tokens.start * h..tokens.end * h];
            let logits = self.logits_of(w, x, Cow::Borrowed(targets));
            let totals = totals(logits.sums());
            sum = cross_entropy(sum, &totals, logits.chosen(), targets);
            let Some(grads) = &mut grads else { continue };
            let mut dx = TreeSum::default();
            for (block, slope) in self.row_blocks().zip(logits.slopes(&totals, grads.weight)) {
                self.add_input_gradient(&mut dx, w, block.clone(), &slope, c);
                if let Some(dw) = &mut grads.dw {
                    let dw = &mut dw[block.start * h..block.end * h];
                    add_weight_gradient(dw, &slope, x, h);
                }
            }
            match c == n {
                true => *grads.dx = dx.done(),
                false => grads.dx.extend(dx.done()),
            }
        }
        self.loss(sum, n)
    }

    /// The logits of a chunk of tokens `x: [c, h]` for its own blocks.
    pub(crate) fn logits_of<'t>(
        &self,
        w: &[f32],
        x: &[f32],
        targets: Cow<'t, [usize]>,
    ) -> BlockLogits<'t> {
        let (c, [_, h]) = (targets.len(), self.w.shape());
        let mut logits = BlockLogits::new(targets, self.first_id());
        for block in self.row_blocks() {
            let rows = MatRef::new(&w[block.start * h..block.end * h], block.len(), h);
            logits.push(product(1.0, MatRef::new(x, c, h), rows.t()));
        }
        logits
    }

    /// Adds the next block's gradient of the input, for its `slope: [c, rows]`.
    pub(crate) fn add_input_gradient(
        &self,
        sum: &mut TreeSum,
        w: &[f32],
        block: Range<usize>,
        slope: &[f32],
        c: usize,
    ) {
        let [_, h] = self.w.shape();
        let w = MatRef::new(&w[block.start * h..block.end * h], block.len(), h);
        let slope = MatRef::new(slope, c, block.len());
        sum.add(c * h, |dx| gemm(MatMut::new(dx, c, h), StoreMode::Set, 1.0, slope, w));
    }

    /// The first id of its own blocks.
    pub(crate) fn first_id(&self) -> usize {
        self.id_blocks().next().map_or(0, |block| block.start)
    }

    /// The same in bf16: logits, loss and sums in fp32, the factors of products in bf16.
    pub(crate) fn in_halves(
        &self,
        x: &Tensor<3>,
        targets: Tensor<2, Int>,
        sink: Option<&ForwardGrads>,
    ) -> (Tensor<1>, Option<Saved<3>>) {
        let (dims, targets) = (x.dims(), self.known(targets));
        let ([_, h], n) = (self.w.shape(), targets.len());
        let (x, w) = (halves(x).expect("checked by the caller"), self.w.get());
        let (x, w) = (x.as_slice(), halves(&w).expect("as x"));
        let w = &w.as_slice()[..self.rows() * h];
        let _held = self.chunk_workspace(size_of::<Half>());
        let held = sink.map(|_| self.cx.workspace(size_of_val(x)));
        let (mut sum, mut dx) = (self.begun(), Vec::new());
        for tokens in self.chunks(n) {
            let (c, targets) = (tokens.len(), &targets[tokens.clone()]);
            let x = Mat::new(&x[tokens.start * h..tokens.end * h], c, h);
            let logits = self.logits_of_halves(w, x, Cow::Borrowed(targets));
            let totals = totals(logits.sums());
            sum = cross_entropy(sum, &totals, logits.chosen(), targets);
            let Some(sink) = sink else { continue };
            let weight = sink.loss_scale / self.divisor(n) as f32;
            let right = self.w.trains().then(|| Packed::new(x));
            let (mut sums, mut slopes) = (TreeSum::default(), logits.slopes(&totals, weight));
            self.each_block(Side::Backward, w, |block, w| {
                let slope = slopes.next().expect("one of each block");
                let slope = bf16::convert::narrow(&slope);
                let slope = Mat::new(&slope, c, block.len());
                sums.add(c * h, |sums| bf16::product_set(sums, h, slope, w));
                let Some(x) = &right else { return };
                let mut grads = sink.grads.lock();
                let dw = grads.host_mut(self.w.slot()).expect("on the CPU");
                bf16::add_product(&mut dw[block.start * h..block.end * h], h, slope.t(), x);
            });
            dx.extend(bf16::convert::narrow(&sums.done()));
        }
        drop(held);
        let dx = sink.map(|_| self.cx.save(cpu_tensor::from_halves(dx, dims)));
        (self.loss(sum, n), dx)
    }

    /// The logits of a chunk of tokens `x: [c, h]` for its own blocks.
    pub(crate) fn logits_of_halves<'t>(
        &self,
        w: &[Half],
        x: Mat,
        targets: Cow<'t, [usize]>,
    ) -> BlockLogits<'t> {
        let c = targets.len();
        let mut logits = BlockLogits::new(targets, self.first_id());
        self.each_block(Side::Forward, w, |block, w| {
            let mut of_block = vec![0.0; c * block.len()];
            bf16::product_set(&mut of_block, block.len(), x, w);
            logits.push(of_block);
        });
        logits
    }

    /// Rows of the weight that are token ids.
    pub(crate) fn rows(&self) -> usize {
        self.row_blocks().map(|block| block.len()).sum()
    }

    /// Calls `f` with each block of the bf16 weight, in order, and how products on `side` read its
    /// rows: kept, or packed anew each time.
    pub(crate) fn each_block(
        &self,
        side: Side,
        w: &[Half],
        mut f: impl FnMut(Range<usize>, &Packed),
    ) {
        let [_, h] = self.w.shape();
        let rows = block_rows(self.ids);
        let pack = |rows: &[Half]| {
            let m = Mat::new(rows, rows.len() / h, h);
            Packed::new(if side == Side::Forward { m.t() } else { m })
        };
        let kept = self
            .w
            .keeps_packed()
            .then(|| self.w.packed(side, || w.chunks(rows * h).map(pack).collect()));
        for (i, block) in self.row_blocks().enumerate() {
            match &kept {
                Some(kept) => f(block, &kept[i]),
                None => f(block.clone(), &pack(&w[block.start * h..block.end * h])),
            }
        }
    }

    /// Counts what a chunk takes: with and without gradients the same, as plans do.
    fn chunk_workspace(&self, element_bytes: usize) -> Hold {
        let hidden = self.w.shape()[1];
        self.cx.workspace(workspace_bytes(self.chunk, self.ids, hidden, element_bytes))
    }
}

/// Adds a block's slopeᵀ·x to `dw: [rows, h]`, for `slope: [c, rows]` and `x: [c, h]`: first tokens
/// first, as F comes.
pub(crate) fn add_weight_gradient(dw: &mut [f32], slope: &[f32], x: &[f32], h: usize) {
    let (rows, n) = (dw.len() / h, x.len() / h);
    let (x, slope) = (MatRef::new(x, n, h), MatRef::new(slope, n, rows));
    add_by_blocks(dw, slope, x, tokens::blocks(n));
}
