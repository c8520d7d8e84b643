//! Gradients and runs on the device against the CPU's, and layouts against each other.

use std::path::PathBuf;
use std::sync::OnceLock;

use zeropp::config::{DeviceKind, Recompute};
use zeropp::{Config, StepMetrics, Trainer};

use crate::common::text_file;
use crate::kind;

/// One model for all tests: its kernels are compiled once.
pub(crate) fn small() -> Config {
    static TEXT: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, text) = TEXT.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let text = text_file(&folder, 4096);
        (folder, text)
    });
    Config {
        device: kind(),
        data: Some(text.clone()),
        layers: 4,
        hidden: 32,
        heads: 2,
        seq: 16,
        micro_batch_size: 2,
        steps: 4,
        unit: Some(4),
        micro_batches: Some(4),
        virtual_stages: Some(1),
        warmup: Some(1),
        seed: 5,
        timeout_s: 600.0,
        ..Config::default()
    }
}

fn on_cpu(config: Config) -> Config {
    Config { device: DeviceKind::Cpu, ..config }
}

pub(crate) fn steps(config: Config) -> Vec<StepMetrics> {
    let mut steps = Vec::new();
    let trainer = Trainer::new(config).unwrap();
    trainer.train(|step| steps.push(step.clone())).unwrap();
    steps
}

fn norm(x: impl Iterator<Item = f32>) -> f64 {
    x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// Every parameter's gradient within 1e-5 of the CPU's, relative to its length.
#[track_caller]
fn same_gradients(config: Config) {
    let (there, got) = Trainer::new(config.clone()).unwrap().first_gradients().unwrap();
    let (here, wanted) = Trainer::new(on_cpu(config)).unwrap().first_gradients().unwrap();
    assert!((there.loss - here.loss).abs() <= 1e-6 * here.loss, "{} {}", there.loss, here.loss);
    assert_eq!(got.len(), wanted.len());
    let mut worst = (0.0, "");
    for (name, wanted) in &wanted {
        let got = &got[name];
        assert_eq!(got.len(), wanted.len(), "{name}");
        let length = norm(wanted.iter().copied());
        assert!(length > 0.0, "{name} has no gradient");
        let apart = norm(got.iter().zip(wanted).map(|(a, b)| a - b)) / length;
        worst = if apart > worst.0 { (apart, name) } else { worst };
    }
    println!("worst gradient: {} is {:.1e} from the CPU's", worst.1, worst.0);
    assert!(worst.0 <= 1e-5, "{} is {:e} from the CPU's", worst.1, worst.0);
}

/// The same losses and norms within `tolerance`, relative.
#[track_caller]
pub(crate) fn same_curve(a: &[StepMetrics], b: &[StepMetrics], tolerance: f64, what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (a, b) in a.iter().zip(b) {
        let apart = |a: f64, b: f64| (a - b).abs() / b;
        let (loss, norm) = (apart(a.loss, b.loss), apart(a.grad_norm, b.grad_norm));
        println!("{what}: step {}: loss {loss:.1e}, norm {norm:.1e} apart", a.step);
        assert!(loss <= tolerance, "{what}: step {}: loss {} {}", a.step, a.loss, b.loss);
        assert!(norm <= 100.0 * tolerance, "{what}: step {}: norms {norm:e}", a.step);
    }
}

#[test]
fn gradients_are_the_cpus() {
    same_gradients(small());
    let spread = Config { pp: 2, zero3: 2, virtual_stages: Some(2), unit: Some(3), ..small() };
    same_gradients(spread);
    same_gradients(Config { tied: true, recompute: Recompute::Full, pp: 2, ..small() });
}

#[test]
fn layouts_agree_within_rounding() {
    let reference = steps(small());
    assert!(reference[3].loss < reference[0].loss, "it learns");
    same_curve(&reference, &steps(on_cpu(small())), 1e-5, "the CPU");
    let half = Config { micro_batches: Some(2), unit: Some(2), ..small() };
    let quarter = Config { micro_batches: Some(1), unit: Some(1), ..small() };
    let two = Some(2);
    let others = [
        ("P2 V2", Config { pp: 2, virtual_stages: two, ..small() }),
        ("P2 D2", Config { pp: 2, zero3: 2, ..half.clone() }),
        (
            "P2 D2 V2, two units",
            Config { pp: 2, zero3: 2, virtual_stages: two, unit: Some(1), ..half.clone() },
        ),
        ("D2 K2 ZeRO-1", Config { zero3: 2, dp: 2, zero1: true, ..quarter.clone() }),
        ("P2 K2", Config { pp: 2, dp: 2, ..half.clone() }),
        (
            "P2 D2 V2 K2 ZeRO-1, recomputed",
            Config {
                pp: 2,
                zero3: 2,
                dp: 2,
                virtual_stages: two,
                zero1: true,
                recompute: Recompute::Full,
                ..quarter
            },
        ),
        (
            "P2 D2, attention recomputed",
            Config { pp: 2, zero3: 2, recompute: Recompute::Selective, ..half.clone() },
        ),
        (
            "1f1b P2 D2",
            Config { schedule: "1f1b".into(), unit: None, pp: 2, zero3: 2, ..half.clone() },
        ),
        (
            "zb-v P2 D2",
            Config {
                schedule: "zb-v".into(),
                unit: None,
                virtual_stages: two,
                pp: 2,
                zero3: 2,
                ..half
            },
        ),
    ];
    for (what, config) in others {
        same_curve(&steps(config), &reference, 1e-5, what);
    }
}
