//! The operations that models are made of.
//!
//! Each takes and returns ordinary tensors, `x: [b, s, h]` unless it says otherwise, and weights
//! as handles. The forward runs on plain tensors, with the same kernel whether gradients are
//! wanted or not, so that recomputation repeats it bit for bit. Tensors on the CPU take the kernels
//! of [`crate::kernels`], in fp32 or bf16; everything else takes tensor operations, with fused
//! kernels where a GPU profits (feature `cube`).
//!
//! Every operation's documentation says what it keeps: *F→B* counts as activation memory, *B→W*
//! as weight stash. A tensor that two operations keep (an input) counts once. What is kept for the
//! gradient of a weight alone is not kept where that weight does not train. With selective
//! recomputation ([`OpCx::makers`]) an input is not kept from F to B that its operation *can make
//! again*: B makes it when it first needs it, and W has it from there.

mod activation;
mod adapter;
mod attention;
mod columns;
mod dropout;
mod embedding;
mod experts;
mod gated;
mod head;
mod head_norm;
mod join;
mod linear;
mod loss;
mod norm;
mod position;
#[doc(hidden)]
pub mod products;
mod projections;

use std::cell::Cell;
use std::sync::Arc;

use burn::tensor::{DType, Tensor, bf16};

pub use activation::{gelu, gelu_tanh, silu, swiglu};
pub(crate) use adapter::add_scaled;
pub use attention::{attention, dropout_attention, grouped_attention, windowed_attention};
pub use dropout::dropout;
pub use embedding::{embedding, position_embedding};
pub use experts::{Routed, Router, Routing, Score, experts, route};
pub use gated::gated;
#[doc(hidden)]
pub use head::force_head_chunk;
pub use head::{
    HeadSlice, SliceLogits, SplitHead, head_chunk, input_gradient, join_sums, linear_cross_entropy,
    sums_len,
};
pub use head_norm::{HeadNorms, head_norm};
pub use join::{add, add_last, join};
pub use linear::{linear, linear_transposed};
pub use loss::cross_entropy;
pub use norm::{layer_norm, rms_norm};
pub use position::{Rotation, rope};
pub(crate) use projections::turned;
pub use projections::{Projection, Turns, projections};

use super::context::SliceVectors;
use super::vjp::is_tracked;
use super::{OpCx, Saved, WQueue, Weight, custom_source, custom_vjp};
use crate::cpu_tensor::{self, CpuTensor};
use crate::meter::{MemoryKind, Meter};

thread_local! {
    static GENERIC: Cell<bool> = const { Cell::new(false) };
    static BLOCKS: Cell<bool> = const { Cell::new(false) };
}

/// Makes the operations of this thread take the path of tensor operations even where there are
/// kernels. For tests of that path.
#[doc(hidden)]
pub fn force_generic(on: bool) {
    GENERIC.set(on);
}

/// Makes attention of this thread go by blocks of queries even where a GPU has fused kernels. For
/// tests of that path and for benches beside it.
#[doc(hidden)]
pub fn force_blocks(on: bool) {
    BLOCKS.set(on);
}

/// Whether attention does without fused kernels.
#[cfg(feature = "cube")]
fn takes_blocks() -> bool {
    GENERIC.get() || BLOCKS.get()
}

/// The elements of `t` if the CPU kernels can work on it.
fn fast<const D: usize>(t: &Tensor<D>) -> Option<CpuTensor> {
    if GENERIC.get() { None } else { cpu_tensor::on_cpu(t) }
}

/// The elements of `t` if the CPU's bf16 kernels can work on it.
fn halves<const D: usize>(t: &Tensor<D>) -> Option<CpuTensor<bf16>> {
    if GENERIC.get() { None } else { cpu_tensor::halves_on_cpu(t) }
}

/// Whether the CPU kernels can work on `t`.
fn is_fast<const D: usize>(t: &Tensor<D>) -> bool {
    !GENERIC.get() && t.dtype() == DType::F32 && cpu_tensor::storage_id(t).is_some()
}

/// Whether the kernels of [`crate::cube`] can work on `t`.
#[cfg(feature = "cube")]
fn on_gpu<const D: usize>(t: &Tensor<D>) -> bool {
    !GENERIC.get() && crate::cube::is_on(t)
}

/// The part of an [`OpCx`] that pullbacks need; it holds nothing of the graph.
struct Later {
    queue: WQueue,
    meter: Arc<Meter>,
}

impl Later {
    fn new(cx: &OpCx) -> Self {
        Self { queue: cx.queue.clone(), meter: cx.meter.clone() }
    }

    fn stash<const D: usize>(&self, t: Tensor<D>) -> Saved<D> {
        Saved::new(t, MemoryKind::WeightStash, &self.meter)
    }

    /// Queues the addition of the already computed gradient of a weight, if that trains.
    fn queue_add(&self, weight: &Weight<1>, g: Tensor<1>) {
        if !weight.trains() {
            return;
        }
        let (slot, g) = (weight.slot(), self.stash(g));
        self.queue.push(move |grads| grads.add(slot, g.take()));
    }
}

/// The gradients of vectors that are sums over tokens, of one operation in one forward: where
/// samples are cut into slices, the B of one goes on with what that of the slice behind it has.
struct VectorSums<const N: usize> {
    weights: [Weight<1>; N],
    slice: Option<SliceVectors<N>>,
    later: Later,
}

impl<const N: usize> VectorSums<N> {
    /// Of these weights. Every forward asks for it, whether gradients are wanted or not.
    fn new(weights: [&Weight<1>; N], cx: &OpCx) -> Self {
        let vectors = weights.map(|w| (w.shape()[0], w.trains()));
        let any = vectors.iter().any(|(_, trains)| *trains);
        let slice = cx.slice.as_ref().filter(|_| any).map(|slice| slice.vectors(vectors));
        Self { weights: weights.map(Clone::clone), slice, later: Later::new(cx) }
    }

    /// What the sums begin with, one vector after the other.
    fn begun(&self) -> Vec<f32> {
        let elements = || self.weights.iter().map(|w| w.shape()[0]).sum();
        self.slice.as_ref().map_or_else(|| vec![0.0; elements()], SliceVectors::begun)
    }

    /// Queues what is of the whole sample, for those that train.
    fn queue(self, sums: [Tensor<1>; N]) {
        let sums = match &self.slice {
            Some(slice) => slice.hand_on(sums),
            None => Some(sums),
        };
        for (weight, sum) in self.weights.iter().zip(sums.into_iter().flatten()) {
            self.later.queue_add(weight, sum);
        }
    }
}

/// Whether a pullback of an operation with weights will run.
fn wants_gradient<const D: usize>(x: &Tensor<D>, cx: &OpCx) -> bool {
    is_tracked(x) || cx.tracked()
}

/// Links `out` to `x`, or, where only weight gradients are wanted, to the token.
fn link<const DX: usize, const DY: usize>(
    x: Tensor<DX>,
    out: Tensor<DY>,
    cx: &OpCx,
    pull: impl FnOnce(Tensor<DY>) -> Tensor<DX> + Send + 'static,
) -> Tensor<DY> {
    if is_tracked(&x) {
        return custom_vjp(x, out, pull);
    }
    drop(x);
    custom_source(&cx.token, out, move |dy| drop(pull(dy)))
}

/// `x` as a matrix of rows of its last dimension.
fn rows<const D: usize>(x: Tensor<D>) -> Tensor<2> {
    let last = x.dims()[D - 1];
    let n = x.shape().num_elements() / last.max(1);
    x.reshape([n, last])
}

/// A vector of row statistics or column sums as a row or column of a matrix, in `f32`.
fn row_vector(v: Tensor<1>) -> Tensor<2> {
    v.cast(DType::F32).unsqueeze()
}
