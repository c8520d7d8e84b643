//! Counts and memory: what the run measures equals what the schedule says.

mod common;

use common::{run, tiny};
use zeropp::config::Recompute;
use zeropp::meter::MemoryKind;
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

/// Predicted and measured peaks of every kind within 10 %.
fn check_memory(config: Config) {
    let what = format!(
        "pp {} virtual {:?} zero3 {} dp {} unit {:?} recompute {} schedule {} prefetch {}",
        config.pp,
        config.virtual_stages,
        config.zero3,
        config.dp,
        config.unit,
        config.recompute,
        config.schedule,
        config.prefetch
    );
    let summary = run(Config { steps: 2, ..config }).summary;
    for kind in MemoryKind::ALL {
        let measured = summary.peak_bytes.get(kind) as f64;
        let predicted = summary.predicted_bytes.get(kind) as f64;
        let apart = (measured - predicted).abs();
        assert!(
            apart <= 0.1 * measured.max(predicted),
            "{what}: {kind:?} measured {measured}, predicted {predicted}"
        );
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
        Config { recompute: Recompute::Selective, ..with(2, 2, 1, 3) },
        Config { dp: 2, ..with(2, 2, 1, 3) },
        Config { dp: 2, zero1: true, ..with(2, 1, 2, 3) },
        Config { prefetch: 0, ..with(2, 4, 1, 3) },
        Config { prefetch: 2, ..with(2, 4, 1, 3) },
        Config { schedule: "gpipe".into(), unit: None, ..with(2, 1, 1, 3) },
        Config { schedule: "1f1b".into(), unit: None, ..with(4, 1, 2, 3) },
    ];
    for layout in layouts {
        check_memory(layout);
    }
}

#[test]
fn full_recomputation_cuts_the_peak_as_predicted() {
    let base = Config { pp: 2, virtual_stages: Some(4), unit: Some(6), ..tiny() };
    let peak = |recompute| {
        let config = Config { recompute, steps: 1, warmup: Some(0), ..base.clone() };
        let predicted = Trainer::new(config.clone()).unwrap().plan().clone();
        let most = predicted.ranks.iter().map(|r| r.memory.activation).max().unwrap();
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
    let config = Config { metrics: Some(path.clone()), save, steps: 3, ..common::tiny() };
    let read = || {
        let text = std::fs::read_to_string(&path).unwrap();
        let parse = |line: &str| serde_json::from_str::<zeropp::StepMetrics>(line).unwrap();
        text.lines().map(parse).collect::<Vec<_>>()
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
    let resumed = Config { steps: 4, resume: true, ..config };
    Trainer::new(resumed.clone())
        .unwrap()
        .train(|s| seen.push((s.step, s.loss.to_bits())))
        .unwrap();
    assert_eq!(written(), seen);
    assert_eq!(seen.len(), 4);
    // Gradients for a comparison are no run.
    let other = Config { save: None, resume: false, ..resumed };
    Trainer::new(other).unwrap().first_gradients().unwrap();
    assert_eq!(written(), seen);
}
