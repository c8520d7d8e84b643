//! bf16 compute with fp32 master weights, on the CPU: close to fp32, and the same bits in every
//! layout of the same D and K.

use crate::common::{Run, assert_bf16_gradients_are_near, assert_same_bits, run, text_file};
use zeropp::Config;
use zeropp::config::{PackWeights, Precision, Recompute};

/// A model that learns something in a hundred steps.
fn small(folder: &tempfile::TempDir) -> Config {
    Config {
        data: Some(text_file(folder, 20_000)),
        layers: 4,
        hidden: 32,
        heads: 2,
        seq: 32,
        micro_batch_size: 2,
        unit: Some(2),
        micro_batches: Some(4),
        virtual_stages: Some(1),
        warmup: Some(5),
        steps: 100,
        seed: 3,
        precision: Precision::Bf16,
        ..Config::default()
    }
}

#[test]
fn the_loss_curve_is_fp32s_within_a_percent() {
    let folder = tempfile::tempdir().unwrap();
    let bf16 = run(small(&folder));
    let fp32 = run(Config { precision: Precision::Fp32, ..small(&folder) });
    assert!(bf16.summary.last_loss < 0.5 * bf16.summary.first_loss, "it learns");
    // Means of ten steps: what a curve shows, without the noise of one batch.
    let means = |run: &Run| -> Vec<f64> {
        run.steps.chunks(10).map(|c| c.iter().map(|s| s.loss).sum::<f64>() / 10.0).collect()
    };
    for (i, (b, f)) in means(&bf16).into_iter().zip(means(&fp32)).enumerate() {
        let apart = (b - f).abs() / f;
        assert!(apart <= 0.01, "steps {}0 on: bf16 {b}, fp32 {f}", i);
    }
    // Had everything stayed in fp32, no bit would differ.
    assert_ne!(bf16.summary.last_loss.to_bits(), fp32.summary.last_loss.to_bits());
}

#[test]
fn layouts_of_one_d_and_k_give_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let base = Config { steps: 6, zero3: 2, ..small(&folder) };
    let reference = run(base.clone());
    let two = Some(2);
    let others = [
        ("P2", Config { pp: 2, ..base.clone() }),
        ("P2 V2", Config { pp: 2, virtual_stages: two, ..base.clone() }),
        ("P4", Config { pp: 4, ..base.clone() }),
        (
            "recomputed",
            Config { pp: 2, virtual_stages: two, recompute: Recompute::Full, ..base.clone() },
        ),
        ("attention recomputed", Config { recompute: Recompute::Selective, ..base.clone() }),
        ("packed for each product", Config { pack_weights: PackWeights::Off, ..base.clone() }),
        ("prefetch 2", Config { pp: 2, virtual_stages: two, prefetch: 2, ..base.clone() }),
    ];
    for (what, config) in others {
        assert_same_bits(&reference, &run(config), what);
    }
    let step = Config { unit: Some(4), ..base };
    let f1b1 = Config { schedule: "1f1b".into(), unit: None, pp: 2, ..step.clone() };
    assert_same_bits(&run(step), &run(f1b1), "1f1b");
    let replicas = Config { steps: 6, dp: 2, ..small(&folder) };
    let zero1 = Config { zero1: true, ..replicas.clone() };
    assert_same_bits(&run(replicas), &run(zero1), "zero1");
}

#[test]
fn gradients_are_fp32s_to_bf16s_digits() {
    let folder = tempfile::tempdir().unwrap();
    assert_bf16_gradients_are_near(&Config { zero3: 2, ..small(&folder) });
}
