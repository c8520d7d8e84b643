//! Optimizers, parameter groups and means of weights on shards: the same bits on any mesh, their
//! state in checkpoints, what they take as predicted.

use std::ops::ControlFlow;
use std::path::Path;

use crate::common::{Run, assert_same_bits, run, run_saving_all, tiny};
use zeropp::config::{Decay, OptimizerKind, Resume};
use zeropp::weights::StoreAs;
use zeropp::{
    Config, ExportOptions, Generator, NamedWeights, Sampling, Trainer, config_of, export_checkpoint,
};

/// A short run with an optimizer and a mean of the weights.
fn with(optimizer: OptimizerKind) -> Config {
    let lr = match optimizer {
        OptimizerKind::Sgd => 0.1,
        OptimizerKind::Adafactor => 0.05,
        _ => 3e-3,
    };
    // Moments in 8 bits are of parameters with 4,096 elements and more.
    let hidden = if optimizer == OptimizerKind::Adamw8bit { 32 } else { 16 };
    Config { optimizer, lr, hidden, layers: 8, steps: 6, ema: Some(0.9), ..tiny() }
}

#[test]
fn no_optimizer_shows_the_mesh_in_any_bit() {
    for optimizer in OptimizerKind::ALL.iter().copied() {
        let reference = run(with(optimizer));
        assert!(reference.summary.last_loss < reference.summary.first_loss, "{optimizer}");
        for (pp, v) in [(2, 2), (4, 1)] {
            let config = Config { pp, virtual_stages: Some(v), ..with(optimizer) };
            assert_same_bits(&reference, &run(config), &format!("{optimizer} pp {pp}"));
        }
        // Shards and replicas cut the sums of gradients; what comes after them, nothing does.
        let base = Config { zero3: 2, dp: 2, ..with(optimizer) };
        let reference = run(base.clone());
        let zero1 = Config { zero1: true, pp: 2, ..base.clone() };
        assert_same_bits(&reference, &run(zero1), &format!("{optimizer} zero1, pp 2"));
        let threads = Config { threads: Some(3), pp: 2, ..base };
        assert_same_bits(&reference, &run(threads), &format!("{optimizer}, 3 threads"));
    }
}

/// A run of `config` that saves after steps 3 and 6 into `folder`.
fn saved(config: Config, folder: &Path) -> Run {
    let save = Some(folder.to_path_buf());
    run_saving_all(Config { save, save_every: 3, ..config })
}

#[test]
fn a_checkpoint_of_any_optimizer_goes_on_with_the_same_bits_on_another_mesh() {
    for optimizer in OptimizerKind::ALL.iter().copied() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("ckpt");
        let base = Config { zero3: 2, dp: 2, ..with(optimizer) };
        let whole = saved(base.clone(), &folder);
        let mean = mean_of(&folder, &base);
        let resumed = Config {
            save: Some(folder.clone()),
            resume: Resume::Step(3),
            zero1: true,
            pp: 2,
            ..base.clone()
        };
        let rest = run(resumed);
        let half = Run { steps: whole.steps[3..].to_vec(), ..whole };
        assert_same_bits(&half, &rest, &format!("{optimizer}"));
        assert!(mean_of(&folder, &base) == mean, "{optimizer}: the mean of the weights");
    }
}

/// The mean of the weights that the newest checkpoint has.
fn mean_of(folder: &Path, config: &Config) -> NamedWeights {
    let init_from = Some(folder.to_path_buf());
    // A step of no size leaves the weights.
    let still = Config { lr: 0.0, steps: 1, warmup: None, min_lr: None, ..config.clone() };
    let still = Config { init_ema: true, weight_decay: 0.0, init_from, ..still };
    run(Config { optimizer: OptimizerKind::Adamw, ema: None, ..still }).weights
}

#[test]
fn the_mean_is_of_the_weights_after_each_step_and_is_read_where_it_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("ckpt");
    let config = Config { warmup: Some(0), decay: Decay::Constant, ..tiny() };
    let config = Config { layers: 4, ema: Some(0.75), ..config };
    let after = |steps, lr| run(Config { steps, lr, ema: None, ..config.clone() }).weights;
    let still = Config { lr: 0.0, weight_decay: 0.0, ema: None, steps: 1, ..config.clone() };
    let mut expected = run(still).weights;
    for steps in [1, 2] {
        for (name, values) in after(steps, config.lr) {
            let mean = expected.get_mut(&name).unwrap();
            mean.iter_mut().zip(values).for_each(|(mean, x)| *mean += (x - *mean) * 0.25);
        }
    }
    saved(Config { steps: 2, zero3: 2, micro_batches: Some(3), ..config.clone() }, &folder);
    let read = mean_of(&folder, &config);
    for (name, mean) in &read {
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 2e-5;
        assert!(mean.iter().zip(&expected[name]).all(close), "{name}");
    }
    // Text and exported files are of it, too.
    let of_mean = Config { init_ema: true, ..config_of(&folder).unwrap() };
    let text = |config: &Config| {
        let mut generator = Generator::new(config).unwrap();
        let greedy = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };
        generator.generate(&[1, 2, 3], 4, &greedy, |_| ControlFlow::Continue(())).unwrap()
    };
    let out = dir.path().join("exported");
    let options = ExportOptions { store_as: StoreAs::F32, like: None, ema: true };
    export_checkpoint(&folder, &out, &options).unwrap();
    assert_eq!(text(&of_mean), text(&config_of(&out).unwrap()));
    let read = |ema| {
        let to = dir.path().join(format!("again-{ema}"));
        export_checkpoint(&folder, &to, &ExportOptions { ema, ..options.clone() }).unwrap();
        std::fs::read(to.join("model.safetensors")).unwrap()
    };
    assert!(read(true) != read(false));
    // A run without one has none to give.
    let plain = dir.path().join("plain");
    saved(Config { ema: None, steps: 2, ..config.clone() }, &plain);
    let error = export_checkpoint(&plain, &dir.path().join("no"), &options).unwrap_err();
    assert!(error.to_string().contains("has no moving average of the weights"), "{error}");
    let init_from = Some(plain);
    let asked = Config { init_ema: true, init_from, ema: None, ..config };
    let error = Trainer::new(asked).err().expect("nothing to read").to_string();
    assert!(error.starts_with("init-from:ema = true: "), "{error}");
}

#[test]
fn a_checkpoint_of_another_optimizer_is_refused_with_what_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("ckpt");
    let config = Config { layers: 4, ema: None, steps: 3, ..with(OptimizerKind::Sgd) };
    saved(config.clone(), &folder);
    let again = |change: &dyn Fn(&mut Config)| {
        let (save, resume) = (Some(folder.clone()), Resume::Newest);
        let mut config = Config { save, resume, steps: 4, ..config.clone() };
        change(&mut config);
        Trainer::new(config).map(drop).map_err(|e| e.to_string())
    };
    let other = again(&|c| c.optimizer = OptimizerKind::Lion).unwrap_err();
    let has = "has momentum_buffer of wte.weight, and optimizer lion keeps exp_avg; use the";
    assert!(other.contains(has), "{other}");
    let none = again(&|c| c.momentum = Some(0.0)).unwrap_err();
    assert!(
        none.contains("the checkpoint has momentum_buffer of")
            && none.contains("optimizer sgd keeps nothing"),
        "{none}"
    );
    again(&|_| ()).unwrap();
    // A mean may begin later, and end.
    again(&|c| c.ema = Some(0.9)).unwrap();
}

#[test]
fn optimizer_memory_is_predicted() {
    for optimizer in OptimizerKind::ALL.iter().copied() {
        for (zero3, dp, zero1) in [(1, 1, false), (2, 1, false), (2, 2, true), (1, 2, true)] {
            for ema in [None, Some(0.99)] {
                let config = Config { zero3, dp, zero1, ema, pp: 2, steps: 2, ..with(optimizer) };
                let config = Config { hidden: 32, warmup: None, ..config };
                let what = format!("{optimizer}, zero3 {zero3}, dp {dp}, ema {ema:?}");
                let plan = Trainer::new(config.clone()).unwrap().plan().clone();
                let run = run(config);
                let (measured, predicted) = (run.summary.peak_bytes, run.summary.predicted_bytes);
                assert_eq!(measured.optimizer, predicted.optimizer, "{what}");
                let gathers = run.steps[0].optimizer_gathers;
                let most = plan.optimizer_gathers_per_rank * (2 * zero3 * dp) as u64;
                // Eight blocks, four on each pipeline rank with two layers of another kind, a
                // gather for each group of several.
                let layers = match optimizer {
                    OptimizerKind::Muon => 4,
                    OptimizerKind::Adafactor => 6,
                    _ => 0,
                };
                assert_eq!(gathers > 0, layers > 0 && zero3 * dp > 1, "{what}");
                let groups = u64::from(zero3 > 1) + u64::from(dp > 1);
                let each = layers * groups;
                assert_eq!((plan.optimizer_gathers_per_rank, gathers), (each, most), "{what}");
            }
        }
    }
}

/// What Muon gathers is sent, and nothing else is more than with AdamW.
#[test]
fn bytes_of_gathered_matrices_are_counted() {
    let stages = Some("8,8".into());
    let base = Config { zero3: 2, pp: 2, stages, steps: 1, warmup: None, ..tiny() };
    let sent = |optimizer| {
        let config = Config { optimizer, ..base.clone() };
        let plan = Trainer::new(config.clone()).unwrap().plan().clone();
        (run(config).steps[0].comm_bytes, plan.optimizer_bytes_per_rank)
    };
    let ((adamw, none), (muon, each)) = (sent(OptimizerKind::Adamw), sent(OptimizerKind::Muon));
    assert_eq!((none, muon - adamw), (0, 4 * each));
}

#[test]
fn weight_decay_follows_its_setting() {
    // Gradients are scaled to nothing: what moves the weights is their decay.
    let after = |no_decay: Option<&str>| {
        let config = Config {
            no_decay: no_decay.map(Into::into),
            optimizer: OptimizerKind::Sgd,
            clip: 1e-30,
            lr: 0.5,
            weight_decay: 0.5,
            momentum: Some(0.0),
            layers: 2,
            steps: 1,
            warmup: Some(0),
            decay: Decay::Constant,
            ..tiny()
        };
        run(config).weights
    };
    let decayed = |weights: &NamedWeights, start: &NamedWeights, name: &str| {
        let sum = |weights: &NamedWeights| weights[name].iter().map(|x| x.abs()).sum::<f32>();
        sum(weights) < 0.9 * sum(start)
    };
    let still = Config { lr: 0.0, weight_decay: 0.0, layers: 2, steps: 1, ..tiny() };
    let start = run(Config { warmup: Some(0), min_lr: None, ..still }).weights;
    for (groups, norms, embeddings) in [
        (None, false, true),
        (Some("norms,biases"), false, true),
        (Some("norms, biases, embeddings"), false, false),
        (Some("embeddings"), true, false),
        (Some("none"), true, true),
    ] {
        let weights = after(groups);
        let decays = |name: &str| decayed(&weights, &start, name);
        assert!(decays("h.0.mlp.c_fc.weight"), "{groups:?}");
        assert_eq!(decays("h.0.ln_1.weight"), norms, "{groups:?}");
        assert_eq!(decays("wte.weight"), embeddings, "{groups:?}");
        assert_eq!(decays("wpe.weight"), embeddings, "{groups:?}");
    }
}
