//! Counts and memory: what the run measures equals what the schedule says.

use crate::common::{run, tiny};
use zeropp::config::{Activation, PackWeights, Precision, Recompute, StepRange};
use zeropp::meter::{MemoryBytes, MemoryKind};
use zeropp::pipeline::ir::Action;
use zeropp::{Config, Trainer};

#[test]
fn gathers_and_reductions_per_unit() {
    for (pp, v, zero3, b, u) in [(2, 2, 2, 9, 3), (4, 4, 1, 8, 2), (1, 4, 2, 5, 5), (2, 1, 2, 4, 2)]
    {
        let config = Config {
            pp,
            virtual_stages: Some(v),
            zero3,
            micro_batches: Some(b),
            unit: Some(u),
            steps: 2,
            ..tiny()
        };
        let run = run(config);
        let units = b.div_ceil(u);
        for step in &run.steps {
            let all = (pp * zero3 * units) as u64;
            assert_eq!(step.all_gathers, all * (2 * v as u64 - 1));
            assert_eq!(step.reduce_scatters, all * v as u64);
            assert_eq!(step.all_reduces, 0);
        }
    }
}

#[test]
fn one_replica_reduction_per_stage_and_step() {
    let run = run(Config { dp: 2, pp: 2, virtual_stages: Some(2), steps: 2, ..tiny() });
    assert!(run.steps.iter().all(|s| s.all_reduces == 2 * 4));
}

#[test]
fn activations_do_not_grow_with_the_batch() {
    let peak = |b: usize| {
        let config =
            Config { pp: 2, virtual_stages: Some(2), micro_batches: Some(b), steps: 2, ..tiny() };
        run(config).summary.peak_bytes
    };
    let (one, eight) = (peak(3), peak(24));
    assert!(one.activation > 0);
    assert_eq!(one.activation, eight.activation);
    assert_eq!(one.weight_stash, eight.weight_stash);
    assert_eq!(one.gathered, eight.gathered);
}

/// Predicted and measured peaks of every kind, which must be equal; returns them, and the most that
/// was held at once.
pub(crate) fn check_memory(config: Config) -> (MemoryBytes, u64) {
    let what = format!(
        "{} pp {} virtual {:?} zero3 {} dp {} unit {:?} recompute {} schedule {} prefetch {}",
        config.model,
        config.pp,
        config.virtual_stages,
        config.zero3,
        config.dp,
        config.unit,
        config.recompute,
        config.schedule,
        config.prefetch
    );
    let is_packed = config.precision == Precision::Bf16 && config.recompute == Recompute::Full;
    let summary = run(Config { steps: 2, ..config }).summary;
    for kind in MemoryKind::ALL {
        let measured = summary.peak_bytes.get(kind);
        let predicted = summary.predicted_bytes.get(kind);
        assert_eq!(measured, predicted, "{what}: {kind:?} measured, then predicted");
    }
    let [measured, predicted] = [summary.at_once_bytes, summary.predicted_at_once_bytes];
    // The first B of a gather that redoes layers packs their bf16 weights one after the other.
    let close = is_packed && measured <= predicted && predicted - measured <= predicted / 1000;
    assert!(measured == predicted || close, "{what}: {measured} of {predicted} at once");
    (summary.peak_bytes, measured)
}

/// Beside a model that has both, a rank saves the parameters and both moments of one of the two.
#[test]
fn a_rank_has_a_tied_weight_once() {
    const VOCAB: usize = 512;
    let weight = |c: &Config| (4 * VOCAB * c.hidden / c.zero3) as u64;
    let base = Config { steps: 3, vocab: Some(VOCAB), ..tiny() };
    let v = Config { pp: 2, virtual_stages: Some(2), schedule: "zb-v".into(), ..base.clone() };
    for config in [Config { zero3: 2, ..base }, Config { unit: None, ..v }] {
        let measured = |tied| run(Config { tied, ..config.clone() }).summary.peak_bytes;
        let (apart, tied) = (measured(false), measured(true));
        let less = |of: fn(&MemoryBytes) -> u64| of(&apart) - of(&tied);
        assert_eq!(less(|m| m.parameter_shard), weight(&config), "{}", config.schedule);
        assert_eq!(less(|m| m.optimizer), 2 * weight(&config), "{}", config.schedule);
    }
}

#[test]
fn memory_is_predicted() {
    let base = Config { hidden: 32, seq: 16, layers: 8, ..tiny() };
    let with = |pp, v, zero3, u| Config {
        pp,
        virtual_stages: Some(v),
        zero3,
        unit: Some(u),
        ..base.clone()
    };
    let dealt =
        |config: Config| Config { global_batch: Some("11".into()), micro_batches: None, ..config };
    let layouts = [
        with(1, 1, 1, 3),
        with(1, 2, 2, 3),
        with(2, 1, 1, 3),
        with(2, 2, 2, 3),
        with(2, 4, 1, 6),
        with(4, 2, 1, 6),
        with(4, 1, 2, 2),
        Config { recompute: Recompute::Full, ..with(2, 2, 2, 3) },
        Config { recompute: Recompute::Full, ..with(2, 4, 1, 6) },
        // Stages of several layers, of all kinds of order.
        Config { recompute: Recompute::Full, ..with(2, 1, 2, 3) },
        Config {
            recompute: Recompute::Full,
            schedule: "1f1b".into(),
            unit: None,
            ..with(2, 1, 1, 3)
        },
        Config {
            recompute: Recompute::Full,
            schedule: "zb-v".into(),
            unit: None,
            ..with(2, 2, 2, 3)
        },
        Config {
            recompute: Recompute::Full,
            schedule: "bf-pp".into(),
            unit: None,
            ..with(2, 2, 2, 3)
        },
        Config { recompute: Recompute::Selective, ..with(2, 2, 1, 3) },
        Config { dp: 2, ..with(2, 2, 1, 3) },
        Config { micro_batches: Some(9), ..with(2, 2, 1, 3) },
        Config { dp: 3, ..dealt(with(2, 2, 1, 3)) },
        Config { dp: 2, zero1: true, ..dealt(with(2, 1, 1, 2)) },
        Config { precision: Precision::Bf16, ..with(2, 2, 1, 3) },
        Config { precision: Precision::Bf16, ..with(1, 2, 2, 6) },
        Config { precision: Precision::Bf16, recompute: Recompute::Full, ..with(2, 2, 2, 3) },
        Config { precision: Precision::Bf16, pack_weights: PackWeights::Off, ..with(2, 2, 1, 3) },
        Config { dp: 2, zero1: true, ..with(2, 1, 2, 3) },
        Config { prefetch: 0, ..with(2, 4, 1, 3) },
        Config { prefetch: 2, ..with(2, 4, 1, 3) },
        Config { schedule: "gpipe".into(), unit: None, ..with(2, 1, 1, 3) },
        Config { schedule: "1f1b".into(), unit: None, ..with(4, 1, 2, 3) },
        // Copies of parameters on their way through an update.
        Config { log_layers: 1, ..with(2, 2, 2, 3) },
        Config { log_layers: 2, dp: 2, zero1: true, tied: true, ..with(2, 1, 1, 3) },
        // A tied weight of which a rank has both layers.
        Config { tied: true, ..with(1, 2, 2, 3) },
        Config { tied: true, dp: 2, zero1: true, log_layers: 1, ..with(1, 1, 1, 3) },
        Config { tied: true, schedule: "zb-v".into(), unit: None, ..with(2, 2, 1, 3) },
        Config { seq: 512, ..with(2, 2, 1, 3) },
        Config { seq: 512, recompute: Recompute::Selective, ..with(2, 2, 2, 3) },
        Config { precision: Precision::Bf16, recompute: Recompute::Selective, ..with(2, 2, 2, 3) },
    ];
    for layout in layouts {
        check_memory(layout);
    }
}

/// As GPT's: groups of heads, a head size of its own, biases, norms of heads, a gate.
#[test]
fn memory_of_every_family_is_predicted() {
    let of = |model: &str| Config {
        model: model.into(),
        activation: Activation::Swiglu,
        kv_heads: Some(1),
        intermediate: Some(40),
        hidden: 32,
        seq: 16,
        layers: 8,
        ..tiny()
    };
    let families = [
        Config { tied: true, ..of("llama") },
        of("qwen2"),
        Config { head_dim: Some(24), ..of("qwen3") },
        Config { head_dim: Some(24), model: "gpt".into(), activation: Activation::Gelu, ..of("") },
    ];
    for family in families {
        for precision in [Precision::Fp32, Precision::Bf16] {
            for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
                let stages = if recompute == Recompute::Full { 1..3 } else { 1..2 };
                for v in stages {
                    let (virtual_stages, zero3) = (Some(v), 3 - v);
                    let layout = Config { pp: 2, virtual_stages, zero3, ..family.clone() };
                    check_memory(Config { precision, recompute, ..layout });
                }
            }
        }
    }
}

/// Long samples beside a small hidden size, so that scores are a good part of what a block keeps.
fn with_scores() -> Config {
    Config { layers: 8, seq: 64, hidden: 16, heads: 2, steps: 2, pp: 2, ..tiny() }
}

/// Largest measured and predicted activation bytes over ranks, which must be equal.
fn activation(config: Config) -> u64 {
    let what = format!("{} {:?} {}", config.schedule, config.virtual_stages, config.recompute);
    let summary = run(config).summary;
    let measured = summary.peak_bytes.activation;
    assert_eq!(measured, summary.predicted_bytes.activation, "{what}");
    measured
}

#[test]
fn selective_recomputation_keeps_no_scores_on_any_stage() {
    for (schedule, v) in [("zeropp", 1), ("zeropp", 2), ("zeropp", 4), ("zb-h1", 1), ("zb-v", 2)] {
        let base = Config { schedule: schedule.into(), virtual_stages: Some(v), ..with_scores() };
        let base = Config { unit: None, micro_batches: Some(6), ..base };
        let peak = |recompute| activation(Config { recompute, ..base.clone() });
        let (none, selective) = (peak(Recompute::None), peak(Recompute::Selective));
        // A block keeps 16 hidden states of 64 x 16, of which 6 go, and two matrices of 64 x 64.
        assert!(selective as f64 <= 0.5 * none as f64, "{schedule} {v}: {selective} of {none}");
        let full = peak(Recompute::Full);
        assert!(full <= selective, "{schedule} {v}: full {full}, selective {selective}");
    }
}

#[test]
fn full_recomputation_of_one_stage_a_rank_keeps_the_inputs_of_layers() {
    let base = Config { virtual_stages: Some(1), ..with_scores() };
    let peak = |recompute| activation(Config { recompute, ..base.clone() });
    let (full, selective) = (peak(Recompute::Full), peak(Recompute::Selective));
    assert!(2 * full < selective, "{full} of {selective}");
    let notes = |config| Trainer::new(config).unwrap().plan().notes.clone();
    let full = Config { recompute: Recompute::Full, ..base.clone() };
    assert_eq!(notes(full), Vec::<String>::new());
    let bf16 = Config { recompute: Recompute::Selective, precision: Precision::Bf16, ..base };
    assert_eq!(notes(bf16), Vec::<String>::new());
}

#[test]
fn a_unit_that_another_would_beat_is_named() {
    let notes = |unit| {
        let config = Config { pp: 4, virtual_stages: Some(2), unit, ..tiny() };
        let trainer = Trainer::new(Config { micro_batches: Some(8), ..config }).unwrap();
        (trainer.plan().units.clone(), trainer.plan().notes.clone())
    };
    assert_eq!(notes(None), (vec![8], Vec::new()));
    let (units, said) = notes(Some(7));
    assert_eq!(units, [7, 1]);
    assert!(said[0].starts_with("unit = 7: the last unit has 1 of 7"), "{said:?}");
}

/// What a rank without shards holds: parameters and moments, and of the gradient a whole one
/// where one unit makes the step.
#[test]
fn memory_that_is_shared_is_counted_once() {
    let base = Config { virtual_stages: Some(2), steps: 2, ..tiny() };
    let peak = |unit| run(Config { unit: Some(unit), ..base.clone() }).summary.peak_bytes;
    let (one, two) = (peak(6), peak(3));
    assert_eq!((one.gathered, one.gradient), (0, 0));
    assert_eq!(one.gradient_shard, one.parameter_shard);
    assert_eq!(two.gathered, 0);
    assert!(two.gradient > 0, "the second unit has a buffer of its own");
    let shared = run(Config { zero3: 2, ..base.clone() }).summary.peak_bytes;
    assert!(shared.gathered > 0 && shared.gradient > 0);
    let cast = run(Config { precision: Precision::Bf16, ..base }).summary.peak_bytes;
    assert!(cast.gathered > 0, "a cast is a copy");
}

#[test]
fn full_recomputation_cuts_the_peak_as_predicted() {
    let base = Config { pp: 2, virtual_stages: Some(4), unit: Some(6), ..tiny() };
    let peak = |recompute| {
        let config = Config { recompute, steps: 1, warmup: Some(0), ..base.clone() };
        let predicted = Trainer::new(config.clone()).unwrap().plan().clone();
        let most = predicted.ranks.iter().map(|r| r.held.peaks.activation).max().unwrap();
        (run(config).summary.peak_bytes.activation as f64, most as f64)
    };
    let (none, none_predicted) = peak(Recompute::None);
    let (full, full_predicted) = peak(Recompute::Full);
    assert!(full < 0.6 * none, "{full} against {none}");
    let (cut, predicted) = (full / none, full_predicted / none_predicted);
    assert!((cut - predicted).abs() < 0.1 * predicted, "{cut} against {predicted}");
}

/// A setting that only the command obeyed would be one that a program believes in: before, the
/// file was checked, and never written.
#[test]
fn the_trainer_writes_the_metrics_that_the_settings_ask_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.jsonl");
    let save = Some(dir.path().join("ckpt"));
    let config = Config { metrics: Some(path.clone()), save, steps: 3, ..crate::common::tiny() };
    let read = || {
        let text = std::fs::read_to_string(&path).unwrap();
        // Of serde_json's own numbers the last bit may differ.
        let exact = |line: &str| -> f64 {
            let digits = line.split("\"loss\":").nth(1).unwrap();
            digits[..digits.find([',', '}']).unwrap()].parse().unwrap()
        };
        let parse = |line: &str| {
            let step = serde_json::from_str::<zeropp::StepMetrics>(line).unwrap();
            zeropp::StepMetrics { loss: exact(line), ..step }
        };
        let steps = text.lines().filter(|line| line.starts_with("{\"step\""));
        steps.map(parse).collect::<Vec<_>>()
    };
    let mut seen = Vec::new();
    let trainer = Trainer::new(config.clone()).unwrap();
    trainer
        .train(|step| {
            assert_eq!(read().last().map(|s| s.step), Some(step.step), "written at once");
            seen.push((step.step, step.loss.to_bits()));
        })
        .unwrap();
    let written = || read().iter().map(|s| (s.step, s.loss.to_bits())).collect::<Vec<_>>();
    assert_eq!(written(), seen);
    // A resumed run goes on in the same file.
    let resumed = Config { steps: 4, resume: true.into(), ..config };
    Trainer::new(resumed.clone())
        .unwrap()
        .train(|s| seen.push((s.step, s.loss.to_bits())))
        .unwrap();
    assert_eq!(written(), seen);
    assert_eq!(seen.len(), 4);
    // Gradients for a comparison are no run.
    let other = Config { save: None, resume: false.into(), ..resumed };
    Trainer::new(other).unwrap().first_gradients().unwrap();
    assert_eq!(written(), seen);
}

#[test]
fn a_trace_holds_the_steps_that_are_asked_for() {
    let steps = |first, last| Some(StepRange { first, last });
    for (trace_steps, kept) in [(steps(2, 3), 2), (steps(4, 90), 2), (None, 5)] {
        let config = Config { pp: 2, layers: 2, steps: 5, trace_steps, ..tiny() };
        let (_, timeline) = Trainer::new(config).unwrap().train_to_timeline(|_| ()).unwrap();
        for rank in &timeline.ranks {
            let ends = rank.spans.iter().filter(|span| span.action == Action::OptimizerStep);
            assert_eq!(ends.count(), kept, "{trace_steps:?}");
        }
    }
    let beyond = Config { steps: 5, trace_steps: steps(6, 7), ..tiny() };
    let error = beyond.validate().unwrap_err().to_string();
    assert!(error.starts_with("trace:steps = 6..7: the run has 5 steps"), "{error}");
}
