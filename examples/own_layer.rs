//! A model with layers of one's own: a gated MLP written with split operations, and a stock
//! `burn::nn` module, between the built-in embedding and head.
//!
//! `cargo run --release --example own_layer`
//!
//! In a crate that does not depend on Burn itself `use zeropp::burn;` gives `#[derive(Module)]` the
//! name that it asks for.

use std::sync::Arc;

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor, activation};
use zeropp::burn;
use zeropp::layer::{BatchShape, Keeps, Layer, LayerCost, LayerCx, Part, Slot};
use zeropp::model::gpt::{self, GptShape};
use zeropp::params::{Init, ParamSpec};
use zeropp::split::ops;
use zeropp::stock::Stock;
use zeropp::{Config, Trainer};

/// x + down(silu(gate(norm(x))) · up(norm(x))), as in LLaMA.
struct GatedMlp {
    name: String,
    hidden: usize,
    inner: usize,
}

impl Layer for GatedMlp {
    fn name(&self) -> &str {
        &self.name
    }

    fn parameters(&self) -> Vec<ParamSpec> {
        let p = |name: &str, shape: &[usize], init| {
            ParamSpec::new(format!("{}.{name}", self.name), shape, init)
        };
        vec![
            p("norm.weight", &[self.hidden], Init::Ones),
            p("gate.weight", &[self.hidden, self.inner], Init::Normal(0.02)),
            p("up.weight", &[self.hidden, self.inner], Init::Normal(0.02)),
            p("down.weight", &[self.inner, self.hidden], Init::Normal(0.02)),
        ]
    }

    fn forward(&self, x: Tensor<3>, cx: &LayerCx) -> Tensor<3> {
        let normed = ops::rms_norm(x.clone(), &cx.weight("norm.weight"), 1e-6, &cx.op);
        let gate = ops::linear(normed.clone(), &cx.weight("gate.weight"), None, &cx.op);
        let up = ops::linear(normed, &cx.weight("up.weight"), None, &cx.op);
        let inner = ops::swiglu(gate, up, &cx.op);
        ops::add(x, ops::linear(inner, &cx.weight("down.weight"), None, &cx.op))
    }

    /// All of the above are split operations.
    fn is_split(&self) -> bool {
        true
    }

    fn cost(&self, batch: BatchShape) -> LayerCost {
        let (n, hidden, inner) = (batch.tokens() as u64, self.hidden as u64, self.inner as u64);
        let [h, i] = [hidden, inner].map(|width| n * width * batch.element_bytes as u64);
        // Operation by operation, as their documentation says: inputs and, for W, the dYs. B can
        // make the inputs of the linear maps again, from x and from gate and up.
        let norm = Keeps { slots: vec![Slot::new(h), Slot::new(4 * n)], made: 4 * hidden };
        let maps = Keeps { slots: vec![Slot::new(h).made_from(h).for_w()], made: 2 * i };
        let swiglu = Keeps { slots: vec![Slot::new(2 * i)], made: 0 };
        let down = Keeps { slots: vec![Slot::new(i).made_from(2 * i).for_w()], made: h };
        LayerCost {
            forward_flops: 6.0 * (n * hidden * inner) as f64,
            ..LayerCost::keeping(&[norm, maps, swiglu, down])
        }
    }
}

/// An ordinary Burn module that knows nothing of zeropp.
#[derive(Module, Debug)]
struct Mixer {
    norm: LayerNorm,
    linear: Linear,
}

impl Mixer {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        x.clone() + activation::gelu(self.linear.forward(self.norm.forward(x)))
    }
}

fn main() -> Result<(), zeropp::Error> {
    let config = Config { pp: 2, zero3: 2, unit: Some(3), steps: 30, ..Config::default() };
    let (hidden, device) = (config.hidden, Device::flex());
    device.seed(7);

    // The built-in GPT's blocks, each followed by a layer of ours.
    let gpt = gpt::build(GptShape {
        layers: 4,
        hidden,
        heads: config.heads,
        seq: config.seq,
        vocabulary: 256,
        vocabulary_multiple: 1,
        tied: false,
        activation: config.activation,
    });
    let mut model = gpt.clone();
    model.parts.clear();
    for part in gpt.parts {
        let block = part.is_block().then(|| part.name().to_string());
        model.parts.push(part);
        let Some(block) = block else { continue };
        if block.ends_with('1') || block.ends_with('3') {
            let module = Mixer {
                norm: LayerNormConfig::new(hidden).init(&device),
                linear: LinearConfig::new(hidden, hidden).init(&device),
            };
            let stock = Stock::new(format!("{block}.mixer"), module, Mixer::forward);
            model.parts.push(Part::Layer(Arc::new(stock)));
        } else {
            let gated = GatedMlp { name: format!("{block}.gated"), hidden, inner: 2 * hidden };
            model.parts.push(Part::Layer(Arc::new(gated)));
        }
    }

    let trainer = Trainer::builder(Config { layers: 8, ..config }).model(model).build()?;
    for rank in &trainer.plan().ranks {
        println!("rank {}: {:?}", rank.pp, rank.stages);
    }
    let summary = trainer.train(|s| println!("step {:2}  loss {:.4}", s.step, s.loss))?;
    assert!(summary.last_loss < summary.first_loss);
    Ok(())
}
