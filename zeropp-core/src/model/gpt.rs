//! A GPT as GPT-2 has it: learned positions, pre-norm blocks, a head that may share the
//! embedding's weight. Parameter names and shapes are GPT-2's own.
//!
//! Shapes: b samples, s tokens, h hidden, V vocabulary, rounded up; x is `[b, s, h]` between
//! layers.

use std::sync::Arc;

use burn::tensor::{Int, Tensor};

use crate::choice::Activation;
use crate::layer::{BatchShape, Embedding, Head, Layer, LayerCost, LayerCx, Model, Part};
use crate::params::{Init, ParamSpec};
use crate::split::ops;

/// Standard deviation of initial weights.
const INIT_STD: f32 = 0.02;
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
        self.vocabulary.next_multiple_of(self.vocabulary_multiple.max(1))
    }
}

/// A GPT of the given sizes.
pub fn build(shape: GptShape) -> Model {
    let mut parts = vec![
        Part::Embedding(Arc::new(TokenEmbedding(shape))),
        Part::Layer(Arc::new(PositionEmbedding(shape))),
    ];
    for i in 0..shape.layers {
        parts.push(Part::Layer(Arc::new(Block { name: format!("h.{i}"), shape })));
    }
    parts.push(Part::Layer(Arc::new(FinalNorm(shape))));
    parts.push(Part::Head(Arc::new(LmHead(shape))));
    Model { parts, hidden: shape.hidden, vocabulary: shape.vocabulary }
}

/// The token embedding, `wte`.
struct TokenEmbedding(GptShape);

impl Embedding for TokenEmbedding {
    fn name(&self) -> &str {
        "wte"
    }
    fn parameters(&self) -> Vec<ParamSpec> {
        vec![wte(&self.0)]
    }
    fn forward(&self, ids: Tensor<2, Int>, cx: &LayerCx) -> Tensor<3> {
        ops::embedding(ids, &cx.weight("wte.weight"), &cx.op)
    }
    fn cost(&self, batch: BatchShape) -> LayerCost {
        // W adds rows of dY.
        LayerCost { stash_bytes: hidden_bytes(&self.0, batch), ..LayerCost::default() }
    }
}

fn wte(shape: &GptShape) -> ParamSpec {
    ParamSpec::new("wte.weight", &[shape.rows(), shape.hidden], Init::Normal(INIT_STD))
}

fn hidden_bytes(shape: &GptShape, batch: BatchShape) -> u64 {
    (batch.tokens() * shape.hidden * batch.element_bytes) as u64
}

/// What a norm keeps besides its input: mean and scale of each row for B, two gradients of h for
/// W, all fp32.
fn norm_cost(shape: &GptShape, batch: BatchShape) -> LayerCost {
    let statistics = 8 * batch.tokens() as u64;
    LayerCost {
        activation_bytes: statistics,
        activation_bytes_selective: statistics,
        stash_bytes: 8 * shape.hidden as u64,
        ..LayerCost::default()
    }
}

/// Learned positions, `wpe`, added to the token embedding.
struct PositionEmbedding(GptShape);

impl Layer for PositionEmbedding {
    fn name(&self) -> &str {
        "wpe"
    }
    fn parameters(&self) -> Vec<ParamSpec> {
        let shape = [self.0.seq, self.0.hidden];
        vec![ParamSpec::new("wpe.weight", &shape, Init::Normal(INIT_STD / 2.0))]
    }
    fn forward(&self, x: Tensor<3>, cx: &LayerCx) -> Tensor<3> {
        ops::position_embedding(x, &cx.weight("wpe.weight"), &cx.op)
    }
    fn cost(&self, batch: BatchShape) -> LayerCost {
        // W adds dY summed over the samples, fp32.
        LayerCost { stash_bytes: (4 * batch.seq * self.0.hidden) as u64, ..LayerCost::default() }
    }
    fn seq_max(&self) -> Option<usize> {
        Some(self.0.seq)
    }
    fn is_block(&self) -> bool {
        false
    }
}

/// One transformer block, `h.i`.
struct Block {
    name: String,
    shape: GptShape,
}

impl Layer for Block {
    fn name(&self) -> &str {
        &self.name
    }

    fn parameters(&self) -> Vec<ParamSpec> {
        let h = self.shape.hidden;
        // Two residual additions a block: their sum keeps unit variance over the depth.
        let residual = INIT_STD / (2.0 * self.shape.layers as f32).sqrt();
        let p = |name: &str, shape: &[usize], init| {
            ParamSpec::new(format!("{}.{name}", self.name), shape, init)
        };
        vec![
            p("ln_1.weight", &[h], Init::Ones),
            p("ln_1.bias", &[h], Init::Zeros),
            p("attn.c_attn.weight", &[h, 3 * h], Init::Normal(INIT_STD)),
            p("attn.c_attn.bias", &[3 * h], Init::Zeros),
            p("attn.c_proj.weight", &[h, h], Init::Normal(residual)),
            p("attn.c_proj.bias", &[h], Init::Zeros),
            p("ln_2.weight", &[h], Init::Ones),
            p("ln_2.bias", &[h], Init::Zeros),
            p("mlp.c_fc.weight", &[h, 4 * h], Init::Normal(INIT_STD)),
            p("mlp.c_fc.bias", &[4 * h], Init::Zeros),
            p("mlp.c_proj.weight", &[4 * h, h], Init::Normal(residual)),
            p("mlp.c_proj.bias", &[h], Init::Zeros),
        ]
    }

    fn forward(&self, x: Tensor<3>, cx: &LayerCx) -> Tensor<3> {
        let linear = |x: Tensor<3>, name: &str| {
            let bias = cx.weight(&format!("{name}.bias"));
            ops::linear(x, &cx.weight(&format!("{name}.weight")), Some(&bias), &cx.op)
        };
        let norm = |x: Tensor<3>, name: &str| {
            let (weight, bias) = (format!("{name}.weight"), format!("{name}.bias"));
            ops::layer_norm(x, &cx.weight(&weight), &cx.weight(&bias), NORM_EPS, &cx.op)
        };
        let qkv = linear(norm(x.clone(), "ln_1"), "attn.c_attn");
        let attended = ops::attention(qkv, self.shape.heads, &cx.op);
        let x = x + linear(attended, "attn.c_proj");
        let up = linear(norm(x.clone(), "ln_2"), "mlp.c_fc");
        let up = match self.shape.activation {
            Activation::Gelu => ops::gelu(up, &cx.op),
            Activation::GeluTanh => ops::gelu_tanh(up, &cx.op),
        };
        x + linear(up, "mlp.c_proj")
    }

    fn cost(&self, batch: BatchShape) -> LayerCost {
        let (n, s, h) = (batch.tokens() as f64, batch.seq as f64, self.shape.hidden as f64);
        let hidden = hidden_bytes(&self.shape, batch);
        let norm = norm_cost(&self.shape, batch);
        // Kept from F to B: x, ln_1(x), q k v (3), attention's output, x after attention,
        // ln_2 of it, MLP before and after the activation (4 + 4); and what norms and attention
        // keep.
        let kept = 16 * hidden + 2 * norm.activation_bytes;
        let queries = (batch.samples * self.shape.heads * batch.seq) as u64;
        let [probabilities, sums] = if batch.keeps_probabilities {
            [queries * (batch.seq * batch.element_bytes) as u64, 0]
        } else {
            [0, 4 * queries]
        };
        LayerCost {
            // Four matrix products of 12h² weights; scores and values, the causal half.
            forward_flops: 2.0 * n * 12.0 * h * h + 2.0 * n * s * h,
            activation_bytes: kept + probabilities + sums,
            activation_bytes_selective: kept + sums,
            // Input and dY of each product: 1 + 3, 1 + 1, 1 + 4, 4 + 1.
            stash_bytes: 16 * hidden + 2 * norm.stash_bytes,
            ..LayerCost::default()
        }
    }
}

/// The norm before the head, `ln_f`.
struct FinalNorm(GptShape);

impl Layer for FinalNorm {
    fn name(&self) -> &str {
        "ln_f"
    }
    fn parameters(&self) -> Vec<ParamSpec> {
        let h = self.0.hidden;
        vec![
            ParamSpec::new("ln_f.weight", &[h], Init::Ones),
            ParamSpec::new("ln_f.bias", &[h], Init::Zeros),
        ]
    }
    fn forward(&self, x: Tensor<3>, cx: &LayerCx) -> Tensor<3> {
        ops::layer_norm(x, &cx.weight("ln_f.weight"), &cx.weight("ln_f.bias"), NORM_EPS, &cx.op)
    }
    fn cost(&self, batch: BatchShape) -> LayerCost {
        let (norm, x) = (norm_cost(&self.0, batch), hidden_bytes(&self.0, batch));
        LayerCost {
            activation_bytes: norm.activation_bytes + x,
            activation_bytes_selective: norm.activation_bytes_selective + x,
            ..norm
        }
    }
    fn is_block(&self) -> bool {
        false
    }
}

/// Logits and their cross-entropy.
struct LmHead(GptShape);

impl LmHead {
    fn weight_name(&self) -> &'static str {
        if self.0.tied { "wte.weight" } else { "lm_head.weight" }
    }
}

impl Head for LmHead {
    fn name(&self) -> &str {
        "lm_head"
    }
    fn parameters(&self) -> Vec<ParamSpec> {
        vec![ParamSpec { name: self.weight_name().into(), ..wte(&self.0) }]
    }
    fn loss(&self, x: Tensor<3>, targets: Tensor<2, Int>, cx: &LayerCx) -> Tensor<1> {
        let weight = cx.weight(self.weight_name());
        ops::linear_cross_entropy(x, &weight, targets, self.0.vocabulary, &cx.op)
    }
    fn cost(&self, batch: BatchShape) -> LayerCost {
        let [rows, h] = [self.0.rows(), self.0.hidden];
        let chunk = ops::head_chunk(batch.tokens(), rows, batch.element_bytes, batch.on_kernels());
        // The kernels leave out the rows that are no token ids.
        let columns = if batch.on_kernels() { self.0.vocabulary } else { rows };
        let logit = ops::logit_bytes(batch.element_bytes, batch.on_kernels());
        // The gradient of its input.
        let kept = hidden_bytes(&self.0, batch);
        LayerCost {
            forward_flops: 2.0 * batch.tokens() as f64 * (h * self.0.vocabulary) as f64,
            activation_bytes: kept,
            activation_bytes_selective: kept,
            workspace_bytes: (chunk * columns * logit) as u64,
            gradients_in_forward: true,
            ..LayerCost::default()
        }
    }
}
