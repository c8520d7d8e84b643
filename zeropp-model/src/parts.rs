//! A decoder as the list of its parts: what each has, and what it costs.

use crate::cost;
use crate::decoder::Decoder;
use crate::layer::{BatchShape, LayerCost};
use crate::params::ParamSpec;
use crate::tensors::DecoderTensor;

/// What a part of a decoder is.
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
}

impl Decoder {
    /// The parts in order, from the embedding to the head.
    pub fn parts(&self) -> Vec<DecoderPart> {
        let positions = self.position_tensor().map(|_| PartKind::Positions);
        let blocks = (0..self.layers).map(PartKind::Block);
        let kinds = std::iter::once(PartKind::Embedding).chain(positions).chain(blocks);
        let kinds = kinds.chain([PartKind::FinalNorm, PartKind::Head]);
        kinds.map(|kind| DecoderPart { decoder: *self, kind }).collect()
    }
}

impl DecoderPart {
    /// Its parameters, in the order in which they are laid out; a tied head has the embedding's.
    pub fn tensors(&self) -> Vec<DecoderTensor> {
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

    /// What a micro-batch costs.
    pub fn cost(&self, batch: BatchShape) -> LayerCost {
        let of = match self.kind {
            PartKind::Embedding => cost::embedding,
            PartKind::Positions => cost::positions,
            PartKind::Block(_) => cost::block,
            PartKind::FinalNorm => cost::final_norm,
            PartKind::Head => cost::head,
        };
        of(&self.decoder, batch)
    }

    /// Whether a stage may begin or end at this part.
    pub fn is_block(&self) -> bool {
        matches!(self.kind, PartKind::Block(_))
    }
}
