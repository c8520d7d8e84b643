//! A decoder as the list of its parts: what each has, and what it costs.

use crate::decoder::Decoder;
use crate::optimizer::Role;
use crate::params::ParamSpec;
use crate::tensors::{DecoderTensor, alike};
use crate::tuning::{PartTuning, Tuning};

/// The kind of a decoder's part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartKind {
    /// The token embedding.
    Embedding,
    /// Learned positions.
    Positions,
    /// A block, by its index.
    Block(usize),
    /// The norm before the head.
    FinalNorm,
    /// Logits and their loss.
    Head,
}

/// One part of a decoder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecoderPart {
    /// The whole.
    pub decoder: Decoder,
    /// Which part of it.
    pub kind: PartKind,
    /// The share of it that trains.
    pub tuning: PartTuning,
}

impl Decoder {
    /// The parts in order, from the embedding to the head.
    pub fn parts(&self) -> Vec<DecoderPart> {
        self.tuned_parts(&Tuning::default())
    }

    /// The same, of which `tuning` says what trains.
    pub fn tuned_parts(&self, tuning: &Tuning) -> Vec<DecoderPart> {
        let positions = self.position_tensor().map(|_| PartKind::Positions);
        let blocks = (0..self.layers).map(PartKind::Block);
        let kinds = std::iter::once(PartKind::Embedding).chain(positions).chain(blocks);
        let kinds = kinds.chain([PartKind::FinalNorm, PartKind::Head]);
        let part = |kind| DecoderPart { decoder: *self, kind, tuning: PartTuning::default() };
        kinds.map(|kind| part(kind).tuned(tuning)).collect()
    }
}

impl DecoderPart {
    /// Whether both are blocks that take and keep the same.
    pub fn is_like(&self, other: &DecoderPart) -> bool {
        let of = |part: &DecoderPart| match part.kind {
            PartKind::Block(index) => {
                let d = &part.decoder;
                Some((d.window_of(index), d.moe_of(index).is_some()))
            }
            _ => None,
        };
        let are_blocks = of(self).is_some() && of(self) == of(other);
        are_blocks && self.tuning == other.tuning && self.decoder == other.decoder
    }

    /// Its parameters; a tied head has the embedding's.
    pub fn tensors(&self) -> Vec<DecoderTensor> {
        self.tuning.applied(self.base_tensors(), self.decoder.names())
    }

    fn tuned(self, tuning: &Tuning) -> DecoderPart {
        let tuning = PartTuning::new(tuning, &self.base_tensors(), self.is_block());
        DecoderPart { tuning, ..self }
    }

    /// Whether the linear map `name` of this block has an adapter.
    pub fn is_adapted(&self, name: &str) -> bool {
        let names = self.decoder.names();
        let is_it = |map| alike(map).contains(&name);
        self.tuning.lora.is_some_and(|lora| lora.maps(names).any(is_it))
    }

    /// Its parameters as if nothing were frozen or adapted.
    fn base_tensors(&self) -> Vec<DecoderTensor> {
        let d = &self.decoder;
        match self.kind {
            PartKind::Embedding => vec![d.embedding_tensor()],
            PartKind::Positions => d.position_tensor().into_iter().collect(),
            PartKind::Block(index) => d.block_tensors(index),
            PartKind::FinalNorm => d.final_norm_tensors(),
            PartKind::Head => vec![d.head_tensor()],
        }
    }

    /// The same as a layer declares them.
    pub fn parameters(&self) -> Vec<ParamSpec> {
        self.tensors().into_iter().map(DecoderTensor::spec).collect()
    }

    /// Whether a stage may begin or end at this part.
    pub fn is_block(&self) -> bool {
        matches!(self.kind, PartKind::Block(_))
    }

    /// The role of its parameters in the model.
    pub fn role(&self) -> Role {
        match self.kind {
            PartKind::Block(_) => Role::Hidden,
            PartKind::Positions | PartKind::FinalNorm => Role::Small,
            PartKind::Head if !self.decoder.tied => Role::Head,
            PartKind::Embedding | PartKind::Head => Role::Embedding,
        }
    }
}
