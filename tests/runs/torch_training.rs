//! Training against PyTorch in float64: 20 steps of a tiny GPT from the same weights and tokens.
//! `fixtures/make_training.py` wrote the figures.

use crate::common::figures::Numbers;
use crate::common::given::{number, salt_of, starting_from};
use crate::common::tiny;
use serde::Deserialize;
use zeropp::config::{Decay, Order, Tokenizer};
use zeropp::layer::Model;
use zeropp::model::gpt::{self, GptShape};
use zeropp::{Config, NamedWeights, StepMetrics, Trainer};

/// How far weights may be from PyTorch's, relative to the largest of their tensor. AdamW divides a
/// gradient by its own size, so that what rounding does to a small one shows in full.
const TOLERANCE: f64 = 4e-6;

#[derive(Deserialize)]
struct Figures {
    steps: u64,
    samples: usize,
    seq: usize,
    hidden: usize,
    heads: usize,
    layers: usize,
    vocabulary: usize,
    tokens: usize,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    decay: Decay,
    warmup: u64,
    lr: f64,
    min_lr: f64,
    clip: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    tied: bool,
    losses: Vec<f64>,
    norms: Vec<f64>,
    /// Names and numbers of elements, in the order of the weights' file.
    parameters: Vec<(String, usize)>,
}

fn model(figures: &Figures, case: &Case) -> Model {
    let model = gpt::build(GptShape {
        layers: figures.layers,
        hidden: figures.hidden,
        heads: figures.heads,
        seq: figures.seq,
        vocabulary: figures.vocabulary,
        vocabulary_multiple: 1,
        tied: case.tied,
        activation: Config::default().activation,
    });
    // The script's weights.
    starting_from(model, |spec| {
        let salt = salt_of(&spec.name);
        let norm = spec.name.contains("ln_") && spec.name.ends_with("weight");
        let base = if norm { 1.0 } else { 0.0 };
        (0..spec.len()).map(|i| base + number(i, salt) / 2048.0).collect()
    })
}

fn config(figures: &Figures, case: &Case, data: &std::path::Path) -> Config {
    Config {
        layers: figures.layers,
        hidden: figures.hidden,
        heads: figures.heads,
        seq: figures.seq,
        tied: case.tied,
        steps: figures.steps,
        data: Some(data.into()),
        tokenizer: Tokenizer::U16,
        order: Order::Sequential,
        micro_batch_size: 1,
        decay: case.decay,
        warmup: Some(case.warmup),
        lr: case.lr,
        min_lr: Some(case.min_lr),
        clip: case.clip,
        beta1: Some(case.beta1),
        beta2: Some(case.beta2),
        eps: Some(case.eps),
        weight_decay: case.weight_decay,
        ..tiny()
    }
}

fn train(config: Config, model: Model) -> (Vec<StepMetrics>, NamedWeights) {
    let trainer = Trainer::builder(config).model(model).build().unwrap();
    let mut steps = Vec::new();
    let (_, weights) = trainer.train_to_weights(|s| steps.push(s.clone())).unwrap();
    (steps, weights)
}

/// Elements whose gradient is not zero but for rounding, of which AdamW makes steps of full size:
/// a key's bias adds the same to all scores of a query, and softmax takes no notice.
fn is_trained(name: &str, i: usize, hidden: usize) -> bool {
    !name.ends_with("attn.c_attn.bias") || !(hidden..2 * hidden).contains(&i)
}

/// The largest distance of any weight from PyTorch's, relative to the largest of its tensor.
fn distance(figures: &Figures, case: &Case, ours: &NamedWeights, theirs: &[f32]) -> f64 {
    let mut at = 0;
    let mut worst = 0f64;
    for (name, n) in &case.parameters {
        let (ours, theirs) = (&ours[name], &theirs[at..at + n]);
        at += n;
        assert_eq!(ours.len(), *n, "{name}");
        let largest = theirs.iter().fold(0f32, |m, x| m.max(x.abs()));
        for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
            if is_trained(name, i, figures.hidden) {
                worst = worst.max(f64::from((a - b).abs() / largest));
            }
        }
    }
    worst
}

#[test]
fn twenty_steps_of_a_gpt_are_pytorch_s() {
    let figures: Figures = serde_json::from_str(include_str!("../fixtures/training.json")).unwrap();
    let mut finals = Numbers::of(include_bytes!("../fixtures/training.bin"));
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("tokens.bin");
    let ids = (0..figures.tokens).map(|i| number(i, 77).rem_euclid(figures.vocabulary as f32));
    std::fs::write(&data, ids.flat_map(|id| (id as u16).to_le_bytes()).collect::<Vec<_>>())
        .unwrap();
    // pp, virtual, zero3, dp, ZeRO-1, unit; the samples of a step are the same.
    let layouts = [(1, 1, 1, 1, false, 12), (2, 2, 2, 1, false, 3), (2, 1, 2, 2, true, 3)];
    for (number, case) in figures.cases.iter().enumerate() {
        let elements: usize = case.parameters.iter().map(|p| p.1).sum();
        let theirs = finals.take(elements);
        for (pp, v, zero3, dp, zero1, unit) in layouts {
            let config = Config {
                pp,
                virtual_stages: Some(v),
                zero3,
                dp,
                zero1,
                micro_batches: Some(figures.samples / (zero3 * dp)),
                unit: Some(unit),
                ..config(&figures, case, &data)
            };
            let what = format!("case {number}, {:?}", (pp, v, zero3, dp, zero1, unit));
            let (steps, weights) = train(config, model(&figures, case));
            for (step, (loss, norm)) in steps.iter().zip(case.losses.iter().zip(&case.norms)) {
                let apart = |ours: f64, theirs: &f64| (ours - theirs).abs() / theirs;
                assert!(apart(step.loss, loss) < 1e-6, "{what}: loss of step {}", step.step);
                let norm = apart(step.grad_norm, norm);
                assert!(norm < 1e-5, "{what}: norm of step {}: {norm:e}", step.step);
            }
            let distance = distance(&figures, case, &weights, &theirs);
            println!("{what}: {distance:.2e}");
            assert!(distance <= TOLERANCE, "{what}: {distance:e} from PyTorch's weights");
        }
    }
    finals.end();
}
