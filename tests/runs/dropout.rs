//! Dropout in whole runs: the same elements whatever the layout, and none outside of training. Its
//! gradients are held against stock autodiff in oracle.rs.

use std::path::Path;

use crate::common::{
    Run, assert_bf16_gradients_are_near, assert_same_bits, llama, run, run_saving_all, text_file,
    tiny,
};
use zeropp::config::{Precision, Recompute, Resume};
use zeropp::{Config, Trainer};

fn dropped(data: &Path) -> Config {
    Config {
        data: Some(data.into()),
        layers: 4,
        seq: 24,
        steps: 4,
        unit: Some(6),
        dropout: 0.2,
        ..tiny()
    }
}

#[test]
fn dropout_has_the_same_bits_in_every_layout() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 4000);
    for precision in [Precision::Fp32, Precision::Bf16] {
        for base in [dropped(&text), llama(dropped(&text))] {
            let base = Config { precision, ..base };
            let reference = run(base.clone());
            let summary = &reference.summary;
            assert_eq!(summary.peak_bytes, summary.predicted_bytes, "{precision}");
            let none = run(Config { dropout: 0.0, ..base.clone() });
            assert_ne!(reference.steps[0].loss.to_bits(), none.steps[0].loss.to_bits());
            let schedule = |name: &str| Config {
                schedule: name.into(),
                unit: None,
                pp: 2,
                virtual_stages: None,
                ..base.clone()
            };
            let two = Some(2);
            let others = [
                Config { pp: 2, virtual_stages: two, ..base.clone() },
                Config { pp: 4, recompute: Recompute::Full, ..base.clone() },
                Config { threads: Some(3), recompute: Recompute::Selective, ..base.clone() },
                Config { pp: 2, prefetch: 2, virtual_stages: two, ..base.clone() },
                Config { recompute: Recompute::Full, ..schedule("1f1b") },
                schedule("gpipe"),
                schedule("zb-v"),
            ];
            for config in others {
                let what = format!("{precision} {} pp {}", config.schedule, config.pp);
                let run = run(config);
                assert_same_bits(&reference, &run, &what);
                let summary = &run.summary;
                assert_eq!(summary.peak_bytes, summary.predicted_bytes, "{what}");
            }
        }
    }
}

/// Documents hide keys beside those that are dropped, and begin anywhere in a sample.
#[test]
fn documents_and_replicas_have_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 4000);
    let document_end = Some(usize::from(b'\n'));
    let base = Config { document_mask: true, document_end, ..llama(dropped(&text)) };
    let reference = run(base.clone());
    let recomputed = Config { pp: 2, recompute: Recompute::Full, ..base.clone() };
    assert_same_bits(&reference, &run(recomputed), "documents, recomputed");
    let sharded = Config { zero3: 2, dp: 2, ..base };
    let reference = run(sharded.clone());
    let others = [
        Config { zero1: true, ..sharded.clone() },
        Config { pp: 2, recompute: Recompute::Full, ..sharded },
    ];
    for config in others {
        let what = format!("replicas, pp {}", config.pp);
        assert_same_bits(&reference, &run(config), &what);
    }
}

/// How a step's samples are spread over micro-batches, shards and replicas shows in rounding alone:
/// each sample has its own masks. Had one other masks, gradients would be others altogether.
#[test]
fn a_sample_has_its_masks_wherever_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let base = Config { micro_batches: Some(12), ..dropped(&text_file(&dir, 4000)) };
    let first = |config: Config| Trainer::new(config).unwrap().first_gradients().unwrap();
    let (metrics, gradients) = first(base.clone());
    let others = [
        Config { micro_batch_size: 3, micro_batches: Some(4), unit: Some(2), ..base.clone() },
        Config { zero3: 2, micro_batches: Some(6), unit: Some(3), ..base.clone() },
        Config { dp: 3, pp: 2, micro_batches: Some(4), unit: Some(4), ..base.clone() },
        Config {
            zero3: 2,
            dp: 2,
            micro_batch_size: 3,
            micro_batches: Some(1),
            unit: Some(1),
            ..base.clone()
        },
    ];
    for config in others {
        let what = format!("{} x {} x {}", config.micro_batch_size, config.zero3, config.dp);
        let (other, others) = first(config);
        assert!((metrics.loss - other.loss).abs() < 1e-6 * metrics.loss, "{what}");
        for (name, g) in &gradients {
            let size = g.iter().fold(0f32, |m, x| m.max(x.abs()));
            let apart = g.iter().zip(&others[name]).map(|(a, b)| (a - b).abs());
            let apart = apart.fold(0f32, f32::max) / size;
            assert!(apart <= 2e-6, "{what}: {name}: {apart:e}");
        }
    }
    let seeded = first(Config { dropout: 0.3, ..base }).0;
    assert!((metrics.loss - seeded.loss).abs() > 1e-6 * metrics.loss);
}

#[test]
fn a_resumed_run_drops_what_it_would_have_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let base = dropped(&text_file(&dir, 4000));
    let save = Some(dir.path().join("ckpt"));
    let saving = Config { save, save_every: 2, keep: 9, ..base.clone() };
    let whole = run_saving_all(saving.clone());
    assert_same_bits(&whole, &run(base), "saving or not");
    let rest = run(Config { resume: Resume::Step(2), pp: 2, zero1: true, ..saving });
    let Run { steps, summary, weights } = whole;
    let after = Run { steps: steps[2..].to_vec(), summary, weights };
    assert_same_bits(&after, &rest, "from step 2, on another mesh");
}

/// A validation loss drops nothing: for the same weights it is that of a run without dropout.
#[test]
fn validation_drops_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let split = Some("9,1".into());
    let with = Config { split, eval_every: 2, ..dropped(&text_file(&dir, 4000)) };
    let without = Config { dropout: 0.0, ..with.clone() };
    let loss = |config: &Config| Trainer::new(config.clone()).unwrap().evaluate().unwrap().loss;
    assert_eq!(loss(&with).to_bits(), loss(&without).to_bits());
    // And it leaves no trace in a training with dropout.
    assert_same_bits(&run(with.clone()), &run(Config { eval_every: 0, ..with }), "evaluated");
}

/// In bf16 the same elements are dropped: gradients are fp32's to bf16's digits.
#[test]
fn bf16_drops_what_fp32_drops() {
    let dir = tempfile::tempdir().unwrap();
    let base = dropped(&text_file(&dir, 4000));
    assert_bf16_gradients_are_near(&Config { hidden: 32, dropout: 0.3, ..base });
}
