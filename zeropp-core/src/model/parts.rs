//! A decoder as a list of parts, and the parts that are no blocks.
//!
//! Shapes: b samples, s tokens, h hidden, V vocabulary, rounded up; x is `[b, s, h]` between
//! layers.

use std::sync::Arc;

use burn::tensor::{Int, Tensor};

use zeropp_model::decoder::{Decoder, Positions};
use zeropp_model::parts::{DecoderPart, PartKind};
use zeropp_model::tuning::Tuning;

use super::block::{self, Block};
use crate::layer::{BatchShape, Embedding, Head, Layer, LayerCost, LayerCx, Model, Part};
use crate::params::ParamSpec;
use crate::past::Past;
use crate::split::DropoutPlace;
use crate::split::ops::{self, Rotation};

/// The model that `decoder` describes.
///
/// # Panics
/// Panics if it is none: [`Decoder::check`] says so before.
pub fn build(decoder: Decoder) -> Model {
    build_tuned(decoder, &Tuning::default())
}

/// The model that `decoder` describes, of which `tuning` says what trains.
///
/// # Panics
/// As [`build`].
pub fn build_tuned(decoder: Decoder, tuning: &Tuning) -> Model {
    if let Err((field, problem)) = decoder.check() {
        panic!("a decoder's {field}: {problem}");
    }
    let rotation = match decoder.positions {
        Positions::Learned(_) => None,
        Positions::Rotary(rotary) => {
            let inverse = rotary.inverse_frequencies(decoder.head_dim);
            Some(Arc::new(Rotation::scaled(inverse, rotary.attention())))
        }
    };
    let layer = |part: DecoderPart| match part.kind {
        PartKind::Embedding => Part::Embedding(Arc::new(TokenEmbedding(part))),
        PartKind::Positions => Part::Layer(Arc::new(PositionEmbedding(part))),
        PartKind::Block(index) => {
            let (name, rotation) = (format!("{}.{index}", decoder.names().block), rotation.clone());
            let window = decoder.window_of(index);
            Part::Layer(Arc::new(Block { name, part, window, rotation }))
        }
        PartKind::FinalNorm => Part::Layer(Arc::new(FinalNorm(part))),
        PartKind::Head => Part::Head(Arc::new(LmHead(part))),
    };
    let parts = decoder.tuned_parts(tuning).into_iter().map(layer).collect();
    Model { parts, hidden: decoder.hidden, vocabulary: decoder.vocabulary }
}

/// The name of the only parameter of `part`.
fn only(part: &DecoderPart) -> String {
    part.tensors().swap_remove(0).name
}

/// Where dropout follows the embedding, with positions where they are learned.
const EMBEDDED: DropoutPlace<'_> = ["embedding", "output"];

/// The token embedding.
struct TokenEmbedding(DecoderPart);

impl Embedding for TokenEmbedding {
    fn name(&self) -> &str {
        self.0.decoder.names().embedding
    }
    fn parameters(&self) -> Vec<ParamSpec> {
        self.0.parameters()
    }
    fn forward(&self, ids: Tensor<2, Int>, cx: &LayerCx) -> Tensor<3> {
        let x = ops::embedding(ids, &cx.weight(&only(&self.0)), &cx.op);
        match self.0.decoder.positions {
            Positions::Learned(_) => x,
            Positions::Rotary(_) => ops::dropout(x, EMBEDDED, &cx.op),
        }
    }
    fn is_split(&self) -> bool {
        true
    }
    fn takes_slices(&self) -> bool {
        true
    }
    fn cost(&self, batch: BatchShape) -> LayerCost {
        self.0.cost(batch)
    }
}

/// Learned positions, added to the token embedding.
struct PositionEmbedding(DecoderPart);

impl Layer for PositionEmbedding {
    fn name(&self) -> &str {
        self.0.decoder.names().positions
    }
    fn parameters(&self) -> Vec<ParamSpec> {
        self.0.parameters()
    }
    fn forward(&self, x: Tensor<3>, cx: &LayerCx) -> Tensor<3> {
        let x = ops::position_embedding(x, &cx.weight(&only(&self.0)), &cx.op);
        ops::dropout(x, EMBEDDED, &cx.op)
    }
    fn extend(&self, x: Tensor<3>, cx: &LayerCx, past: &mut Past) -> Option<Tensor<3>> {
        let [_, n, _] = x.dims();
        let (first, rows) = (past.tokens(), cx.weight::<2>(&only(&self.0)).get());
        past.pass(n);
        Some(x + rows.slice([first..first + n]).unsqueeze())
    }
    fn is_split(&self) -> bool {
        true
    }
    fn takes_slices(&self) -> bool {
        true
    }
    fn cost(&self, batch: BatchShape) -> LayerCost {
        self.0.cost(batch)
    }
    fn seq_max(&self) -> Option<usize> {
        match self.0.decoder.positions {
            Positions::Learned(places) => Some(places),
            Positions::Rotary(_) => None,
        }
    }
    fn is_block(&self) -> bool {
        false
    }
}

/// The norm before the head.
struct FinalNorm(DecoderPart);

impl Layer for FinalNorm {
    fn name(&self) -> &str {
        self.0.decoder.names().final_norm
    }
    fn parameters(&self) -> Vec<ParamSpec> {
        self.0.parameters()
    }
    fn forward(&self, x: Tensor<3>, cx: &LayerCx) -> Tensor<3> {
        let decoder = &self.0.decoder;
        block::norm(decoder.norm, x, decoder.names().final_norm, cx)
    }
    fn extend(&self, x: Tensor<3>, cx: &LayerCx, _: &mut Past) -> Option<Tensor<3>> {
        Some(self.forward(x, cx))
    }
    fn is_split(&self) -> bool {
        true
    }
    fn takes_slices(&self) -> bool {
        true
    }
    fn cost(&self, batch: BatchShape) -> LayerCost {
        self.0.cost(batch)
    }
    fn is_block(&self) -> bool {
        false
    }
}

/// Logits and their cross-entropy.
struct LmHead(DecoderPart);

impl Head for LmHead {
    fn name(&self) -> &str {
        self.0.decoder.names().head
    }
    fn parameters(&self) -> Vec<ParamSpec> {
        self.0.parameters()
    }
    fn loss(&self, x: Tensor<3>, targets: Tensor<2, Int>, cx: &LayerCx) -> Tensor<1> {
        let weight = cx.weight(&only(&self.0));
        ops::linear_cross_entropy(x, &weight, targets, self.0.decoder.vocabulary, &cx.op)
    }
    fn split(&self) -> Option<ops::SplitHead> {
        let (name, ids) = (self.name().into(), self.0.decoder.vocabulary);
        Some(ops::SplitHead { name, weight: self.parameters().swap_remove(0), ids })
    }
    fn logits(&self, x: Tensor<3>, cx: &LayerCx) -> Option<Tensor<3>> {
        let weight = cx.weight(&only(&self.0));
        Some(ops::linear_transposed(x, &weight, &cx.op).narrow(2, 0, self.0.decoder.vocabulary))
    }
    fn is_split(&self) -> bool {
        true
    }
    fn takes_slices(&self) -> bool {
        true
    }
    fn cost(&self, batch: BatchShape) -> LayerCost {
        self.0.cost(batch)
    }
}
