//! Activations that go out to pinned memory of the GPU's host.

use zeropp::config::{DeviceKind, Precision, Recompute};
use zeropp::{Config, Summary};

use crate::common::run;
use crate::kind;
use crate::training::small;

#[test]
fn copies_to_the_host_change_no_digit_and_memory_is_as_predicted() {
    if kind() != DeviceKind::Cuda {
        return;
    }
    let base = Config {
        layers: 8,
        virtual_stages: Some(4),
        unit: Some(8),
        micro_batches: Some(8),
        recompute: Recompute::None,
        ..small()
    };
    for config in [
        base.clone(),
        Config { pp: 2, precision: Precision::Bf16, ..base.clone() },
        Config { pp: 2, recompute: Recompute::Selective, ..base.clone() },
        Config { pp: 2, recompute: Recompute::Full, ..base },
    ] {
        let kept = run(config.clone());
        let out = run(Config { recompute_out: Some("host".into()), ..config.clone() });
        let what = format!("{} {} pp {}", config.recompute, config.precision, config.pp);
        for (got, wanted) in out.steps.iter().zip(&kept.steps) {
            assert_eq!((got.loss, got.grad_norm), (wanted.loss, wanted.grad_norm), "{what}");
        }
        let peaks = |summary: &Summary| (summary.peak_bytes, summary.predicted_bytes);
        let ((kept, kept_predicted), (out, predicted)) =
            (peaks(&kept.summary), peaks(&out.summary));
        println!(
            "{what}: activations {} of {} kept, {} of {} out",
            kept.activation, kept_predicted.activation, out.activation, predicted.activation
        );
        println!("{what}: host {} of {}", out.host_activation, predicted.host_activation);
        assert!(out.host_activation > 0 && out.activation < kept.activation, "{what}");
        assert_eq!(out.host_activation, predicted.host_activation, "{what}");
        assert_eq!(out.weight_stash, predicted.weight_stash, "{what}");
    }
}
