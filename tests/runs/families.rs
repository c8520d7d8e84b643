//! Every family against transformers: loss, logits and all gradients of tiny models, from the same
//! weights and tokens. `fixtures/families/make_families.py` wrote the figures.

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::figures;
use crate::common::given::{number, salt_of, starting_from};
use crate::common::{assert_same_bits, run, tiny};
use burn::tensor::{Device, Int, Tensor, TensorData};
use serde::Deserialize;
use serde_json::Value;
use zeropp::config::{Activation, Balance, Order, Precision, Recompute, Tokenizer};
use zeropp::layer::Model;
use zeropp::model::decoder::Decoder;
use zeropp::model::{self, Whole};
use zeropp::{Config, NamedWeights, Sampling, Trainer};

const FAMILIES: [&str; 15] = [
    "gpt2",
    "llama2",
    "llama3",
    "biased",
    "mistral",
    "window",
    "qwen2-window",
    "qwen2",
    "qwen3",
    "qwen3-moe",
    "qwen3-moe-all",
    "mixtral",
    "qwen2-moe",
    "dots1",
    "dots1-plain",
];
/// Families that are trained with the losses of their routers, too.
const BALANCED: [&str; 2] = ["qwen3-moe-balanced", "mixtral-balanced"];
/// How far a gradient may be from transformers', relative to the largest element of its tensor.
const GRADIENT: f64 = 5e-6;
/// How far logits may be, absolute.
pub(crate) const LOGITS: f64 = 1e-4;

#[derive(Deserialize)]
pub(crate) struct Figures {
    pub(crate) samples: usize,
    seq: usize,
    /// Samples whose logits are there.
    shown: usize,
    tokens: usize,
    pub(crate) loss: f64,
    /// Weights of the routers' balance loss and z-loss; none are added without.
    balance: Option<f64>,
    z: Option<f64>,
    /// Names and shapes as transformers has them.
    tensors: Vec<(String, Vec<usize>)>,
    /// The same of vectors without a gradient.
    #[serde(default)]
    fixed: Vec<(String, Vec<usize>)>,
    pub(crate) config: Value,
}

/// What transformers made of one family.
pub(crate) struct Family {
    pub(crate) figures: Figures,
    /// Logits of the first samples, `[shown, s, V]`.
    logits: Vec<f32>,
    /// Gradients, transposed to the orientation of our parameters.
    gradients: NamedWeights,
    /// Weights, likewise.
    pub(crate) weights: NamedWeights,
    pub(crate) decoder: Decoder,
}

/// The script's weight `name` in transformers' orientation.
pub(crate) fn initial(name: &str, len: usize) -> Vec<f32> {
    let salt = salt_of(name);
    let norm = (name.contains("norm") || name.contains("ln_")) && name.ends_with("weight");
    let (base, scale) = if norm { (1.0, 1024.0) } else { (0.0, 512.0) };
    (0..len).map(|i| base + number(i, salt) / scale).collect()
}

pub(crate) fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|c| (0..rows).map(move |r| values[r * columns + c])).collect()
}

impl Family {
    pub(crate) fn read(name: &str) -> Self {
        let (figures, mut numbers): (Figures, _) = figures::read(name);
        let config = figures.config.to_string();
        let read = model::hf_config::parse(&config, Path::new("config.json")).unwrap();
        let decoder = read.decoder;
        let logits = numbers.take(figures.shown * figures.seq * decoder.vocabulary);
        let (mut gradients, mut weights) = (NamedWeights::new(), NamedWeights::new());
        let ours: BTreeMap<_, _> =
            decoder.tensors().into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
        let theirs = figures.tensors.len() + figures.fixed.len();
        assert_eq!(ours.len(), theirs, "{name}: as many parameters");
        for (tensor, shape) in &figures.fixed {
            assert_eq!(shape, &ours[tensor].shape, "{name}: {tensor}");
            weights.insert(tensor.clone(), initial(tensor, shape.iter().product()));
        }
        for (tensor, shape) in &figures.tensors {
            let known = ours.get(tensor).unwrap_or_else(|| panic!("{name}: no {tensor}"));
            let n: usize = shape.iter().product();
            let mut both = [numbers.take(n), initial(tensor, n)];
            let mut shape = shape.clone();
            if known.transposed_in_files {
                // A matrix, or one of each expert.
                let of = shape.len() - 2;
                let (rows, columns) = (shape[of], shape[of + 1]);
                let turned = |values: &[f32]| transposed(values, rows, columns);
                both = both.map(|values| values.chunks(rows * columns).flat_map(turned).collect());
                shape[of..].reverse();
            }
            assert_eq!(shape, known.shape, "{name}: {tensor}");
            let [gradient, weight] = both;
            gradients.insert(tensor.clone(), gradient);
            weights.insert(tensor.clone(), weight);
        }
        numbers.end();
        Self { figures, logits, gradients, weights, decoder }
    }

    /// Tokens of the samples whose logits are there, `[shown, s]`.
    pub(crate) fn shown_ids(&self) -> Tensor<2, Int> {
        let (shown, s) = (self.figures.shown, self.figures.seq);
        let ids: Vec<i64> = self.ids().take(shown * s).map(i64::from).collect();
        Tensor::from_data(TensorData::new(ids, [shown, s]), &Device::flex())
    }

    /// How many logits there are.
    pub(crate) fn shown_logits(&self) -> usize {
        self.figures.shown * self.figures.seq * self.decoder.vocabulary
    }

    /// The model, starting from the script's weights.
    fn model(&self) -> Model {
        let model = model::build(self.decoder);
        let weights = self.weights.clone();
        starting_from(model, move |spec| weights[&spec.name].clone())
    }

    /// Tokens of the script's data.
    pub(crate) fn ids(&self) -> impl Iterator<Item = u16> {
        let vocabulary = self.decoder.vocabulary as f32;
        (0..self.figures.tokens).map(move |i| number(i, 77).rem_euclid(vocabulary) as u16)
    }

    pub(crate) fn config(&self, data: &Path) -> Config {
        Config {
            layers: self.decoder.layers,
            hidden: self.decoder.hidden,
            heads: self.decoder.heads,
            seq: self.figures.seq,
            vocab: Some(self.decoder.vocabulary),
            steps: 1,
            warmup: None,
            data: Some(data.into()),
            tokenizer: Tokenizer::U16,
            order: Order::Sequential,
            balance: self.figures.balance.map_or(Balance::None, |_| Balance::MicroBatch),
            balance_weight: self.figures.balance,
            router_z: self.figures.z,
            ..tiny()
        }
    }
}

/// The largest distance of two slices.
pub(crate) fn apart(ours: &[f32], theirs: &[f32]) -> f64 {
    assert_eq!(ours.len(), theirs.len());
    ours.iter().zip(theirs).fold(0.0, |m, (a, b)| f64::max(m, f64::from((a - b).abs())))
}

/// Fails where other parameters have gradients, or one is farther than [`GRADIENT`] from theirs.
pub(crate) fn assert_near_theirs(ours: &NamedWeights, theirs: &NamedWeights, what: &str) {
    assert!(ours.keys().eq(theirs.keys()), "{what}: {:?} and {:?}", ours.keys(), theirs.keys());
    let relative = |(name, theirs): (&'_ String, &Vec<f32>)| {
        let largest = theirs.iter().fold(0f32, |m, x| m.max(x.abs()));
        (apart(&ours[name], theirs) / f64::from(largest), name.clone())
    };
    let worst = theirs.iter().map(relative).max_by(|a, b| a.0.total_cmp(&b.0));
    let (far, name) = worst.expect("parameters that train");
    println!("{what}: gradients {far:.1e} ({name}) apart");
    assert!(far <= GRADIENT, "{what}: {name} is {far:e} apart");
}

#[test]
fn logits_are_those_of_transformers() {
    for name in FAMILIES {
        let family = Family::read(name);
        let ids = family.shown_ids();
        let [shown, s] = ids.dims();
        let model = model::build(family.decoder);
        let logits = model::logits(&model, &family.weights, ids).unwrap();
        assert_eq!(logits.dims(), [shown, s, family.decoder.vocabulary]);
        let logits = logits.into_data().try_to_vec::<f32>().unwrap();
        let apart = apart(&logits, &family.logits);
        println!("{name}: logits {apart:.1e} apart");
        assert!(apart <= LOGITS, "{name}: {apart:e}");
    }
}

#[test]
fn loss_and_gradients_are_those_of_transformers_on_any_mesh() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("tokens.bin");
    // pp, virtual, zero3, recomputation; the samples of a step are the same.
    let meshes = [
        (1, 1, 1, Recompute::None),
        (4, 1, 1, Recompute::Selective),
        (2, 1, 2, Recompute::None),
        (2, 2, 2, Recompute::Full),
    ];
    for name in FAMILIES.into_iter().chain(BALANCED) {
        let family = Family::read(name);
        let bytes: Vec<u8> = family.ids().flat_map(u16::to_le_bytes).collect();
        std::fs::write(&data, bytes).unwrap();
        for (pp, v, zero3, recompute) in meshes {
            let config = Config {
                pp,
                virtual_stages: Some(v),
                zero3,
                micro_batches: Some(family.figures.samples / zero3),
                recompute,
                ..family.config(&data)
            };
            let trainer = Trainer::builder(config).model(family.model()).build().unwrap();
            let (step, gradients) = trainer.first_gradients().unwrap();
            let what = format!("{name}, pp {pp}, virtual {v}, zero3 {zero3}");
            let loss = (step.loss - family.figures.loss).abs() / family.figures.loss;
            assert!(loss < 1e-6, "{what}: loss {} is {loss:e} apart", step.loss);
            println!("{what}: loss {loss:.1e} apart");
            assert_near_theirs(&gradients, &family.gradients, &what);
        }
    }
}

/// Of transformers' `generate`: the ids that follow a prompt, from the script make_greedy.py.
#[derive(Deserialize)]
struct Greedy {
    prompt: Vec<u32>,
    text: Vec<u32>,
    /// The smallest distance of the two largest logits.
    gap: f64,
}

/// With keys and values kept, and by the largest logit of the whole forward.
#[test]
fn greedy_text_is_that_of_transformers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families/greedy.json");
    let text = std::fs::read_to_string(path).unwrap();
    let all: BTreeMap<String, Greedy> = serde_json::from_str(&text).unwrap();
    assert_eq!(all.len(), FAMILIES.len());
    for (name, Greedy { prompt, text, gap }) in all {
        assert!(gap > 10.0 * LOGITS, "{name}: rounding cannot decide");
        let family = Family::read(&name);
        let mut whole = Whole::new(&model::build(family.decoder), |tensor, _, out| {
            out.copy_from_slice(&family.weights[tensor]);
            Ok::<(), ()>(())
        })
        .unwrap();
        let greedy = Sampling::default();
        let (mut new, mut so_far) = (prompt.clone(), prompt);
        for (i, expected) in text.into_iter().enumerate() {
            let kept = whole.extend(&new).unwrap();
            let shape = [1, so_far.len()];
            let ids: Vec<i64> = so_far.iter().map(|id| i64::from(*id)).collect();
            let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, shape), &Device::flex());
            let logits = whole.logits(ids).unwrap().into_data().try_to_vec::<f32>().unwrap();
            let last = &logits[logits.len() - kept.len()..];
            assert!(apart(&kept, last) < 1e-5, "{name}, token {i}: {:e}", apart(&kept, last));
            assert_eq!(greedy.pick(last, 0), expected, "{name}, token {i}");
            assert_eq!(greedy.pick(&kept, 0), expected, "{name}, token {i}, from the past");
            so_far.push(expected);
            new = vec![expected];
        }
    }
}

/// Groups of heads, norms of heads and gates keep the contract: no layout changes a bit.
#[test]
fn layouts_give_the_same_bits() {
    let models = [
        ("llama", None),
        ("qwen2", None),
        ("qwen3", Some(12)),
        ("qwen3-moe", None),
        ("mixtral", None),
        ("qwen2-moe", None),
        ("dots1", Some(12)),
    ];
    for (model, head_dim) in models {
        for precision in [Precision::Fp32, Precision::Bf16] {
            let with = |pp, v, recompute| Config {
                model: model.into(),
                activation: Activation::Swiglu,
                kv_heads: Some(1),
                head_dim,
                layers: 8,
                tied: head_dim.is_some(),
                steps: 3,
                pp,
                virtual_stages: Some(v),
                recompute,
                precision,
                ..tiny()
            };
            let one = run(with(1, 1, Recompute::None));
            let layouts =
                [(4, 1, Recompute::Selective), (2, 2, Recompute::None), (2, 4, Recompute::Full)];
            for (pp, v, recompute) in layouts {
                let what = format!("{model}, {precision}, pp {pp}, virtual {v}, {recompute}");
                assert_same_bits(&one, &run(with(pp, v, recompute)), &what);
            }
        }
    }
}
