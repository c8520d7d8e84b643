//! The parts of a model: an embedding, a list of layers and a head that ends in the loss.
//!
//! A layer knows nothing of ranks, stages or shards. It declares its parameters and computes with
//! [`Weight`] handles and the operations of [`crate::split`], or with a stock Burn module.

use std::sync::Arc;

use burn::tensor::{Int, Tensor};

pub use zeropp_model::layer::{BackwardPeak, BatchShape, LayerCost, SamplePart, pieces};
pub use zeropp_model::slots::{Keeps, Slot};

use crate::optimizer::Role;
use crate::params::ParamSpec;
use crate::past::Past;
use crate::split::ops::{HeadSlice, SplitHead};
use crate::split::{LayerWeights, OpCx, Weight};

/// The context of one layer's forward, beside its input.
pub struct LayerCx {
    /// Weights of the layer.
    pub weights: LayerWeights,
    /// Context of the operations.
    pub op: OpCx,
    /// Whether the layer's output is wanted. It is not where a forward is done again for its
    /// backward alone: then what only the output needs may be left out.
    pub output_wanted: bool,
}

impl LayerCx {
    /// The context of the operations whose outputs go nowhere but into the layer's own.
    pub(crate) fn last_op(&self) -> OpCx {
        OpCx { output_wanted: self.output_wanted, ..self.op.clone() }
    }

    /// A handle to one of the layer's own parameters, by the end of its name: `"ln_1.weight"`.
    ///
    /// # Panics
    /// Panics if the layer did not declare it or it has another number of dimensions.
    pub fn weight<const D: usize>(&self, name: &str) -> Weight<D> {
        self.weights.weight(name)
    }
}

/// A layer between embedding and head: `[b, s, h]` to `[b, s, h]`.
pub trait Layer: Send + Sync + 'static {
    /// Name, unique in the model; parameters are usually called `name.something`.
    fn name(&self) -> &str;
    /// The parameters, in the order in which they are laid out.
    fn parameters(&self) -> Vec<ParamSpec>;
    /// Output for `x: [b, s, h]`.
    fn forward(&self, x: Tensor<3>, cx: &LayerCx) -> Tensor<3>;
    /// Output for `x: [1, n, h]` of tokens that follow those of `past`, which takes them up; none
    /// where the layer cannot go on from a past, so that all of a text is computed for each new
    /// token of it. Training never asks.
    fn extend(&self, _x: Tensor<3>, _cx: &LayerCx, _past: &mut Past) -> Option<Tensor<3>> {
        None
    }
    /// Whether the forward is made of operations of [`split`](crate::split) alone, so that a tape
    /// records it and nothing of it is in Burn's graph, which all ranks of a process share (ADR
    /// 63). Any other operation on what was computed then ends the run with a message.
    fn is_split(&self) -> bool {
        false
    }
    /// Whether a micro-batch may be a slice of a sample: whether the forward is made of operations
    /// that know of slices ([`OpCx::slice`]).
    fn takes_slices(&self) -> bool {
        false
    }
    /// The cost of a micro-batch.
    fn cost(&self, batch: BatchShape) -> LayerCost;
    /// The longest sample that the layer can take, in tokens, where it has a limit: learned
    /// positions end somewhere. A longer one is refused before any rank starts.
    fn seq_max(&self) -> Option<usize> {
        None
    }
    /// Whether a stage may begin or end here. Small layers (a position embedding, a final norm)
    /// say no and stay with their neighbour.
    fn is_block(&self) -> bool {
        true
    }
}

/// The first layer: token ids to `[b, s, h]`.
pub trait Embedding: Send + Sync + 'static {
    /// Name, unique in the model.
    fn name(&self) -> &str;
    /// The parameters, in the order in which they are laid out.
    fn parameters(&self) -> Vec<ParamSpec>;
    /// Output for `ids: [b, s]`.
    fn forward(&self, ids: Tensor<2, Int>, cx: &LayerCx) -> Tensor<3>;
    /// Whether the forward is made of operations of [`split`](crate::split) alone, so that a tape
    /// records it and nothing of it is in Burn's graph, which all ranks of a process share (ADR
    /// 63). Any other operation on what was computed then ends the run with a message.
    fn is_split(&self) -> bool {
        false
    }
    /// Whether a micro-batch may be a slice of a sample: whether the forward is made of operations
    /// that know of slices ([`OpCx::slice`]).
    fn takes_slices(&self) -> bool {
        false
    }
    /// The cost of a micro-batch.
    fn cost(&self, batch: BatchShape) -> LayerCost;
    /// The longest sample that it can take, in tokens, where it has a limit.
    fn seq_max(&self) -> Option<usize> {
        None
    }
}

/// The last layer: `[b, s, h]` to the mean loss over the micro-batch's tokens.
pub trait Head: Send + Sync + 'static {
    /// Name, unique in the model.
    fn name(&self) -> &str;
    /// The parameters, in the order in which they are laid out.
    fn parameters(&self) -> Vec<ParamSpec>;
    /// Mean cross-entropy (or another loss) of `x: [b, s, h]` against `targets: [b, s]`, shape
    /// `[1]`.
    fn loss(&self, x: Tensor<3>, targets: Tensor<2, Int>, cx: &LayerCx) -> Tensor<1>;
    /// The head as a map whose rows ranks can share, if it is one; other heads are always whole.
    fn split(&self) -> Option<SplitHead> {
        None
    }
    /// The logits that the loss is of, `[b, s, V]`, for heads that have them; training never asks.
    fn logits(&self, _x: Tensor<3>, _cx: &LayerCx) -> Option<Tensor<3>> {
        None
    }
    /// Whether the forward is made of operations of [`split`](crate::split) alone, so that a tape
    /// records it and nothing of it is in Burn's graph, which all ranks of a process share (ADR
    /// 63). Any other operation on what was computed then ends the run with a message.
    fn is_split(&self) -> bool {
        false
    }
    /// Whether a micro-batch may be a slice of a sample: whether the forward is made of operations
    /// that know of slices ([`OpCx::slice`]).
    fn takes_slices(&self) -> bool {
        false
    }
    /// The cost of a micro-batch.
    fn cost(&self, batch: BatchShape) -> LayerCost;
}

/// One entry of a model's flat list.
#[derive(Clone)]
pub enum Part {
    /// Token ids in.
    Embedding(Arc<dyn Embedding>),
    /// Hidden states in and out.
    Layer(Arc<dyn Layer>),
    /// The loss.
    Head(Arc<dyn Head>),
    /// Some rows of a head that ranks share; no part of a model, but of what a rank has of one.
    Slice(Arc<HeadSlice>),
}

macro_rules! each {
    ($self:ident, $l:ident => $e:expr) => {
        match $self {
            Part::Embedding($l) => $e,
            Part::Layer($l) => $e,
            Part::Head($l) => $e,
            Part::Slice($l) => $e,
        }
    };
}

impl Part {
    /// Name, unique in the model.
    pub fn name(&self) -> &str {
        each!(self, l => l.name())
    }
    /// The parameters.
    pub fn parameters(&self) -> Vec<ParamSpec> {
        each!(self, l => l.parameters())
    }
    /// The cost of a micro-batch.
    pub fn cost(&self, batch: BatchShape) -> LayerCost {
        each!(self, l => l.cost(batch))
    }
    /// The longest sample that the part can take, in tokens, where it has a limit.
    pub fn seq_max(&self) -> Option<usize> {
        match self {
            Part::Layer(l) => l.seq_max(),
            Part::Embedding(l) => l.seq_max(),
            Part::Head(_) | Part::Slice(_) => None,
        }
    }
    /// Whether the forward is made of split operations alone.
    pub fn is_split(&self) -> bool {
        match self {
            Part::Embedding(l) => l.is_split(),
            Part::Layer(l) => l.is_split(),
            Part::Head(l) => l.is_split(),
            Part::Slice(_) => true,
        }
    }
    /// Whether a micro-batch may be a slice of a sample.
    pub fn takes_slices(&self) -> bool {
        match self {
            Part::Embedding(l) => l.takes_slices(),
            Part::Layer(l) => l.takes_slices(),
            Part::Head(l) => l.takes_slices(),
            Part::Slice(_) => false,
        }
    }
    /// Whether a stage may begin or end at this part.
    pub fn is_block(&self) -> bool {
        matches!(self, Part::Layer(l) if l.is_block())
    }
    /// The role of its parameters in the model, which is a tied one if `tied`.
    pub fn role(&self, tied: bool) -> Role {
        match self {
            Part::Layer(layer) if layer.is_block() => Role::Hidden,
            Part::Layer(_) => Role::Small,
            Part::Head(_) | Part::Slice(_) if !tied => Role::Head,
            Part::Embedding(_) | Part::Head(_) | Part::Slice(_) => Role::Embedding,
        }
    }
}

/// A model as a list of parts: one embedding, layers, one head.
///
/// Embedding and head are tied (GPT-2) where both declare exactly one parameter and give it the
/// same name: each keeps a copy, their gradients are summed, and both stay equal.
#[derive(Clone)]
pub struct Model {
    /// Embedding first, head last.
    pub parts: Vec<Part>,
    /// Hidden size h: the last dimension of what passes between stages.
    pub hidden: usize,
    /// Number of token ids.
    pub vocabulary: usize,
}

impl Model {
    /// Whether embedding and head share their single weight.
    pub fn is_tied(&self) -> bool {
        let only = |part: Option<&Part>| match part?.parameters().as_slice() {
            [one] => Some((one.name.clone(), one.shape.clone())),
            _ => None,
        };
        let first = only(self.parts.first());
        first.is_some() && first == only(self.parts.last())
    }

    /// Number of parameters, a tied weight counted once.
    pub fn parameter_count(&self) -> u64 {
        let all: usize = self.parts.iter().flat_map(Part::parameters).map(|p| p.len()).sum();
        let twice = if self.is_tied() { self.parts[0].parameters()[0].len() } else { 0 };
        (all - twice) as u64
    }

    /// Whether any parameter does not train.
    pub fn has_frozen(&self) -> bool {
        self.parts.iter().flat_map(Part::parameters).any(|p| !p.trains)
    }

    /// Training FLOP of one token: three times the forward's, less the gradients of weights that do
    /// not train; recomputation not counted.
    pub fn flops_per_token(&self, batch: BatchShape) -> f64 {
        let all: f64 = self.parts.iter().map(|p| p.cost(batch).training_flops()).sum();
        all / batch.tokens() as f64
    }
}
