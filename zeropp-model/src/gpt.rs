//! A GPT as GPT-2 has it: learned positions, pre-norm blocks, a head that may share the
//! embedding's weight. Parameter names and shapes are GPT-2's own.

use crate::Activation;
use crate::decoder::{Biases, Decoder, Naming, Norm, Positions};

/// Added to the variance in every norm.
const NORM_EPS: f64 = 1e-5;

/// Sizes of a GPT.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GptShape {
    /// Transformer blocks.
    pub layers: usize,
    /// Hidden size h.
    pub hidden: usize,
    /// Attention heads; divides `hidden`.
    pub heads: usize,
    /// Tokens in a sample s: the number of learned positions.
    pub seq: usize,
    /// Token ids: those below this number.
    pub vocabulary: usize,
    /// Embedding and head have rows for the vocabulary rounded up to a multiple of this; 1 adds
    /// none. A row that is no id is never looked up and takes no part in the loss.
    pub vocabulary_multiple: usize,
    /// Whether the head uses the embedding's weight.
    pub tied: bool,
    /// The MLP's nonlinearity.
    pub activation: Activation,
}

impl GptShape {
    /// Rows of embedding and head.
    pub fn rows(&self) -> usize {
        Decoder::from(*self).rows()
    }
}

impl From<GptShape> for Decoder {
    fn from(shape: GptShape) -> Decoder {
        Decoder {
            naming: Naming::Gpt2,
            layers: shape.layers,
            hidden: shape.hidden,
            heads: shape.heads,
            kv_heads: shape.heads,
            head_dim: shape.hidden / shape.heads,
            intermediate: 4 * shape.hidden,
            vocabulary: shape.vocabulary,
            vocabulary_multiple: shape.vocabulary_multiple,
            norm: Norm::Layer { eps: NORM_EPS },
            positions: Positions::Learned(shape.seq),
            biases: Biases::ALL,
            qk_norm: false,
            activation: shape.activation,
            tied: shape.tied,
            window: None,
            moe: None,
            context: shape.seq,
        }
    }
}
