//! Some blocks of a head's rows, computed apart from the others. A slice sees rows, never ranks:
//! with those of all slices in order, each bit by the CPU's kernels is that of the whole head.
//!
//! Shapes: n = b·s tokens, h hidden. Messages are flat and in fp32: `sums` of k blocks are the
//! logits of the targets (0 where no block of them has it) `[n]`, and for each block the largest
//! logits `[n]` and the sums of exponentials `[n]`; `totals` are these two for all blocks.

use std::borrow::Cow;
use std::ops::Range;

use burn::tensor::{DType, Int, Tensor, bf16 as Half};
use zeropp_model::head::{SliceShape, blocks};
use zeropp_model::layer::{BatchShape, LayerCost};
use zeropp_model::params::ParamSpec;

use super::super::{fast, halves, is_fast, loss, products, rows};
use super::blocks::add_weight_gradient;
use super::chunks::{ChunkedHead, chunks, forced_chunk};
use super::tensors::{self, DeviceLogits};
use crate::cpu_tensor;
use crate::kernels::bf16::{self, Mat, Packed};
use crate::kernels::head::{BlockLogits, ExpSum, TreeSum, cross_entropy, totals};
use crate::meter::{Hold, MemoryKind};
use crate::split::weight::Side;
use crate::split::{Grads, Masks, OpCx, ParamSlot, Saved, Weight};

/// A head that is x·Wᵀ and its cross-entropy, so that its rows can be shared.
#[derive(Clone, Debug, PartialEq)]
pub struct SplitHead {
    /// Its name in the model.
    pub name: String,
    /// Its weight, `[V, h]`.
    pub weight: ParamSpec,
    /// How many of the rows are token ids, from the first on.
    pub ids: usize,
}

impl SplitHead {
    /// The blocks that its rows are cut into.
    pub fn blocks(&self) -> usize {
        blocks(self.ids).len()
    }

    /// Some of them, which make a sum of gradients for each of `sums`.
    pub fn slice(&self, blocks: Range<usize>, sums: Vec<Range<usize>>) -> HeadSlice {
        let [rows, hidden] = self.weight.shape[..] else { panic!("a head's weight is a matrix") };
        let shape = SliceShape { ids: self.ids, rows, hidden, blocks, sums };
        let weight = self.weight.rows(shape.own_rows());
        let Range { start, end } = shape.own_rows();
        HeadSlice { name: format!("{}[{start}..{end}]", self.name), weight, shape }
    }

    /// From the sums of all blocks: the totals, and the loss, shape `[1]`, of `targets: [b, s]`,
    /// which are some of a micro-batch's `tokens`. `sum` is that over those before, of slices of
    /// the same sample, which the loss has too; it gets these added.
    ///
    /// # Panics
    /// Panics as the whole head's; also on a GPU if they are not all of the micro-batch.
    pub fn loss(
        &self,
        sums: &Tensor<1>,
        targets: Tensor<2, Int>,
        masks: &Masks,
        tokens: usize,
        sum: &mut f64,
    ) -> (Tensor<1>, Tensor<1>) {
        let Some(values) = fast(sums) else {
            assert_eq!(tokens, targets.shape().num_elements(), "slices of samples are for the CPU");
            return tensors::totals(sums, targets, self.ids, masks);
        };
        let targets = loss::known_targets(targets, self.ids, masks.scored.is_some());
        let n = targets.len();
        let (chosen, of_blocks) = values.as_slice().split_at(n);
        let of_blocks: Vec<_> = of_blocks.chunks(2 * n).map(exp_sums).collect();
        let totals = totals(of_blocks.iter().map(|sums| &sums[..]));
        *sum = cross_entropy(*sum, &totals, chosen, &targets);
        let loss = loss::mean(*sum, masks.scored.unwrap_or(tokens as f64));
        let mut flat = Vec::with_capacity(2 * n);
        put_exp_sums(&mut flat, &totals);
        (cpu_tensor::from_vec(flat, [2 * n]), loss)
    }
}

/// The sums of the blocks of all `parts`, of `n` tokens each: those of the first blocks come first.
pub fn join_sums(parts: &[Tensor<1>], n: usize) -> Tensor<1> {
    let Some(parts) = parts.iter().map(fast).collect::<Option<Vec<_>>>() else {
        let (chosen, sums): (Vec<_>, Vec<_>) = parts
            .iter()
            .map(|part| {
                let sums = part.dims()[0] - n;
                (part.clone().narrow(0, 0, n), part.clone().narrow(0, n, sums))
            })
            .unzip();
        let chosen = chosen.into_iter().reduce(|a, b| a + b);
        return Tensor::cat(chosen.into_iter().chain(sums).collect(), 0);
    };
    let mut chosen = vec![0.0; n];
    let mut all = Vec::with_capacity(parts.iter().map(|part| part.as_slice().len()).sum());
    for part in &parts {
        // One block has a token's target, and its logit is 0 in all others.
        crate::kernels::add(&mut chosen, &part.as_slice()[..n]);
    }
    all.extend(chosen);
    parts.iter().for_each(|part| all.extend(&part.as_slice()[n..]));
    let len = all.len();
    cpu_tensor::from_vec(all, [len])
}

/// Elements of the sums of so many blocks, for `n` tokens.
pub fn sums_len(n: usize, blocks: usize) -> usize {
    n * (2 * blocks + 1)
}

/// The gradient of x from its sum over all blocks, in the type of x.
pub fn input_gradient(sum: Tensor<1>, dtype: DType) -> Tensor<1> {
    if dtype == DType::F32 {
        return sum;
    }
    let Some(values) = fast(&sum) else { return sum.cast(dtype) };
    let halves = bf16::convert::narrow(values.as_slice());
    let len = halves.len();
    cpu_tensor::from_halves(halves, [len])
}

/// Of `[2, n]`: largest logits, then sums.
fn exp_sums(flat: &[f32]) -> Vec<ExpSum> {
    let (tops, sums) = flat.split_at(flat.len() / 2);
    tops.iter().zip(sums).map(|(top, sum)| ExpSum { top: *top, sum: *sum }).collect()
}

fn put_exp_sums(flat: &mut Vec<f32>, sums: &[ExpSum]) {
    flat.extend(sums.iter().map(|of| of.top));
    flat.extend(sums.iter().map(|of| of.sum));
}

/// Some blocks of a head.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadSlice {
    name: String,
    /// Its own rows.
    weight: ParamSpec,
    shape: SliceShape,
}

/// What F of a slice keeps for its B.
pub struct SliceLogits {
    x: Saved<3>,
    logits: Logits,
    _hold: Hold,
}

/// Those of chunks of tokens, one after the other.
enum Logits {
    Host(Vec<BlockLogits<'static>>),
    Device(DeviceLogits),
}

/// The gradients of a chunk's logits, a block after the other, as the products take them.
enum Slopes {
    Fp32(Vec<Vec<f32>>),
    Bf16(Vec<Vec<Half>>),
    /// Of all rows.
    Device(Tensor<2>),
}

impl HeadSlice {
    /// The head's name and its rows.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its rows of the head's weight.
    pub fn parameters(&self) -> Vec<ParamSpec> {
        vec![self.weight.clone()]
    }

    /// What it has of the head.
    pub fn shape(&self) -> &SliceShape {
        &self.shape
    }

    /// The cost of a micro-batch.
    pub fn cost(&self, batch: BatchShape) -> LayerCost {
        self.shape.cost(batch, self.weight.trains)
    }

    fn of<'a>(&self, w: &'a Weight<2>, cx: &'a OpCx, chunk: usize) -> ChunkedHead<'a> {
        let SliceShape { ids, ref blocks, .. } = self.shape;
        ChunkedHead { w, ids, own: blocks.clone(), chunk: forced_chunk(chunk), cx }
    }

    /// F for `x: [b, s, h]`, `targets: [b, s]` and its rows `w`: the sums of its blocks, and what B
    /// takes.
    ///
    /// Keeps F→B: x, all logits, on the CPU in fp32, and these sums.
    ///
    /// # Panics
    /// Panics on the CPU if a target that is scored is not below the head's ids; on a GPU the loss
    /// is NaN then.
    pub fn forward(
        &self,
        x: Saved<3>,
        targets: Tensor<2, Int>,
        w: &Weight<2>,
        cx: &OpCx,
    ) -> (Tensor<1>, SliceLogits) {
        let plain = x.get();
        let (n, element) = (tokens_of(&plain), plain.dtype().size());
        let on_kernels = is_fast(&plain) || halves(&plain).is_some();
        let head = self.of(w, cx, self.shape.chunk(n, element, on_kernels));
        let bytes = self.shape.logits_bytes(n, element, on_kernels);
        let hold = cx.meter.hold(MemoryKind::Activation, bytes as u64);
        let (sums, logits) = match on_kernels {
            true => {
                let masked = cx.masks.scored.is_some();
                let targets = loss::known_targets(targets, self.shape.ids, masked);
                let logits = head.host_logits(&plain, &targets);
                let sums = own_sums(&logits, n, self.shape.blocks.len());
                (sums, Logits::Host(logits))
            }
            false => {
                let (sums, logits) = tensors::forward(&head, &self.shape, plain, &w.get(), targets);
                (sums, Logits::Device(logits))
            }
        };
        (sums, SliceLogits { x, logits, _hold: hold })
    }

    /// B: the gradients of x, `[n, h]` in fp32, summed over the blocks of each of the shape's
    /// `sums`, for `totals` of all blocks and `scale` as the factor of the loss. What W does is
    /// queued.
    ///
    /// Keeps B→W: x and the gradients of the logits, in the type of x.
    pub fn backward(
        &self,
        kept: SliceLogits,
        totals: &Tensor<1>,
        scale: f32,
        w: &Weight<2>,
        cx: &OpCx,
    ) -> Vec<Tensor<1>> {
        let SliceLogits { x, logits, _hold: hold } = kept;
        let plain = x.get();
        let (n, element) = (tokens_of(&plain), plain.dtype().size());
        let on_kernels = matches!(logits, Logits::Host(_));
        let held = cx.workspace(self.shape.backward_bytes(n, element, on_kernels));
        let head = self.of(w, cx, self.shape.chunk(n, element, on_kernels));
        let scale = scale / head.divisor(n) as f32;
        let (slopes, sums) = match logits {
            Logits::Host(chunks) => self.host_backward(&head, chunks, totals, scale),
            Logits::Device(logits) => {
                let (slopes, sums) = logits.backward(totals, scale, &w.get(), &self.shape);
                (slopes.into_iter().map(Slopes::Device).collect(), sums)
            }
        };
        drop((held, hold, plain));
        if w.trains() {
            let bytes = n * self.shape.own_ids().len() * element;
            let held = cx.meter.hold(MemoryKind::WeightStash, bytes as u64);
            let x = cx.stash(x.take());
            let (slot, blocks): (_, Vec<_>) = (w.slot(), head.row_blocks().collect());
            let chunk = head.chunk;
            cx.queue.push(move |grads| {
                let (x, _held) = (x.take(), held);
                for (tokens, slopes) in self::chunks(n, chunk).zip(slopes) {
                    add_weights(grads, slot, &blocks, &x, tokens, slopes);
                }
            });
        }
        sums
    }

    /// By the CPU's kernels: the gradients of the logits of each chunk, and the sums of those of x.
    fn host_backward(
        &self,
        head: &ChunkedHead,
        chunks: Vec<BlockLogits<'static>>,
        totals: &Tensor<1>,
        scale: f32,
    ) -> (Vec<Slopes>, Vec<Tensor<1>>) {
        let totals = exp_sums(fast(totals).expect("as the logits").as_slice());
        let (n, h) = (totals.len(), self.shape.hidden);
        let mut sums = OwnSums::new(&self.shape.sums, n * h);
        let weight = head.w.get();
        let mut slopes = Vec::with_capacity(chunks.len());
        for (tokens, logits) in head.chunks(n).zip(chunks) {
            let of_blocks = logits.slopes(&totals[tokens.clone()], scale);
            slopes.push(match (fast(&weight), halves(&weight)) {
                (Some(w), _) => {
                    let w = w.as_slice();
                    Slopes::Fp32(head.backward_of(w, of_blocks, tokens.len(), &mut sums))
                }
                (_, Some(w)) => {
                    let w = &w.as_slice()[..head.rows() * h];
                    Slopes::Bf16(head.backward_of_halves(w, of_blocks, tokens.len(), &mut sums))
                }
                (None, None) => unreachable!("the weight is where the logits are"),
            });
        }
        (slopes, sums.done())
    }
}

fn tokens_of(x: &Tensor<3>) -> usize {
    let [b, s, _] = x.dims();
    b * s
}

/// The message of a slice's own sums.
fn own_sums(chunks: &[BlockLogits], n: usize, blocks: usize) -> Tensor<1> {
    let len = sums_len(n, blocks);
    let mut flat = vec![0.0; len];
    let mut first = 0;
    for logits in chunks {
        let chosen = logits.chosen();
        flat[first..first + chosen.len()].copy_from_slice(chosen);
        for (block, sums) in logits.sums().enumerate() {
            let tops = n * (2 * block + 1) + first;
            for (i, of) in sums.iter().enumerate() {
                flat[tops + i] = of.top;
                flat[tops + n + i] = of.sum;
            }
        }
        first += chosen.len();
    }
    cpu_tensor::from_vec(flat, [len])
}

fn on_host(grads: &mut Grads, slot: ParamSlot) -> &mut [f32] {
    grads.host_mut(slot).expect("on the CPU")
}

/// Adds the gradients of a chunk's `tokens` to those of the slice's rows, a block of them after the
/// other.
fn add_weights(
    grads: &mut Grads,
    slot: ParamSlot,
    blocks: &[Range<usize>],
    x: &Tensor<3>,
    tokens: Range<usize>,
    slopes: Slopes,
) {
    let [_, _, h] = x.dims();
    let at = tokens.start * h..tokens.end * h;
    match slopes {
        Slopes::Fp32(slopes) => {
            let (x, dw) = (fast(x).expect("as in F"), on_host(grads, slot));
            for (block, slope) in blocks.iter().zip(slopes) {
                let dw = &mut dw[block.start * h..block.end * h];
                add_weight_gradient(dw, &slope, &x.as_slice()[at.clone()], h);
            }
        }
        Slopes::Bf16(slopes) => {
            let (x, c) = (halves(x).expect("as in F"), tokens.len());
            let (x, dw) = (Packed::new(Mat::new(&x.as_slice()[at], c, h)), on_host(grads, slot));
            for (block, slope) in blocks.iter().zip(slopes) {
                let slope = Mat::new(&slope, c, block.len());
                bf16::add_product(&mut dw[block.start * h..block.end * h], h, slope.t(), &x);
            }
        }
        Slopes::Device(slope) => {
            let x = rows(x.clone()).narrow(0, tokens.start, tokens.len());
            products::add_gradient(grads, slot, None, slope.transpose(), x);
        }
    }
}

/// Sums of gradients over some blocks each, which are made of one chunk of tokens after the other.
struct OwnSums {
    /// How many blocks each is of: together all of the slice, in order.
    blocks: Vec<usize>,
    /// Elements of each.
    len: usize,
    values: Vec<Vec<f32>>,
    /// Which one is made, of how many of its blocks so far.
    at: usize,
    added: usize,
    sum: TreeSum,
}

impl OwnSums {
    fn new(sums: &[Range<usize>], len: usize) -> Self {
        let blocks = sums.iter().map(ExactSizeIterator::len).collect();
        let values = vec![Vec::new(); sums.len()];
        Self { blocks, len, values, at: 0, added: 0, sum: TreeSum::default() }
    }

    /// Lets `add` add the next block of the chunk, or the first one of the next chunk.
    fn add(&mut self, add: impl FnOnce(&mut TreeSum)) {
        add(&mut self.sum);
        self.added += 1;
        if self.added < self.blocks[self.at] {
            return;
        }
        let (sum, values) = (std::mem::take(&mut self.sum).done(), &mut self.values[self.at]);
        match sum.len() == self.len {
            true => *values = sum,
            false => {
                values.reserve_exact(self.len - values.len());
                values.extend(sum);
            }
        }
        (self.at, self.added) = ((self.at + 1) % self.blocks.len(), 0);
    }

    fn done(self) -> Vec<Tensor<1>> {
        let len = self.len;
        self.values.into_iter().map(|values| cpu_tensor::from_vec(values, [len])).collect()
    }
}

impl ChunkedHead<'_> {
    /// The logits of all chunks of x by the CPU's kernels.
    fn host_logits(&self, x: &Tensor<3>, targets: &[usize]) -> Vec<BlockLogits<'static>> {
        let ([_, h], weight) = (self.w.shape(), self.w.get());
        let of_chunk = |tokens: Range<usize>| {
            let owned: Cow<'static, [usize]> = Cow::Owned(targets[tokens.clone()].to_vec());
            let at = tokens.start * h..tokens.end * h;
            if let Some(x) = fast(x) {
                let w = fast(&weight).expect("as x");
                return self.logits_of(w.as_slice(), &x.as_slice()[at], owned);
            }
            let (x, w) = (halves(x).expect("in one of two types"), halves(&weight).expect("as x"));
            let x = Mat::new(&x.as_slice()[at], tokens.len(), h);
            self.logits_of_halves(&w.as_slice()[..self.rows() * h], x, owned)
        };
        self.chunks(targets.len()).map(of_chunk).collect()
    }

    /// Adds a chunk of `c` tokens to `sums`; gives the gradients of its logits.
    fn backward_of(
        &self,
        w: &[f32],
        slopes: impl Iterator<Item = Vec<f32>>,
        c: usize,
        sums: &mut OwnSums,
    ) -> Vec<Vec<f32>> {
        let blocks = self.row_blocks().zip(slopes);
        let add = |(block, slope): (Range<usize>, Vec<f32>)| {
            sums.add(|sum| self.add_input_gradient(sum, w, block, &slope, c));
            slope
        };
        blocks.map(add).collect()
    }

    /// The same in bf16.
    fn backward_of_halves(
        &self,
        w: &[Half],
        mut slopes: impl Iterator<Item = Vec<f32>>,
        c: usize,
        sums: &mut OwnSums,
    ) -> Vec<Vec<Half>> {
        let ([_, h], mut kept) = (self.w.shape(), Vec::new());
        self.each_block(Side::Backward, w, |block, w| {
            let slope = bf16::convert::narrow(&slopes.next().expect("one of each block"));
            let of_block = Mat::new(&slope, c, block.len());
            sums.add(|sum| sum.add(c * h, |dx| bf16::product_set(dx, h, of_block, w)));
            kept.push(slope);
        });
        kept
    }
}
