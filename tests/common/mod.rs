//! What the integration tests share: small runs and their results, to the bit.

#![allow(dead_code)] // Each test file uses its own part.

pub(crate) mod captured;
pub(crate) mod figures;
pub(crate) mod given;
pub(crate) mod stock;

use std::path::PathBuf;

use zeropp::config::{Activation, Precision};
use zeropp::{Config, NamedWeights, StepMetrics, Summary, Trainer};

/// A model small enough for hundreds of runs, with enough layers for P·V = 16.
pub(crate) fn tiny() -> Config {
    Config {
        layers: 16,
        hidden: 16,
        heads: 2,
        seq: 8,
        micro_batch_size: 1,
        steps: 20,
        unit: Some(3),
        micro_batches: Some(6),
        virtual_stages: Some(1),
        lr: 3e-3,
        warmup: Some(2),
        seed: 11,
        timeout_s: 60.0,
        ..Config::default()
    }
}

/// The same run of a LLaMA whose queries share keys and values.
pub(crate) fn llama(config: Config) -> Config {
    let (kv_heads, activation) = (Some(1), Activation::Swiglu);
    Config { model: "llama".into(), kv_heads, activation, ..config }
}

/// Everything a run produced that must not depend on the layout.
pub(crate) struct Run {
    pub(crate) steps: Vec<StepMetrics>,
    pub(crate) summary: Summary,
    pub(crate) weights: NamedWeights,
}

pub(crate) fn run(config: Config) -> Run {
    let trainer = Trainer::new(config).expect("a good configuration");
    let mut steps = Vec::new();
    let (summary, weights) =
        trainer.train_to_weights(|s| steps.push(s.clone())).expect("a run that ends well");
    Run { steps, summary, weights }
}

/// Runs to the end like [`run`], and no step before the checkpoint that is due by then is there: a
/// save that is due while one is under way is left out.
pub(crate) fn run_saving_all(config: Config) -> Run {
    let (folder, every) = (config.save.clone().expect("a run that saves"), config.save_every);
    let trainer = Trainer::new(config).expect("a good configuration");
    let first = trainer.resumed().map_or(0, |resumed| resumed.step);
    let mut steps = Vec::new();
    let trained = trainer.train_to_weights(|s| {
        let due = (s.step - 1).checked_div(every).unwrap_or(0) * every;
        if due > first {
            await_checkpoint(&folder, due);
        }
        steps.push(s.clone());
    });
    let (summary, weights) = trained.expect("a run that ends well");
    Run { steps, summary, weights }
}

/// Waits until the checkpoint of `step` is complete.
pub(crate) fn await_checkpoint(folder: &std::path::Path, step: u64) {
    let begin = std::time::Instant::now();
    while !folder.join(format!("step-{step:06}")).exists() {
        assert!(begin.elapsed().as_secs() < 60, "no checkpoint after step {step}");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Fails with the first difference in any bit of loss, gradient norm, weights, or validation loss
/// where both have one.
pub(crate) fn assert_same_bits(a: &Run, b: &Run, what: &str) {
    assert_eq!(a.steps.len(), b.steps.len(), "{what}");
    for (x, y) in a.steps.iter().zip(&b.steps) {
        let bits = |s: &StepMetrics| (s.loss.to_bits(), s.grad_norm.to_bits());
        // One of them may be the run that does not evaluate.
        if let (Some(x_eval), Some(y_eval)) = (&x.eval, &y.eval) {
            let [x_loss, y_loss] = [x_eval, y_eval].map(|eval| eval.loss.to_bits());
            assert_eq!(x_loss, y_loss, "{what}: step {}: validation loss", x.step);
        }
        assert_eq!(
            bits(x),
            bits(y),
            "{what}: step {}: loss {} / {}, norm {} / {}",
            x.step,
            x.loss,
            y.loss,
            x.grad_norm,
            y.grad_norm
        );
    }
    assert_eq!(a.weights.len(), b.weights.len(), "{what}");
    for (name, x) in &a.weights {
        let y = &b.weights[name];
        let same = x.len() == y.len() && x.iter().zip(y).all(|(x, y)| x.to_bits() == y.to_bits());
        assert!(same, "{what}: weights of {name} differ");
    }
}

/// Fails where a gradient of the first step in bf16 is more than 5 % of its length from fp32's.
pub(crate) fn assert_bf16_gradients_are_near(config: &Config) {
    let gradients = |precision| {
        let trainer = Trainer::new(Config { precision, ..config.clone() });
        trainer.unwrap().first_gradients().unwrap().1
    };
    let (bf16, fp32) = (gradients(Precision::Bf16), gradients(Precision::Fp32));
    let length = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    for (name, f) in &fp32 {
        let apart: Vec<f32> = bf16[name].iter().zip(f).map(|(b, f)| b - f).collect();
        let relative = length(&apart) / length(f);
        assert!(relative < 0.05, "{name}: {relative}");
    }
}

/// A text file of pseudo-random words in a temporary folder.
pub(crate) fn text_file(dir: &tempfile::TempDir, bytes: usize) -> PathBuf {
    let path = dir.path().join("text.txt");
    let words = ["unit ", "stage ", "shard ", "gather ", "bubble ", "loss\n"];
    let mut state = 1u64;
    let mut text = String::new();
    while text.len() < bytes {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        text.push_str(words[(state >> 33) as usize % words.len()]);
    }
    std::fs::write(&path, text).expect("temporary file");
    path
}
