//! A backward in two halves: B computes the gradient of a layer's input at once, W computes the
//! gradients of its weights later, when the schedule says so.
//!
//! Every operation takes and returns ordinary tensors. On a tracked input it puts one
//! [`custom_vjp`] node into Burn's graph, or on the tape of a [`Recording`]; the pullback returns
//! the input gradient and queues a closure for W. Weights are never tracked: they come as
//! [`Weight`] handles that are resolved at F and again at B, so that a gathered buffer can be freed
//! in between.

mod away;
mod context;
mod dropout;
mod masks;
pub(crate) mod on_devices;
pub mod ops;
mod queue;
mod recording;
mod router;
mod slot;
mod storage;
mod tape;
mod vjp;
mod weight;

pub use away::{AwayPlace, AwayTensor, AwayTensors, Vault};
pub use context::{SampleContext, SliceCx};
pub use dropout::{Dropout, DropoutPlace};
pub use masks::{Documents, Masks, NOT_SCORED};
#[cfg(feature = "cube")]
pub(crate) use queue::GradientPlace;
pub use queue::{ForwardGrads, Grads, ParamSlot, WQueue, is_finite};
pub use recording::{Recorded, RecordedBy, Recording};
pub use router::{RouterCx, RouterSums, StageRouters};
pub use slot::{Makers, Saved};
pub use tape::begin_layer;
pub use vjp::{Seed, custom_source, custom_vjp, custom_vjp2, custom_vjp3, seed_backward};
pub use weight::{LayerWeights, Weight};

use std::sync::Arc;

use burn::tensor::Tensor;

use crate::meter::{Hold, MemoryKind, Meter};

/// The context of an operation beside its inputs: the queue of W work, the meter, and whether this
/// forward is part of a graph.
#[derive(Clone)]
pub struct OpCx {
    /// Queue of the current stage and micro-batch.
    pub queue: WQueue,
    /// Memory counter of the rank.
    pub meter: Arc<Meter>,
    /// One-element leaf, tracked if gradients are wanted; operations without a tensor input
    /// (embedding) hang on it.
    pub token: Tensor<1>,
    /// With selective recomputation: how B makes again what is not kept. The outputs of norms and
    /// of activation functions are not, nor attention's probabilities.
    pub makers: Option<Makers>,
    /// Notes what is kept, where that is going to leave memory until B needs it.
    pub vault: Option<Vault>,
    /// Whether the operation's output is wanted; else one element stands for all of it, and the
    /// pullback is the same. What takes no context is for outputs that are.
    pub output_wanted: bool,
    /// Where a head adds the weight gradients that it makes in F. `None` where no gradients are
    /// wanted, and for layers that are no head.
    pub forward_grads: Option<ForwardGrads>,
    /// The parts of the micro-batch that attention and the loss may not see, and those that are
    /// dropped.
    pub masks: Masks,
    /// The losses that routers of experts add in B. `None` outside of runs.
    pub routers: Option<RouterCx>,
    /// Which slice of its sample the micro-batch is, where samples are cut into slices.
    pub slice: Option<SliceCx>,
}

impl OpCx {
    /// Keeps `t` until the pullback that captures the result has run.
    pub fn save<const D: usize>(&self, t: Tensor<D>) -> Saved<D> {
        let saved = Saved::new(t, MemoryKind::Activation, &self.meter);
        if let Some(vault) = &self.vault {
            vault.note(&saved);
        }
        saved
    }

    /// Keeps an operation's input `x` until the pullback that captures the result has run, or only
    /// how to make it again.
    pub fn keep<const D: usize>(&self, x: &Tensor<D>) -> Saved<D> {
        let made_again = self.makers.as_ref().and_then(|makers| makers.find(x));
        made_again.unwrap_or_else(|| self.save(x.clone()))
    }

    /// Says how the operation's output `y` is made again, by the forward's own kernels from what
    /// the operation keeps: with selective recomputation others do not keep it.
    pub(crate) fn offer<const D: usize>(
        &self,
        y: Tensor<D>,
        make: impl FnOnce() -> Tensor<D> + Send + 'static,
    ) -> Tensor<D> {
        if let Some(makers) = &self.makers {
            makers.add(&y, make, &self.meter);
        }
        y
    }

    /// Counts memory that lives no longer than this forward.
    pub fn workspace(&self, bytes: usize) -> Hold {
        self.meter.hold(MemoryKind::Activation, bytes as u64)
    }

    /// Keeps `t` for a queued W.
    pub fn stash<const D: usize>(&self, t: Tensor<D>) -> Saved<D> {
        Saved::new(t, MemoryKind::WeightStash, &self.meter)
    }

    /// One element of the type and on the device of `like`, broadcast to `dims`: an output that is
    /// not wanted.
    pub(crate) fn stand_in<const D: usize>(like: &Tensor<D>, dims: [usize; D]) -> Tensor<D> {
        Tensor::<D>::zeros([1; D], (&like.device(), like.dtype())).expand(dims)
    }

    /// Which token of its sample each sample's first one is: that where a slice begins, else 0.
    pub(crate) fn first_token(&self) -> usize {
        self.slice.as_ref().map_or(0, |slice| slice.tokens().start)
    }

    /// Whether gradients are wanted from this forward.
    pub fn tracked(&self) -> bool {
        vjp::is_tracked(&self.token)
    }
}
