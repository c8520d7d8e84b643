//! The layout of a run changes no bit of its loss, gradient norm or weights.

use crate::common::{Run, assert_same_bits, run, tiny};
use zeropp::Config;
use zeropp::config::Recompute;

fn check(reference: &Run, config: Config, what: &str) {
    assert_same_bits(reference, &run(config), what);
}

#[test]
fn pipeline_shape_changes_nothing() {
    let reference = run(tiny());
    assert!(reference.summary.last_loss < reference.summary.first_loss);
    for pp in [1, 2, 4] {
        for v in [1, 2, 4] {
            let config = Config { pp, virtual_stages: Some(v), ..tiny() };
            check(&reference, config, &format!("pp {pp} virtual {v}"));
        }
    }
}

#[test]
fn recomputation_and_prefetch_change_nothing() {
    let base = Config { pp: 2, virtual_stages: Some(2), zero3: 2, ..tiny() };
    let reference = run(base.clone());
    for recompute in [Recompute::Selective, Recompute::Full] {
        check(&reference, Config { recompute, ..base.clone() }, &format!("{recompute}"));
    }
    for v in [1, 4] {
        for recompute in [Recompute::Selective, Recompute::Full] {
            let config = Config { recompute, virtual_stages: Some(v), ..base.clone() };
            check(&reference, config, &format!("{recompute}, virtual {v}"));
        }
    }
    for prefetch in [0, 2] {
        check(&reference, Config { prefetch, ..base.clone() }, &format!("prefetch {prefetch}"));
    }
    let all = Config { pp: 4, recompute: Recompute::Full, prefetch: 2, ..base.clone() };
    check(&reference, all, "pp 4, full, prefetch 2");
    check(&reference, base, "from run to run");
}

#[test]
fn zero1_changes_nothing() {
    let base = Config { dp: 2, zero3: 2, ..tiny() };
    let reference = run(base.clone());
    check(&reference, Config { zero1: true, ..base.clone() }, "zero1");
    let piped = Config { zero1: true, pp: 2, virtual_stages: Some(2), ..base };
    check(&reference, piped, "zero1, pp 2, virtual 2");
}

#[test]
fn one_unit_equals_gpipe_and_1f1b() {
    let base = Config { unit: Some(6), pp: 2, ..tiny() };
    let reference = run(base.clone());
    for (schedule, pp) in [("gpipe", 1), ("gpipe", 4), ("1f1b", 2), ("1f1b", 4)] {
        let config = Config { schedule: schedule.into(), unit: None, pp, ..base.clone() };
        check(&reference, config, &format!("{schedule} pp {pp}"));
    }
    let full = Config { recompute: Recompute::Full, schedule: "1f1b".into(), unit: None, ..base };
    check(&reference, full, "1f1b recomputed");
}

#[test]
fn a_tied_head_is_one_weight_in_every_layout() {
    let base = Config { tied: true, ..tiny() };
    let reference = run(base.clone());
    for (pp, v) in [(2, 2), (4, 1)] {
        let config = Config { pp, virtual_stages: Some(v), ..base.clone() };
        check(&reference, config, &format!("tied pp {pp} virtual {v}"));
    }
    let zero1 = Config { zero1: true, dp: 2, zero3: 2, pp: 2, ..base.clone() };
    check(&run(Config { zero1: false, ..zero1.clone() }), zero1, "tied zero1");
}

#[test]
fn units_shards_and_replicas_differ_in_rounding_only() {
    let base = Config { steps: 50, micro_batches: Some(12), unit: Some(12), ..tiny() };
    let reference = run(base.clone());
    let others = [
        Config { unit: Some(3), ..base.clone() },
        Config { unit: Some(5), pp: 2, ..base.clone() },
        Config { zero3: 2, micro_batches: Some(6), unit: Some(3), pp: 2, ..base.clone() },
        Config { zero3: 4, micro_batches: Some(3), unit: Some(3), ..base.clone() },
        Config { dp: 2, zero3: 2, micro_batches: Some(3), unit: Some(2), ..base.clone() },
        Config { dp: 3, micro_batches: Some(4), unit: Some(4), ..base.clone() },
    ];
    for config in others {
        let what = format!("{:?}", (config.pp, config.zero3, config.dp, config.unit));
        let other = run(config);
        for (x, y) in reference.steps.iter().zip(&other.steps) {
            let relative = (x.loss - y.loss).abs() / x.loss;
            assert!(relative <= 1e-5, "{what}: step {}: {relative:e}", x.step);
        }
    }
}
