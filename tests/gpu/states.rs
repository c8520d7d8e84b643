//! What optimizers keep, in pinned memory of the GPU's host.

use zeropp::Config;
use zeropp::config::{DeviceKind, OptimizerKind, Precision, Resume};

use crate::common::{run, run_saving_all};
use crate::kind;
use crate::training::small;

/// Losses, norms and predicted memory: of updates beside the next step, whole stages at a time, and
/// of those at a step's end.
#[test]
fn states_on_the_host_change_no_digit_and_memory_is_as_predicted() {
    if kind() != DeviceKind::Cuda {
        return;
    }
    let base = Config { layers: 6, virtual_stages: Some(4), clip: 0.5, steps: 3, ..small() };
    let two = Config { pp: 2, virtual_stages: Some(3), ..base.clone() };
    for config in [
        base.clone(),
        Config { ema: Some(0.9), precision: Precision::Bf16, ..two.clone() },
        Config { optimizer: OptimizerKind::Muon, zero3: 2, ..base.clone() },
        Config { optimizer: OptimizerKind::Adamw8bit, layers: 12, virtual_stages: Some(1), ..two },
    ] {
        let kept = run(config.clone());
        let out = run(Config { optimizer_out: Some("host".into()), ..config.clone() });
        let Config { optimizer, precision, pp, zero3, dp, virtual_stages, .. } = &config;
        let what = format!("{optimizer} {precision} {pp}x{zero3}x{dp}, virtual {virtual_stages:?}");
        // Muon's operations are fused as they come, which is a matter of rounding.
        let apart = if *optimizer == OptimizerKind::Muon { 1e-6 } else { 0.0 };
        for (got, wanted) in out.steps.iter().zip(&kept.steps) {
            assert_eq!(got.loss, wanted.loss, "{what}");
            let norms = [got.grad_norm, wanted.grad_norm];
            assert!((norms[0] - norms[1]).abs() <= apart * norms[1], "{what}: {norms:?}");
        }
        let (held, predicted) = (&out.summary.peak_bytes, &out.summary.predicted_bytes);
        println!(
            "{what}: {} of {} kept, {} on the host",
            held.optimizer, kept.summary.peak_bytes.optimizer, held.host_state
        );
        assert!(
            held.host_state > 0 && held.optimizer < kept.summary.peak_bytes.optimizer,
            "{what}"
        );
        assert_eq!(
            (held.host_state, held.optimizer),
            (predicted.host_state, predicted.optimizer),
            "{what}"
        );
        let most = out.summary.at_once_bytes;
        let bounds = [out.summary.predicted_at_once_bytes, kept.summary.at_once_bytes];
        println!("at once {most}, predicted and kept {bounds:?}");
        assert!(bounds.iter().all(|bound| most <= *bound), "{what}: {most} of {bounds:?}");
    }
}

#[test]
fn a_run_with_states_on_the_host_is_resumed() {
    if kind() != DeviceKind::Cuda {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let base = Config { ema: Some(0.9), virtual_stages: Some(4), ..small() };
    let kept = run(base.clone());
    let save = Some(folder.path().into());
    let out = Config { optimizer_out: Some("host".into()), save, save_every: 2, ..base };
    run_saving_all(out.clone());
    let rest = run(Config { resume: Resume::Step(2), ..out });
    assert_eq!(rest.steps.len(), 2);
    for (got, wanted) in rest.steps.iter().zip(&kept.steps[2..]) {
        assert_eq!((got.loss, got.grad_norm), (wanted.loss, wanted.grad_norm));
    }
}
