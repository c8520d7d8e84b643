//! Parameters that do not train, and adapters beside them: the same numbers as without, less
//! memory, and checkpoints of what trains alone.

use std::collections::BTreeMap;
use std::path::Path;

use burn::tensor::{Device, Int, Tensor};

use crate::common::{assert_same_bits, run, run_saving_all, text_file, tiny};
use crate::counts::check_memory;
use zeropp::config::{Activation, Precision, Recompute, Resume};
use zeropp::rng::Rng;
use zeropp::weights::StoreAs;
use zeropp::{
    Config, ExportOptions, NamedWeights, Trainer, config_of, export_adapter, export_checkpoint,
};

fn frozen(patterns: &str) -> Config {
    Config { freeze: Some(patterns.into()), ..tiny() }
}

/// A family with groups of heads, biases and a gate, and adapters of several of its linear maps.
fn adapted(model: &str, targets: &str) -> Config {
    let gated = model != "gpt";
    Config {
        model: model.into(),
        activation: if gated { Activation::Swiglu } else { Activation::GeluTanh },
        kv_heads: gated.then_some(1),
        lora_rank: 3,
        lora_targets: Some(targets.into()),
        ..tiny()
    }
}

fn is_adapter(name: &str) -> bool {
    name.contains(".lora_")
}

fn gradients(config: Config) -> NamedWeights {
    Trainer::new(config).unwrap().first_gradients().unwrap().1
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn freezing_does_not_change_remaining_gradients() {
    for (patterns, precision) in [
        ("wte,h.0,h.*.ln_1.weight,*.c_fc.weight,lm_head", Precision::Fp32),
        ("*.c_attn.bias,h.*.attn.c_proj,wpe,ln_f.bias", Precision::Fp32),
        ("wte,h.0,*.c_attn.weight,*.ln_2", Precision::Bf16),
    ] {
        let config = Config { pp: 2, layers: 4, zero3: 2, precision, ..frozen(patterns) };
        let all = gradients(Config { freeze: None, ..config.clone() });
        let some = gradients(config.clone());
        let shapes = Trainer::new(config).unwrap().shapes();
        let trains = |name: &&String| {
            let is = |pattern: &str| zeropp::model::tuning::matches(pattern, name);
            !patterns.split(',').any(is)
        };
        let expected: Vec<_> = shapes.keys().filter(trains).collect();
        assert_eq!(some.keys().collect::<Vec<_>>(), expected, "{patterns}");
        assert!(some.len() < all.len());
        for (name, gradient) in &some {
            // A bias beside a frozen weight is summed in B, micro-batch by micro-batch.
            match name.ends_with("bias") {
                true => assert!(largest_difference(gradient, &all[name]) < 1e-6, "{name}"),
                false => assert_eq!(bits(gradient), bits(&all[name]), "{patterns}: {name}"),
            }
        }
    }
}

#[test]
fn frozen_weights_stay_and_the_layout_changes_no_bit() {
    let base = frozen("wte,h.0,h.1,h.2,h.3,h.*.ln_1.weight,*.c_fc.weight");
    let before =
        run(Config { lr: 0.0, min_lr: Some(0.0), steps: 1, warmup: None, ..base.clone() }).weights;
    let reference = run(base.clone());
    for (name, values) in &reference.weights {
        let stays =
            name == "wte.weight" || name.ends_with("c_fc.weight") || name.starts_with("h.2.");
        let same = bits(values) == bits(&before[name]);
        assert!(same || !stays, "{name} is frozen");
        assert!(!same || !name.starts_with("h.9.attn.c_attn"), "{name} trains");
    }
    for (what, config) in [
        ("pp 4", Config { pp: 4, ..base.clone() }),
        (
            "a stage of which nothing trains",
            Config { pp: 4, virtual_stages: Some(4), ..base.clone() },
        ),
        ("1f1b", Config { pp: 2, schedule: "1f1b".into(), unit: None, ..base.clone() }),
    ] {
        let of_unit = Config { unit: Some(6), schedule: "gpipe".into(), ..base.clone() };
        match config.unit {
            Some(_) => assert_same_bits(&reference, &run(config), what),
            None => assert_same_bits(&run(Config { unit: None, ..of_unit }), &run(config), what),
        }
    }
    let replicated = Config { dp: 2, zero3: 2, ..base };
    let reference = run(replicated.clone());
    let recompute = Recompute::Full;
    for config in [
        Config { zero1: true, pp: 2, virtual_stages: Some(2), ..replicated.clone() },
        Config { recompute, pp: 2, virtual_stages: Some(4), prefetch: 2, ..replicated },
    ] {
        assert_same_bits(&reference, &run(config), "zero1, recomputed");
    }
}

#[test]
fn memory_is_predicted_without_what_is_frozen() {
    let base = |patterns: &str| Config { hidden: 32, seq: 16, layers: 8, ..frozen(patterns) };
    for patterns in [
        "wte,h.0,h.1",
        "h.*.attn,h.*.ln_2",
        "*.weight",
        "*.c_attn.weight,*.c_fc.weight,h.*.mlp.c_proj.bias,lm_head",
    ] {
        let layout = |pp, v, zero3| Config { pp, virtual_stages: Some(v), zero3, ..base(patterns) };
        check_memory(layout(1, 1, 1));
        check_memory(layout(2, 2, 2));
        check_memory(Config { recompute: Recompute::Full, ..layout(2, 4, 1) });
        check_memory(Config { precision: Precision::Bf16, dp: 2, zero1: true, ..layout(2, 2, 1) });
    }
    let whole = run(Config { steps: 1, warmup: None, ..Config { freeze: None, ..base("") } })
        .summary
        .peak_bytes;
    let some = run(Config { steps: 1, warmup: None, ..base("wte,wpe,h.*.attn,h.*.mlp") })
        .summary
        .peak_bytes;
    assert_eq!(some.parameter_shard, whole.parameter_shard);
    assert!(10 * some.gradient_shard < 3 * whole.gradient_shard, "{some:?} {whole:?}");
    assert!(10 * some.optimizer < 3 * whole.optimizer, "{some:?} {whole:?}");
    assert!(10 * some.weight_stash < whole.weight_stash, "{some:?} {whole:?}");
    assert!(10 * some.activation < 9 * whole.activation, "{some:?} {whole:?}");
}

#[test]
fn memory_of_adapters_is_predicted() {
    for (model, targets) in [
        ("gpt", "all"),
        ("gpt", "c_attn"),
        ("llama", "q,v"),
        ("qwen2", "all"),
        ("qwen3", "k,o,down"),
    ] {
        for precision in [Precision::Fp32, Precision::Bf16] {
            let config = Config { hidden: 32, seq: 16, layers: 8, ..adapted(model, targets) };
            let layout = Config { pp: 2, virtual_stages: Some(2), precision, ..config };
            check_memory(Config { zero3: 2, ..layout.clone() });
            check_memory(Config { recompute: Recompute::Full, ..layout });
        }
    }
}

#[test]
fn adapters_train_alone_with_the_same_bits_on_any_layout() {
    // A text that stays: that of the sources is another with each change, and so is what few steps
    // make of it.
    let dir = tempfile::tempdir().unwrap();
    let data = Some(text_file(&dir, 4000));
    for (model, targets) in [("gpt", "all"), ("qwen3", "q,v,gate,down")] {
        let base = Config { data: data.clone(), ..adapted(model, targets) };
        let reference = run(Config { lr: 3e-2, ..base.clone() });
        assert!(reference.summary.last_loss < reference.summary.first_loss, "{model}");
        let first = gradients(base.clone());
        assert!(first.keys().all(|name| is_adapter(name)), "{model}");
        // B begins with zeros, so that A has no gradient in the first step.
        assert!(
            first.iter().all(|(name, g)| name.ends_with("B.weight") == g.iter().any(|x| *x != 0.0))
        );
        for config in [
            Config { pp: 4, virtual_stages: Some(2), ..base.clone() },
            Config { pp: 2, virtual_stages: Some(4), recompute: Recompute::Full, ..base.clone() },
        ] {
            assert_same_bits(&reference, &run(Config { lr: 3e-2, ..config }), model);
        }
    }
}

/// Random weights of all of a model's parameters.
fn random(shapes: &BTreeMap<String, Vec<usize>>) -> NamedWeights {
    let of = |(name, shape): (&String, &Vec<usize>)| {
        let mut values = vec![0.0; shape.iter().product()];
        Rng::keyed(5, name).fill_normal(0, &mut values);
        let (factor, mean) = if shape.len() == 1 { (0.05, 1.0) } else { (0.1, 0.0) };
        values.iter_mut().for_each(|x| *x = mean + factor * *x);
        (name.clone(), values)
    };
    shapes.iter().map(of).collect()
}

/// left·right, of which either may be transposed by its strides; `[rows, columns]`.
fn product(
    [rows, inner, columns]: [usize; 3],
    left: impl Fn(usize, usize) -> f32,
    right: impl Fn(usize, usize) -> f32,
) -> Vec<f32> {
    let at = |i: usize, j: usize| {
        (0..inner).map(|k| f64::from(left(i, k)) * f64::from(right(k, j))).sum::<f64>()
    };
    (0..rows)
        .flat_map(|i| (0..columns).map(move |j| (i, j)))
        .map(|(i, j)| at(i, j) as f32)
        .collect()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let scale = b.iter().fold(0f32, |m, x| m.max(x.abs()));
    a.iter().zip(b).fold(0f32, |m, (x, y)| m.max((x - y).abs())) / scale
}

/// With W' = W + s·A·B the gradients are dA = s·dW'·Bᵀ and dB = s·Aᵀ·dW': those of the whole model
/// with merged weights, which others check against transformers.
#[test]
fn adapters_have_the_gradients_of_the_merged_weights() {
    for (model, targets) in [("gpt", "all"), ("llama", "q,v"), ("qwen2", "all"), ("qwen3", "k,up")]
    {
        let tuned = Config { layers: 2, lora_alpha: Some(4.5), ..adapted(model, targets) };
        let whole = Config { lora_rank: 0, lora_alpha: None, lora_targets: None, ..tuned.clone() };
        let (rank, scale) = (tuned.lora_rank, 1.5f32);
        let shapes = Trainer::new(tuned.clone()).unwrap().shapes();
        let weights = random(&shapes);
        let mut merged = weights.clone();
        merged.retain(|name, _| !is_adapter(name));
        let adapters = shapes.iter().filter_map(|(name, a)| {
            let map = name.strip_suffix("lora_A.weight")?;
            Some((map.to_owned(), a[0], shapes[&format!("{map}lora_B.weight")][1]))
        });
        let adapters: Vec<_> = adapters.collect();
        for (map, input, output) in &adapters {
            let [a, b] = ["A", "B"].map(|of| &weights[&format!("{map}lora_{of}.weight")]);
            let sizes = [*input, rank, *output];
            let sum = product(sizes, |i, k| a[i * rank + k], |k, j| b[k * output + j]);
            let w = merged.get_mut(&format!("{map}weight")).unwrap();
            w.iter_mut().zip(sum).for_each(|(w, sum)| *w += scale * sum);
        }
        let gradients = |config: &Config, weights: NamedWeights| {
            let trainer = Trainer::builder(config.clone()).weights(weights).build().unwrap();
            trainer.first_gradients().unwrap()
        };
        let (loss, of_adapters) = gradients(&tuned, weights.clone());
        let (whole_loss, of_weights) = gradients(&whole, merged);
        assert!((loss.loss - whole_loss.loss).abs() < 1e-5, "{model}");
        assert_eq!(of_adapters.len(), 2 * adapters.len(), "{model}");
        for (map, input, output) in &adapters {
            let [a, b] = ["A", "B"].map(|of| &weights[&format!("{map}lora_{of}.weight")]);
            let dw = &of_weights[&format!("{map}weight")];
            let dw = |i: usize, j: usize| scale * dw[i * output + j];
            let da = product([*input, *output, rank], dw, |j, k| b[k * output + j]);
            let db = product([rank, *input, *output], |k, i| a[i * rank + k], dw);
            for (of, expected) in [("A", da), ("B", db)] {
                let name = format!("{map}lora_{of}.weight");
                let error = largest_difference(&of_adapters[&name], &expected);
                assert!(error < 2e-5, "{model} {name}: {error:e}");
            }
        }
    }
}

/// The logits of a model on some tokens, from weights by name.
fn logits(config: &Config, weights: &NamedWeights) -> Vec<f32> {
    let decoder = config.decoder(config.vocab.unwrap_or(256)).unwrap();
    let model = zeropp::model::build_tuned(decoder, &config.tuning(&decoder).unwrap());
    let ids = Tensor::<2, Int>::from_data([[5, 250, 17, 0, 99, 4]], &Device::flex());
    zeropp::model::logits(&model, weights, ids).unwrap().into_data().try_to_vec().unwrap()
}

#[test]
fn merged_and_apart_an_adapter_is_the_same_model() {
    let dir = tempfile::tempdir().unwrap();
    for (model, targets) in [("gpt", "all"), ("qwen3", "q,v,o,up,down")] {
        let (base, save) = (dir.path().join(format!("base-{model}")), dir.path().join(model));
        let tuned = Config { layers: 2, steps: 12, lr: 1e-2, ..adapted(model, targets) };
        let whole = Config { lora_rank: 0, lora_targets: None, ..tuned.clone() };
        run(Config { save: Some(base.clone()), ..whole });
        let tuned = Config { init_from: Some(base), save: Some(save.clone()), ..tuned };
        let trained = run(tuned.clone());
        let apart = logits(&tuned, &trained.weights);

        let to = dir.path().join(format!("export-{model}"));
        if model == "gpt" {
            let options = ExportOptions { store_as: StoreAs::F32, like: None, ema: false };
            export_checkpoint(&save, &to, &options).unwrap();
            let merged = run(Config {
                init_from: Some(to),
                steps: 1,
                warmup: None,
                lr: 0.0,
                min_lr: Some(0.0),
                save: None,
                lora_rank: 0,
                lora_targets: None,
                ..tuned.clone()
            });
            assert!(merged.weights.keys().all(|name| !is_adapter(name)));
            let config = Config { lora_rank: 0, lora_targets: None, ..tuned.clone() };
            let together = logits(&config, &merged.weights);
            let error = largest_difference(&together, &apart);
            assert!(error < 1e-5, "{model}: {error:e}");
        }

        let to = dir.path().join(format!("adapter-{model}"));
        let report = export_adapter(&save, &to, StoreAs::F32).unwrap();
        assert_eq!(report.tensors, trained.weights.keys().filter(|n| is_adapter(n)).count());
        let config = std::fs::read_to_string(to.join("adapter_config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&config).unwrap();
        assert_eq!((config["r"].as_u64(), config["lora_alpha"].as_f64()), (Some(3), Some(6.0)));
        assert_eq!(config["fan_in_fan_out"].as_bool(), Some(model == "gpt"));
        let file = zeropp::weights::Weights::open(&to.join("adapter_model.safetensors")).unwrap();
        let (inner, name) = match model {
            "gpt" => ("transformer.", "h.1.attn.c_attn.lora_A.weight"),
            _ => ("", "model.layers.1.self_attn.q_proj.lora_A.weight"),
        };
        let tensor = file.find(&format!("base_model.model.{inner}{name}")).unwrap();
        assert_eq!(tensor.shape, [3, 16]);
        let mut values = vec![0.0; 48];
        file.read(tensor, 0, &mut values).unwrap();
        let ours = &trained.weights[name];
        assert!((0..48).all(|i| values[i] == ours[i % 16 * 3 + i / 16]), "transposed");
    }
    let save = dir.path().join("base-gpt");
    let error = export_adapter(&save, &dir.path().join("none"), StoreAs::F32).unwrap_err();
    assert!(error.to_string().contains("it has no adapters; train some"), "{error}");
}

/// The table of a checkpoint.
fn manifest(folder: &Path) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(folder.join("manifest.json")).unwrap()).unwrap()
}

/// The bytes of the files of a checkpoint.
fn size(folder: &Path) -> u64 {
    let manifest = manifest(folder);
    let files = manifest["files"].as_object().unwrap().values();
    files.map(|file| file["bytes"].as_u64().unwrap()).sum()
}

#[test]
fn checkpoints_have_what_trains_and_go_on_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("base");
    let pretrained = Config { save: Some(base.clone()), steps: 8, layers: 4, ..tiny() };
    run(pretrained);
    let base_step = base.join("step-000008");
    for (what, tuned) in [
        ("lora", Config { layers: 4, ..adapted("gpt", "all") }),
        ("freeze", Config { layers: 4, ..frozen("wte,h.0,h.1,h.2.mlp") }),
    ] {
        let save = dir.path().join(what);
        let tuned = Config {
            init_from: Some(base_step.clone()),
            save: Some(save.clone()),
            save_every: 10,
            lr: 1e-2,
            ..tuned
        };
        let whole = run_saving_all(tuned.clone());
        let saved = manifest(&save.join("step-000010"));
        let names: Vec<_> = saved["parameters"].as_object().unwrap().keys().collect();
        let shapes =
            Trainer::new(Config { save: None, save_every: 0, ..tuned.clone() }).unwrap().shapes();
        assert!(names.len() < shapes.len(), "{what}");
        assert_eq!(names.iter().all(|n| is_adapter(n)), what == "lora");
        assert!(4 * size(&save.join("step-000010")) < 3 * size(&base_step), "{what}");
        assert_eq!(saved["base"]["path"].as_str(), base_step.to_str(), "{what}");

        // Another layout goes on from step 10, to the same bits.
        std::fs::remove_dir_all(save.join("step-000020")).unwrap();
        let layout = Config { pp: 2, virtual_stages: Some(2), ..tuned.clone() };
        let rest = run(Config { resume: Resume::Newest, ..layout });
        assert_eq!(rest.steps.first().map(|s| s.step), Some(11), "{what}");
        for (name, values) in &whole.weights {
            assert_eq!(bits(values), bits(&rest.weights[name]), "{what}: {name}");
        }

        // The adapters with their base are the model that was trained.
        let described = Config { data: None, ..config_of(&save).unwrap() };
        let evaluate = |config: Config| {
            let config =
                Config { split: Some("98,2".into()), eval_every: 1, eval_steps: 2, ..config };
            Trainer::new(config).unwrap().evaluate().unwrap().loss
        };
        let of_base = evaluate(Config { steps: 1, warmup: None, ..config_of(&base).unwrap() });
        let of_tuned = evaluate(Config { steps: 1, warmup: None, ..described.clone() });
        assert!(of_tuned < of_base, "{what}: {of_tuned} {of_base}");
        let again =
            run(Config { lr: 0.0, min_lr: Some(0.0), steps: 1, warmup: None, ..described }).weights;
        for (name, values) in &whole.weights {
            assert_eq!(bits(values), bits(&again[name]), "{what}: {name} of the checkpoint");
        }

        another_base_is_refused(&dir, &base, tuned);
    }
}

/// Other weights under what was trained, and weights that are gone.
fn another_base_is_refused(dir: &tempfile::TempDir, base: &Path, tuned: Config) {
    let other = dir.path().join("other");
    let config = Config { steps: 1, warmup: None, layers: 4, seed: 3, ..tiny() };
    run(Config { save: Some(other.clone()), ..config });
    let save = tuned.save.clone().unwrap();
    let config = Config { init_from: Some(other.clone()), resume: Resume::Newest, ..tuned };
    let error = Trainer::new(config).err().unwrap().to_string();
    assert!(error.contains("the frozen weights were those of"), "{error}");
    let moved = dir.path().join("moved");
    std::fs::rename(base, &moved).unwrap();
    let error = Trainer::new(config_of(&save).unwrap()).err().unwrap().to_string();
    assert!(error.contains("which is not there; put them there again"), "{error}");
    std::fs::rename(moved, base).unwrap();
    std::fs::remove_dir_all(other).unwrap();
}
