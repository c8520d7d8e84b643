//! A decoder as a list of parts, and the parts that are no blocks.
//!
//! Shapes: b samples, s tokens, h hidden, V vocabulary, rounded up; x is `[b, s, h]` between
//! layers.

use std::sync::Arc;

use burn::tensor::{Int, Tensor};

use super::block::{self, Block};
use super::cost;
use super::decoder::{Decoder, Positions};
use super::tensors::DecoderTensor;
use crate::layer::{BatchShape, Embedding, Head, Layer, LayerCost, LayerCx, Model, Part};
use crate::params::ParamSpec;
use crate::past::Past;
use crate::split::ops::{self, Rotation};

/// The model that `decoder` describes.
///
/// # Panics
/// Panics if it is none: [`Decoder::check`] says so before.
pub fn build(decoder: Decoder) -> Model {
    if let Err((field, problem)) = decoder.check() {
        panic!("a decoder's {field}: {problem}");
    }
    let names = decoder.names();
    let mut parts = vec![Part::Embedding(Arc::new(TokenEmbedding(decoder)))];
    let rotation = match decoder.positions {
        Positions::Learned(_) => {
            parts.push(Part::Layer(Arc::new(PositionEmbedding(decoder))));
            None
        }
        Positions::Rotary(rotary) => {
            Some(Arc::new(Rotation::new(rotary.inverse_frequencies(decoder.head_dim))))
        }
    };
    for index in 0..decoder.layers {
        let (name, rotation) = (format!("{}.{index}", names.block), rotation.clone());
        parts.push(Part::Layer(Arc::new(Block { name, index, decoder, rotation })));
    }
    parts.push(Part::Layer(Arc::new(FinalNorm(decoder))));
    parts.push(Part::Head(Arc::new(LmHead(decoder))));
    Model { parts, hidden: decoder.hidden, vocabulary: decoder.vocabulary }
}

/// The token embedding.
struct TokenEmbedding(Decoder);

impl Embedding for TokenEmbedding {
    fn name(&self) -> &str {
        self.0.names().embedding
    }
    fn parameters(&self) -> Vec<ParamSpec> {
        vec![self.0.embedding_tensor().spec()]
    }
    fn forward(&self, ids: Tensor<2, Int>, cx: &LayerCx) -> Tensor<3> {
        ops::embedding(ids, &cx.weight(&self.0.embedding_tensor().name), &cx.op)
    }
    fn cost(&self, batch: BatchShape) -> LayerCost {
        cost::embedding(&self.0, batch)
    }
}

/// Learned positions, added to the token embedding.
struct PositionEmbedding(Decoder);

impl PositionEmbedding {
    fn tensor(&self) -> DecoderTensor {
        self.0.position_tensor().expect("made for learned positions")
    }
}

impl Layer for PositionEmbedding {
    fn name(&self) -> &str {
        self.0.names().positions
    }
    fn parameters(&self) -> Vec<ParamSpec> {
        vec![self.tensor().spec()]
    }
    fn forward(&self, x: Tensor<3>, cx: &LayerCx) -> Tensor<3> {
        ops::position_embedding(x, &cx.weight(&self.tensor().name), &cx.op)
    }
    fn extend(&self, x: Tensor<3>, cx: &LayerCx, past: &mut Past) -> Option<Tensor<3>> {
        let [_, n, _] = x.dims();
        let (first, rows) = (past.tokens(), cx.weight::<2>(&self.tensor().name).get());
        past.pass(n);
        Some(x + rows.slice([first..first + n]).unsqueeze())
    }
    fn cost(&self, batch: BatchShape) -> LayerCost {
        cost::positions(&self.0, batch)
    }
    fn seq_max(&self) -> Option<usize> {
        Some(self.tensor().shape[0])
    }
    fn is_block(&self) -> bool {
        false
    }
}

/// The norm before the head.
struct FinalNorm(Decoder);

impl Layer for FinalNorm {
    fn name(&self) -> &str {
        self.0.names().final_norm
    }
    fn parameters(&self) -> Vec<ParamSpec> {
        self.0.final_norm_tensors().into_iter().map(DecoderTensor::spec).collect()
    }
    fn forward(&self, x: Tensor<3>, cx: &LayerCx) -> Tensor<3> {
        block::norm(self.0.norm, x, self.0.names().final_norm, cx)
    }
    fn extend(&self, x: Tensor<3>, cx: &LayerCx, _: &mut Past) -> Option<Tensor<3>> {
        Some(self.forward(x, cx))
    }
    fn cost(&self, batch: BatchShape) -> LayerCost {
        cost::final_norm(&self.0, batch)
    }
    fn is_block(&self) -> bool {
        false
    }
}

/// Logits and their cross-entropy.
struct LmHead(Decoder);

impl Head for LmHead {
    fn name(&self) -> &str {
        self.0.names().head
    }
    fn parameters(&self) -> Vec<ParamSpec> {
        vec![self.0.head_tensor().spec()]
    }
    fn loss(&self, x: Tensor<3>, targets: Tensor<2, Int>, cx: &LayerCx) -> Tensor<1> {
        let weight = cx.weight(&self.0.head_tensor().name);
        ops::linear_cross_entropy(x, &weight, targets, self.0.vocabulary, &cx.op)
    }
    fn logits(&self, x: Tensor<3>, cx: &LayerCx) -> Option<Tensor<3>> {
        let weight = cx.weight(&self.0.head_tensor().name);
        Some(ops::linear_transposed(x, &weight, &cx.op).narrow(2, 0, self.0.vocabulary))
    }
    fn cost(&self, batch: BatchShape) -> LayerCost {
        cost::head(&self.0, batch)
    }
}
