//! Slices of a head by tensor operations, for GPUs: a product for all rows of a slice, whose sums
//! over the vocabulary are those of its blocks within rounding.
//!
//! Shapes as in `slice.rs`; c tokens in a chunk, r rows of the slice, of which those that are no
//! ids are behind the others.

use std::ops::Range;

use burn::tensor::{DType, Int, Tensor};
use zeropp_model::head::{SliceShape, block_rows};

use super::super::{products, rows};
use super::chunks::ChunkedHead;
use crate::split::{Masks, NOT_SCORED};

/// What B takes of the logits.
pub(super) struct DeviceLogits {
    /// Of each chunk, `[c, r]`.
    logits: Vec<Tensor<2>>,
    /// Within the slice, `[n]`; of a token that is not scored any.
    targets: Tensor<1, Int>,
    /// 1 for tokens that are scored, else 0, `[n]`; none where all are.
    scored: Option<Tensor<1>>,
}

/// `targets: [b, s]` in one row.
fn flat(targets: Tensor<2, Int>) -> Tensor<1, Int> {
    let [b, s] = targets.dims();
    targets.reshape([b * s])
}

/// 1 for the tokens that are scored, else 0.
fn scored(targets: &Tensor<1, Int>) -> Tensor<1> {
    targets.clone().equal_elem(NOT_SCORED).bool_not().float().cast(DType::F32)
}

/// The logits of a slice's rows `w: [r, h]` for `x: [b, s, h]`, and the sums of its blocks.
pub(super) fn forward(
    head: &ChunkedHead,
    shape: &SliceShape,
    x: Tensor<3>,
    w: &Tensor<2>,
    targets: Tensor<2, Int>,
) -> (Tensor<1>, DeviceLogits) {
    let (x, targets) = (rows(x), flat(targets));
    let n = x.dims()[0];
    let ids = shape.own_ids();
    let scored = head.cx.masks.scored.map(|_| scored(&targets));
    let targets = targets.sub_scalar(ids.start as i64);
    let is_here = targets.clone().greater_equal_elem(0);
    let is_here = is_here.bool_and(targets.clone().lower_elem(ids.len() as i64));
    let (mut tops, mut all, mut chosen) = (Vec::new(), Vec::new(), Vec::new());
    let mut logits_of = Vec::new();
    for tokens in head.chunks(n) {
        let (from, c) = (tokens.start, tokens.len());
        let logits = products::matmul(x.clone().narrow(0, from, c), w.clone().transpose());
        let logits = without_padding(logits, ids.len());
        let at = targets.clone().narrow(0, from, c).clamp(0, ids.len() as i64 - 1);
        let of_target = logits.clone().gather(1, at.reshape([c, 1])).cast(DType::F32).reshape([c]);
        let elsewhere = is_here.clone().narrow(0, from, c).bool_not();
        chosen.push(of_target.mask_fill(elsewhere, 0.0));
        let (top, sum) = of_blocks(logits.clone(), shape);
        tops.push(top);
        all.push(sum);
        logits_of.push(logits);
    }
    let k = shape.blocks.len();
    let both = [tops, all].map(|of| Tensor::cat(of, 0).transpose().reshape([k, 1, n]));
    let both: Tensor<3> = Tensor::cat(Vec::from(both), 1);
    let sums = Tensor::cat(vec![Tensor::cat(chosen, 0), both.reshape([2 * k * n])], 0);
    (sums, DeviceLogits { logits: logits_of, targets, scored })
}

/// Logits of rows that are no ids, so low that nothing of them is left in any sum.
pub(super) fn without_padding(logits: Tensor<2>, ids: usize) -> Tensor<2> {
    let [c, rows] = logits.dims();
    if rows == ids {
        return logits;
    }
    let low = Tensor::full([c, rows - ids], -1e30, (&logits.device(), logits.dtype()));
    logits.slice_assign([0..c, ids..rows], low)
}

/// The largest logits of each block and the sums of exponentials beside them, `[c, k]` in fp32.
fn of_blocks(logits: Tensor<2>, shape: &SliceShape) -> (Tensor<2>, Tensor<2>) {
    let [c, r] = logits.dims();
    let (k, rows) = (shape.blocks.len(), block_rows(shape.ids));
    // The last block has fewer rows, or padding behind them.
    let even = if r == k * rows { k } else { k - 1 };
    let of = |part: Tensor<2>, blocks: usize| {
        let part = part.cast(DType::F32);
        let each = part.dims()[1] / blocks;
        let part = part.reshape([c, blocks, each]);
        let top = part.clone().max_dim(2);
        let sum = (part - top.clone()).exp().sum_dim(2);
        [top, sum].map(|of| of.reshape([c, blocks]))
    };
    let mut parts = Vec::new();
    if even > 0 {
        parts.push(of(logits.clone().narrow(1, 0, even * rows), even));
    }
    if even < k {
        parts.push(of(logits.narrow(1, even * rows, r - even * rows), 1));
    }
    let [tops, sums] = [0, 1].map(|i| parts.iter().map(|part| part[i].clone()).collect());
    (Tensor::cat(tops, 1), Tensor::cat(sums, 1))
}

/// From the sums of all blocks: the totals, and the loss.
pub(super) fn totals(
    sums: &Tensor<1>,
    targets: Tensor<2, Int>,
    ids: usize,
    masks: &Masks,
) -> (Tensor<1>, Tensor<1>) {
    let targets = flat(targets);
    let n = targets.dims()[0];
    let k = sums.dims()[0].div_ceil(n) / 2;
    let chosen = sums.clone().narrow(0, 0, n);
    let of_blocks = sums.clone().narrow(0, n, 2 * k * n).reshape([k, 2, n]);
    let [tops, all] = [0, 1].map(|i| of_blocks.clone().narrow(1, i, 1).reshape([k, n]));
    let top = tops.clone().max_dim(0);
    let sum = (all * (tops - top.clone()).exp()).sum_dim(0);
    let [top, sum] = [top, sum].map(|of| of.reshape([n]));
    let mut losses = sum.clone().log() + top.clone() - chosen;
    let mut is_none = targets.clone().greater_equal_elem(ids as i64);
    let mut is_below = targets.clone().lower_elem(0);
    if masks.scored.is_some() {
        losses = losses * scored(&targets);
        is_below = is_below.bool_and(targets.equal_elem(NOT_SCORED).bool_not());
    }
    is_none = is_none.bool_or(is_below);
    let loss = losses.mask_fill(is_none, f32::NAN).sum() / masks.scored.unwrap_or(n as f64);
    (Tensor::cat(vec![top, sum], 0), loss)
}

impl DeviceLogits {
    /// The gradients of the logits, a chunk after the other in the type of `w`, and those of x,
    /// `[n·h]` in fp32, for each of the slice's sums; `scale` is the factor on every token's loss.
    pub(super) fn backward(
        self,
        totals: &Tensor<1>,
        scale: f32,
        w: &Tensor<2>,
        shape: &SliceShape,
    ) -> (Vec<Tensor<2>>, Vec<Tensor<1>>) {
        let n = totals.dims()[0] / 2;
        let [tops, sums] = [0, n].map(|from| totals.clone().narrow(0, from, n));
        let mut factors = Tensor::full([n], scale, (&sums.device(), DType::F32));
        if let Some(scored) = self.scored {
            factors = factors * scored;
        }
        let r = w.dims()[0];
        let row = Tensor::<1, Int>::arange(0..r as i64, &w.device());
        let row = row.cast(self.targets.dtype()).reshape([1, r]);
        let mut slopes = Vec::with_capacity(self.logits.len());
        let mut dx = vec![Vec::new(); shape.sums.len()];
        let mut from = 0;
        for logits in self.logits {
            let c = logits.dims()[0];
            let column = |of: &Tensor<1>| of.clone().narrow(0, from, c).reshape([c, 1]);
            let target = self.targets.clone().narrow(0, from, c).reshape([c, 1]);
            let chosen = row.clone().equal(target).float().cast(DType::F32);
            let p = (logits.cast(DType::F32) - column(&tops)).exp() / column(&sums);
            let slope = ((p - chosen) * column(&factors)).cast(w.dtype());
            for (dx, blocks) in dx.iter_mut().zip(&shape.sums) {
                let of = own_rows(shape, blocks);
                let rows = w.clone().narrow(0, of.start, of.len());
                let slope = slope.clone().narrow(1, of.start, of.len());
                dx.push(products::matmul_f32(slope, rows));
            }
            slopes.push(slope);
            from += c;
        }
        let len = n * shape.hidden;
        let dx = dx.into_iter().map(|parts| Tensor::cat(parts, 0).reshape([len]));
        (slopes, dx.collect())
    }
}

/// The rows of some blocks within the slice: token ids alone.
fn own_rows(shape: &SliceShape, blocks: &Range<usize>) -> Range<usize> {
    let of = SliceShape { blocks: blocks.clone(), ..shape.clone() }.own_ids();
    let first = shape.own_ids().start;
    of.start - first..of.end - first
}
