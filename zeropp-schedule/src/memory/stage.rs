//! What predictions take of a stage.

use crate::ir::HeadMessage;

/// Bytes of one stage, for one micro-batch where that applies: of a slice, where samples are cut
/// into slices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageBytes {
    /// The stage input of one micro-batch, kept alone where the stage recomputes.
    pub input: u64,
    /// All that F keeps for the B of one micro-batch, the input included.
    pub activation: u64,
    /// What B keeps for the W of one micro-batch.
    pub stash: u64,
    /// Keys and values of a slice, which slices behind it need: kept from F on where the stage
    /// recomputes, beside `input`; a part of `activation` elsewhere.
    pub context: u64,
    /// The fp32 gradients of a slice's keys and values, which slices behind it add to; with the
    /// first slice's, the gradients of vectors that slices hand on.
    pub context_gradient: u64,
    /// When B holds the most; 0 where that is its beginning.
    pub inside: BackwardMoment,
    /// The same where each layer's B is followed by its W.
    pub inside_by_layer: BackwardMoment,
    /// The most that such a B keeps for the W of a layer.
    pub stash_of_layer: u64,
    /// What there is of it where it recomputes, if that is more than one layer; else its input,
    /// and after R the whole.
    pub layerwise: Option<LayerwiseBytes>,
    /// The whole gathered weights.
    pub weights: u64,
    /// Whether they are of several layers, for each of which the first F can wait by itself.
    pub in_layers: bool,
    /// Copies of them as the products of a forward read them; 0 where none is kept.
    pub packed_forward: u64,
    /// Those that forwards make beside these, and R does not, as their products make nothing but
    /// outputs that are not wanted again.
    pub packed_output: u64,
    /// Those that forwards make beside both, and R leaves to B, which makes all layers but the last
    /// again.
    pub packed_redone: u64,
    /// The same for the products of a backward.
    pub packed_backward: u64,
    /// The same for those of them that F makes along with a part of the gradient: a head's.
    pub packed_in_forward: u64,
    /// What a forward takes beside that, and gives back at its end; of a slice of a head, its B.
    pub workspace: u64,
    /// The whole fp32 gradient.
    pub gradient: u64,
    /// That part of it which F makes: a head's.
    pub gradient_in_forward: u64,
    /// Whether the gradient of a step's first unit stays with the rank as the sum of its units, so
    /// that it counts as that and never here: where no other shares the stage with the rank.
    pub keeps_first_gradient: bool,
    /// The rank's share of the sum over the units; what a first gradient that stays counts as is
    /// its own size.
    pub gradient_shard: u64,
    /// What there is of that when a step begins, until the first gather, where the update of the
    /// step before is done by then.
    pub gradient_due: u64,
    /// What the optimizer keeps of it, where that is in memory for that update alone: from the
    /// update of the rank's stage before, or, of its first, from the step's last backward, until
    /// the update of the stage behind it, or the rank's first W.
    pub update: u64,
    /// The output of one micro-batch as it is sent on; the gradient that comes back is as large.
    pub message: u64,
    /// What goes into a gather, where that is a copy of the shard.
    pub gather_input: u64,
    /// What making that takes for a moment: a part of the shard that is read from a file.
    pub gather_read: u64,
    /// What a reduction gives, where that is another buffer than goes in, and what adding it to a
    /// sum in a file takes.
    pub reduced: u64,
    /// What a reduction over replicas gives.
    pub replica_reduced: u64,
    /// What the messages of a split head take, where this is a slice of it.
    pub head: HeadBytes,
}

/// Bytes of the messages of a split head for a micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeadBytes {
    /// The head's input.
    pub input: u64,
    /// Maxima and sums of one block. A message of them has the logits of the targets beside, which
    /// are half as large.
    pub sums: u64,
    /// Maxima and sums over all ids.
    pub lse: u64,
    /// One sum of gradients of the input.
    pub gradient: u64,
}

impl HeadBytes {
    /// A message of so many tensors.
    pub fn message(&self, message: HeadMessage, tensors: u64) -> u64 {
        let targets = if message == HeadMessage::Sums { self.sums / 2 } else { 0 };
        self.of(message).saturating_mul(tensors).saturating_add(targets)
    }

    /// One tensor of a message.
    pub fn of(&self, message: HeadMessage) -> u64 {
        match message {
            HeadMessage::Input => self.input,
            HeadMessage::Sums => self.sums,
            HeadMessage::Lse => self.lse,
            HeadMessage::Gradient => self.gradient,
        }
    }

    /// The largest of them.
    pub fn longest(&self) -> u64 {
        HeadMessage::ALL.into_iter().map(|message| self.of(message)).max().unwrap_or(0)
    }
}

/// What there is of a micro-batch of a stage inside of its B.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackwardMoment {
    /// Of what F or R has kept, and B has not given back.
    pub kept: u64,
    /// What B keeps for W.
    pub stash: u64,
}

impl BackwardMoment {
    /// That of the two which holds more; this one where they are equal.
    pub fn or(self, other: BackwardMoment) -> BackwardMoment {
        if other.kept + other.stash > self.kept + self.stash { other } else { self }
    }
}

/// A micro-batch of a stage of several layers, each of which is done again by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerwiseBytes {
    /// What F keeps: the inputs of all layers.
    pub inputs: u64,
    /// What there is from R to B: of the last layer all that its F would keep.
    pub redone: u64,
    /// The most of it in B.
    pub most: u64,
    /// When B holds the most.
    pub inside: BackwardMoment,
    /// The same where each layer's B is followed by its W.
    pub inside_by_layer: BackwardMoment,
}
