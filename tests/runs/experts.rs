//! Mixture of experts: memory as predicted, checkpoints, files of other tools, text and losses.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use crate::common::{Run, assert_same_bits, run, run_saving_all, tiny};
use crate::counts::check_memory;
use zeropp::config::{Activation, Balance, PackWeights, Precision, Recompute, Resume};
use zeropp::weights::{StoreAs, Weights};
use zeropp::{Config, ExportOptions, Generator, Sampling, config_of, export_checkpoint};

/// A model of six experts, of which each token goes to two.
fn experts(model: &str) -> Config {
    Config {
        model: model.into(),
        activation: Activation::Swiglu,
        experts: Some(6),
        experts_per_token: Some(2),
        kv_heads: Some(1),
        intermediate: Some(24),
        layers: 4,
        steps: 4,
        warmup: None,
        ..tiny()
    }
}

#[test]
fn memory_with_experts_is_as_predicted() {
    for model in ["qwen3-moe", "mixtral"] {
        for (pp, v, zero3) in [(1, 1, 1), (2, 1, 2), (2, 2, 1)] {
            for precision in [Precision::Fp32, Precision::Bf16] {
                for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
                    let packs = precision == Precision::Bf16 && recompute == Recompute::None;
                    // Beside shards the prediction of packed weights is a little high.
                    let pack_weights =
                        if packs && zero3 == 1 { PackWeights::On } else { PackWeights::Off };
                    check_memory(Config {
                        pp,
                        virtual_stages: Some(v),
                        zero3,
                        precision,
                        recompute,
                        pack_weights,
                        ..experts(model)
                    });
                }
            }
        }
    }
}

#[test]
fn memory_with_frozen_experts_is_as_predicted() {
    for freeze in ["model.layers.*.mlp.experts", "model.layers.*.mlp.gate", "model.layers.0"] {
        check_memory(Config { freeze: Some(freeze.into()), pp: 2, ..experts("qwen3-moe") });
    }
}

#[test]
fn a_run_of_experts_goes_on_from_its_checkpoint_on_another_mesh() {
    let dir = tempfile::tempdir().unwrap();
    let [saved, copy] = ["saved", "copy"].map(|name| dir.path().join(name));
    let base = Config { zero3: 2, ..experts("qwen3-moe") };
    let whole = run_saving_all(Config { save: Some(saved.clone()), save_every: 2, ..base.clone() });
    fs::create_dir(&copy).unwrap();
    fs::rename(saved.join("step-000002"), copy.join("step-000002")).unwrap();
    let (save, resume) = (Some(copy), Resume::Must);
    let rest = run(Config { pp: 2, virtual_stages: Some(2), save, resume, ..base });
    let after = Run { steps: whole.steps[2..].to_vec(), ..whole };
    assert_same_bits(&after, &rest, "resumed at pp 2, virtual 2");
}

/// Exported, the matrices of experts have the names of their family, and shapes `[out, in]`; read
/// again they are the same, written by a model that is measured alike and writes the same text.
#[test]
fn experts_are_exported_one_by_one_and_read_back_exactly() {
    for (model, block, gate) in
        [("qwen3-moe", "mlp", "gate_proj"), ("mixtral", "block_sparse_moe", "w1")]
    {
        let dir = tempfile::tempdir().unwrap();
        let [saved, out] = ["saved", "out"].map(|name| dir.path().join(name));
        run(Config { pp: 2, zero3: 2, save: Some(saved.clone()), ..experts(model) });
        let options = ExportOptions { store_as: StoreAs::F32, like: None, ema: false };
        export_checkpoint(&saved, &out, &options).unwrap();
        let files = Weights::open(&out).unwrap();
        let shape = |name: &str| {
            let name = format!("model.layers.3.{block}.{name}.weight");
            files.find(&name).unwrap_or_else(|| panic!("no {name}")).shape.clone()
        };
        assert_eq!(shape("gate"), [6, 16]);
        assert_eq!(shape(&format!("experts.5.{gate}")), [24, 16]);

        let [of_run, of_files] = [&saved, &out].map(|path| config_of(path).unwrap());
        let text = |config: &Config| {
            let prompt: Vec<u32> = b"stage shard ".iter().map(|b| u32::from(*b)).collect();
            let (mut generator, greedy) = (Generator::new(config).unwrap(), Sampling::default());
            generator.generate(&prompt, 12, &greedy, |_| ControlFlow::Continue(())).unwrap()
        };
        assert_eq!(text(&of_run), text(&of_files), "{model}");

        let again = dir.path().join("again");
        let still = Config { steps: 1, lr: 0.0, weight_decay: 0.0, ..experts(model) };
        let (init_from, save) = (Some(out.clone()), Some(again.clone()));
        run(Config { pp: 4, init_from, save, ..still });
        let back = dir.path().join("back");
        export_checkpoint(&again, &back, &options).unwrap();
        let bytes = |folder: &Path| fs::read(folder.join("model.safetensors")).unwrap();
        assert!(bytes(&out) == bytes(&back), "{model}: read on another mesh and written again");
    }
}

/// Experts learn, and a validation loss between steps changes no bit.
#[test]
fn experts_learn_and_are_evaluated() {
    let base = Config { steps: 30, ..experts("qwen3-moe") };
    let plain = run(Config { pp: 2, ..base.clone() });
    assert!(plain.summary.last_loss < plain.summary.first_loss - 0.5, "{:?}", plain.summary);
    let split = Some("90,10".into());
    let watched =
        run(Config { split: split.clone(), eval_every: 10, eval_steps: 1, ..base.clone() });
    assert_same_bits(&run(Config { split, ..base }), &watched, "evaluated");
}

/// The losses of routers are of one micro-batch and one layer, so that no mesh changes a bit of
/// them, nor of the figures that say how tokens are spread.
#[test]
fn balance_keeps_its_bits_and_its_figures_on_any_mesh() {
    let base = Config { balance_weight: Some(0.5), router_z: Some(0.01), ..experts("qwen3-moe") };
    let figures = |run: &Run| run.steps.iter().map(|step| step.experts.clone()).collect::<Vec<_>>();
    let alone = run(base.clone());
    for (pp, v, recompute) in [(2, 1, Recompute::Full), (2, 2, Recompute::Selective)] {
        let other = run(Config { pp, virtual_stages: Some(v), recompute, ..base.clone() });
        assert_same_bits(&alone, &other, &format!("pp {pp}, virtual {v}"));
        assert_eq!(figures(&alone), figures(&other));
    }
    let samples = |micro_batch_size, zero3| Config {
        micro_batch_size,
        zero3,
        micro_batches: Some(8 / micro_batch_size / zero3),
        ..base.clone()
    };
    let [alone_again, sharded] = [1, 2].map(|zero3| run(samples(2, zero3)));
    let first = |run: &Run| run.steps[0].experts.clone().unwrap();
    assert_eq!(first(&alone_again), first(&sharded), "the same weights and micro-batches");
    // Of a sample alone: with one sample a micro-batch both are the same loss.
    let of_samples = |size| run(Config { balance: Balance::Sample, ..samples(size, 1) });
    let [ones, twos] = [1, 2].map(|size| first(&of_samples(size)).balance_loss);
    assert!((ones - twos).abs() < 1e-6 && ones > first(&alone_again).balance_loss + 1e-3);
    let (balance, balance_weight, router_z) = (Balance::None, None, None);
    let without = run(Config { balance, balance_weight, router_z, ..base });
    let last = |run: &Run| run.steps.last().unwrap().experts.clone().unwrap();
    let (balanced, free) = (last(&alone), last(&without));
    assert!(balanced.balance_loss < free.balance_loss, "{balanced:?} {free:?}");
    assert!(balanced.fullest >= 1.0 && balanced.balance_loss >= 0.99, "{balanced:?}");
}
