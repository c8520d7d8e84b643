//! Layers from outside: stock Burn modules give the gradients of the built-in operations, and the
//! same bits in every layout.

use std::sync::Arc;

use crate::common::captured::warnings;
use crate::common::tiny;
use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use zeropp::layer::{BatchShape, Layer, LayerCost, LayerCx, Model, Part};
use zeropp::model::gpt;
use zeropp::params::{Init, ParamSpec};
use zeropp::split::ops;
use zeropp::stock::Stock;
use zeropp::{Config, NamedWeights, Trainer};

#[derive(Module, Debug)]
struct NormLinear {
    norm: LayerNorm,
    linear: Linear,
}

impl NormLinear {
    fn new(hidden: usize) -> Self {
        let device = Device::flex();
        let linear: Linear = LinearConfig::new(hidden, hidden).init(&device);
        // Values of no random state, so that both models start alike.
        let linear = linear.map(&mut Ramp);
        Self { norm: LayerNormConfig::new(hidden).init(&device), linear }
    }
}

/// Puts a fixed pattern into every parameter.
struct Ramp;

impl burn::module::ModuleMapper for Ramp {
    fn map_float<const D: usize>(
        &mut self,
        param: burn::module::Param<Tensor<D>>,
    ) -> burn::module::Param<Tensor<D>> {
        let (id, value, mapper) = param.consume();
        let dims = value.dims();
        let values = pattern(dims.iter().product());
        let data = burn::tensor::TensorData::new(values, dims);
        let value = Tensor::from_data(data, &Device::flex());
        burn::module::Param::from_mapped_value(id, value, mapper)
    }
}

fn pattern(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) * 2e-3).collect()
}

/// The same layer with split operations.
struct Split {
    name: String,
    hidden: usize,
    /// Whether it says that it is made of split operations.
    is_split: bool,
}

impl Layer for Split {
    fn name(&self) -> &str {
        &self.name
    }
    fn parameters(&self) -> Vec<ParamSpec> {
        let h = self.hidden;
        let p = |name: &str, shape: &[usize], init| {
            ParamSpec::new(format!("{}.{name}", self.name), shape, init)
        };
        vec![
            p("norm.gamma", &[h], Init::Ones),
            p("norm.beta", &[h], Init::Zeros),
            p("linear.weight", &[h, h], Init::Values(pattern(h * h).into())),
            p("linear.bias", &[h], Init::Values(pattern(h).into())),
        ]
    }
    fn forward(&self, x: Tensor<3>, cx: &LayerCx) -> Tensor<3> {
        let (gamma, beta) = (cx.weight("norm.gamma"), cx.weight("norm.beta"));
        let y = ops::layer_norm(x.clone(), &gamma, &beta, 1e-5, &cx.op);
        let bias = cx.weight("linear.bias");
        ops::add(x, ops::linear(y, &cx.weight("linear.weight"), Some(&bias), &cx.op))
    }
    fn is_split(&self) -> bool {
        self.is_split
    }
    fn cost(&self, _batch: BatchShape) -> LayerCost {
        LayerCost::default()
    }
}

/// The tiny GPT with one more layer after each block.
fn with_layers(config: &Config, layer: impl Fn(String) -> Part) -> Model {
    let mut model = gpt::build(config.gpt_shape(256));
    let parts = std::mem::take(&mut model.parts);
    for part in parts {
        let block = part.is_block().then(|| format!("{}.more", part.name()));
        model.parts.push(part);
        model.parts.extend(block.map(&layer));
    }
    model
}

fn split(config: &Config, is_split: bool) -> Model {
    let hidden = config.hidden;
    with_layers(config, |name| Part::Layer(Arc::new(Split { name, hidden, is_split })))
}

fn stock(config: &Config) -> Model {
    let hidden = config.hidden;
    with_layers(config, |name| {
        let forward =
            |m: &NormLinear, x: Tensor<3>| x.clone() + m.linear.forward(m.norm.forward(x));
        Part::Layer(Arc::new(Stock::new(name, NormLinear::new(hidden), forward)))
    })
}

fn config() -> Config {
    Config { layers: 4, steps: 6, ..tiny() }
}

/// With the number of blocks that the model has with one more after each.
fn fitting(config: Config) -> Config {
    Config { layers: 2 * config.layers, ..config }
}

fn gradients(config: Config, model: Model) -> NamedWeights {
    Trainer::builder(fitting(config)).model(model).build().unwrap().first_gradients().unwrap().1
}

#[test]
fn stock_modules_have_the_gradients_of_split_operations() {
    let config = config();
    let expected = gradients(config.clone(), split(&config, true));
    let found = gradients(config.clone(), stock(&config));
    assert_eq!(expected.keys().collect::<Vec<_>>(), found.keys().collect::<Vec<_>>());
    assert!(found.contains_key("h.3.more.linear.weight"));
    for (name, e) in &expected {
        let scale = e.iter().fold(0f32, |m, x| m.max(x.abs()));
        let worst = e.iter().zip(&found[name]).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(worst <= 4e-6 * scale, "{name}: {:e}", worst / scale);
    }
}

/// The bits of all losses and of the weights in the end.
fn trained(config: &Config, model: Model) -> (Vec<u64>, Vec<u32>) {
    let trainer = Trainer::builder(fitting(config.clone())).model(model).build().unwrap();
    let mut losses = Vec::new();
    let (_, weights) = trainer.train_to_weights(|s| losses.push(s.loss.to_bits())).unwrap();
    (losses, weights.values().flatten().map(|w| w.to_bits()).collect())
}

/// The same layers are recorded on tapes or in Burn's graph, as they say of themselves.
#[test]
fn layers_that_are_split_train_to_the_bits_of_those_in_burns_graph() {
    let config = Config { pp: 2, zero3: 2, virtual_stages: Some(2), ..config() };
    let of = |is_split| trained(&config, split(&config, is_split));
    assert_eq!(of(true), of(false));
}

#[test]
fn stock_modules_train_to_the_same_bits_in_every_layout() {
    let train = |config: Config| trained(&config, stock(&config));
    let base = Config { zero3: 2, ..config() };
    let reference = train(base.clone());
    assert_eq!(reference, train(Config { pp: 2, virtual_stages: Some(2), ..base.clone() }));
    assert_eq!(reference, train(Config { pp: 4, ..base }));
}

/// Before, another `hidden` or `layers` than the model's was ignored, and a longer `seq` was a
/// rank's panic.
#[test]
fn a_model_that_contradicts_the_settings_is_refused() {
    let config = config();
    let refused = |change: fn(&mut Config), message: &str| {
        let mut config = config.clone();
        let model = gpt::build(config.gpt_shape(256));
        change(&mut config);
        let error = Trainer::builder(config).model(model).build().err().expect(message).to_string();
        assert!(error.contains(message), "{error}");
    };
    let h = config.hidden;
    refused(|c| c.hidden *= 2, &format!("hidden = {}: the model's hidden size is {h}; use", 2 * h));
    refused(|c| c.layers = 5, "layers = 5: the model's number of blocks is 4; use 4, or another");
    refused(|c| c.seq = 999, "seq = 999: the model takes samples of at most ");
    let model = gpt::build(config.gpt_shape(200));
    let error = Trainer::builder(config.clone()).model(model).build().err().unwrap().to_string();
    assert!(error.contains("vocabulary = 200 is smaller than the data needs"), "{error}");
    let mut model = gpt::build(config.gpt_shape(256));
    model.parts.rotate_left(1);
    let error = Trainer::builder(config.clone()).model(model).build().err().unwrap().to_string();
    assert!(error.contains("wpe, is in the wrong place; an embedding comes first"), "{error}");
    let shorter = Config { seq: config.seq - 1, ..config.clone() };
    Trainer::builder(shorter)
        .model(gpt::build(config.gpt_shape(256)))
        .build()
        .expect("positions to spare");
}

/// Before, another rank was said to have called recv of 1024 elements, and this one send of 128.
#[test]
fn a_layer_with_an_output_of_another_shape_is_named_with_both_shapes() {
    struct Narrow {
        name: String,
    }
    impl Layer for Narrow {
        fn name(&self) -> &str {
            &self.name
        }
        fn parameters(&self) -> Vec<ParamSpec> {
            Vec::new()
        }
        fn forward(&self, x: Tensor<3>, _: &LayerCx) -> Tensor<3> {
            x.narrow(2, 0, 8)
        }
        fn cost(&self, _: BatchShape) -> LayerCost {
            LayerCost::default()
        }
    }
    for pp in [1, 2] {
        let config = Config { pp, ..config() };
        let narrow = |name: String| match name.as_str() {
            "h.1.more" => Part::Layer(Arc::new(Narrow { name })),
            _ => Part::Layer(Arc::new(Split { name, hidden: 16, is_split: true })),
        };
        let model = with_layers(&config, narrow);
        let trainer = Trainer::builder(fitting(config)).model(model).build().unwrap();
        let error = trainer.train(|_| ()).unwrap_err();
        let said = "model: layer h.1.more gives [1, 8, 8], and [1, 8, 16] is what follows it takes";
        assert!(error.to_string().starts_with(said), "pp {pp}: {error}");
    }
}

/// Before, a layer that said nothing of its cost was predicted to keep nothing, without a word.
#[test]
fn a_layer_that_keeps_more_than_its_cost_says_is_reported_after_the_first_step() {
    let reported = |model: Model| {
        let trainer = Trainer::builder(fitting(config())).model(model).build().unwrap();
        warnings(|| trainer.train(|_| ()).unwrap()).1
    };
    let silent = reported(split(&config(), true));
    assert_eq!(silent.len(), 1, "once: {silent:?}");
    let said = "step 1: a rank has kept more than the costs of its layers say (activation ";
    let named =
        "the cost of h.0.more, h.1.more, h.2.more, h.3.more is all zero; fill in Layer::cost";
    assert!(silent[0].starts_with(said) && silent[0].contains(named), "{silent:?}");
    assert_eq!(reported(stock(&config())), [""; 0], "of stock modules the meter counts the input");
}
