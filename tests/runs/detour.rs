//! Runs around missing ranks: stages with copies on several ranks, whose gradients are right, and
//! whose bits follow from the routes alone.

use std::path::Path;

use zeropp::config::{Decay, OptimizerSync, Recompute, Resume};
use zeropp::pipeline::costs::Table;
use zeropp::pipeline::exchange::json::{self, Document};
use zeropp::pipeline::ir::Schedule;
use zeropp::pipeline::lower::{LowerOptions, lower};
use zeropp::pipeline::schedules::{Costs, ReplicaRank, Shape, around};
use zeropp::pipeline::simulate;
use zeropp::pipeline::verify::{VerifyLimits, verify};
use zeropp::search::generate_with_costs;
use zeropp::{Config, Trainer, emulate};

use crate::common::{Run, assert_same_bits, run, run_saving_all, text_file, tiny};
use crate::oracle;

/// Micro-batches of each replica.
const EACH: usize = 4;

/// `kind` for two pipelines of two ranks without those `missing`, by place and replica.
fn schedule(kind: &str, virtual_stages: usize, missing: &[(usize, usize)]) -> Schedule {
    let shape = Shape { pp: 2, virtual_stages, micro_batches: EACH, unit: EACH };
    let costs = Costs::uniform(shape.stages(), 5, 4, 3, 1);
    let missing: Vec<_> =
        missing.iter().map(|(pp, replica)| ReplicaRank { pp: *pp, replica: *replica }).collect();
    let plain = generate_with_costs(kind, &shape, &costs).unwrap();
    around(&plain, &shape, &costs, 2, &missing).unwrap()
}

/// A run of it, by a file in `dir`.
fn of(dir: &Path, schedule: &Schedule, base: Config) -> Config {
    let name = schedule.kind.replace([' ', ',', '(', ')'], "-");
    let path = dir.join(format!("{name}-{}.json", schedule.stages()));
    let mut out = Vec::new();
    let document = Document { schedule: schedule.clone(), costs: None, measures: None };
    json::write(&document, &mut out).unwrap();
    std::fs::write(&path, out).unwrap();
    Config {
        pp: schedule.pp(),
        schedule: path.display().to_string(),
        virtual_stages: None,
        unit: None,
        micro_batches: Some(schedule.micro_batches()),
        ..base
    }
}

/// The same step by two whole pipelines.
fn whole(base: Config) -> Config {
    Config { pp: 2, dp: 2, unit: Some(EACH), micro_batches: Some(EACH), ..base }
}

#[test]
fn gradients_are_those_of_the_whole_batch_in_one_graph() {
    let dir = tempfile::tempdir().unwrap();
    let small = Config { layers: 4, hidden: 32, heads: 4, seq: 16, ..tiny() };
    for (kind, v, missing) in [
        ("1f1b", 1, vec![(1, 0)]),
        ("zb-h1", 1, vec![(0, 1)]),
        ("zb-v", 2, vec![(0, 0)]),
        ("zeropp", 2, vec![(0, 0), (1, 1)]),
        ("1f1b", 1, vec![]),
    ] {
        let schedule = schedule(kind, v, &missing);
        oracle::check(of(dir.path(), &schedule, small.clone()));
        let full = Config { zero3: 2, recompute: Recompute::Full, ..small.clone() };
        oracle::check(of(dir.path(), &schedule, full));
    }
}

/// Whichever order a rank runs in, and whether backwards are split: the sums of each copy are in
/// the order of micro-batches, and those of copies in that of ranks. The same holds for late
/// updates. Beside two whole pipelines there is rounding.
#[test]
fn bits_follow_from_the_routes_alone() {
    let dir = tempfile::tempdir().unwrap();
    let base = Config { steps: 8, clip: 0.5, ..tiny() };
    let undisturbed = run(whole(base.clone()));
    for missing in [vec![(1, 0)], vec![(0, 1)], vec![(1, 0), (0, 1)]] {
        let config =
            |kind, base: &Config| of(dir.path(), &schedule(kind, 1, &missing), base.clone());
        let reference = run(config("1f1b", &base));
        for kind in ["zb-h1", "zb-h2", "gpipe", "zeropp"] {
            assert_same_bits(&reference, &run(config(kind, &base)), kind);
        }
        let late = Config { optimizer_sync: OptimizerSync::Late, ..base.clone() };
        assert_same_bits(&reference, &run(config("1f1b", &late)), "late");
        let early = Config { optimizer_sync: OptimizerSync::Barrier, ..base.clone() };
        assert_same_bits(&reference, &run(config("zb-h1", &early)), "barrier");
        assert_near(&undisturbed, &reference);
    }
}

fn assert_near(a: &Run, b: &Run) {
    assert_eq!(a.steps.len(), b.steps.len());
    for (x, y) in a.steps.iter().zip(&b.steps) {
        assert_eq!((x.step, x.tokens), (y.step, y.tokens));
        let relative = (x.loss - y.loss).abs() / x.loss;
        assert!(relative <= 1e-5, "step {}: {relative:e}", x.step);
        let relative = (x.grad_norm - y.grad_norm).abs() / x.grad_norm;
        assert!(relative <= 1e-4, "step {}: norm {relative:e}", x.step);
    }
}

/// The way it is meant to be used: two pipelines, then a rank that does not come back, then all
/// ranks again. What is saved once by each is everything, and nothing twice.
#[test]
fn a_run_goes_on_around_a_rank_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let decay = Decay::Constant;
    let base = Config { steps: 6, save_every: 2, resume: Resume::Newest, decay, ..tiny() };
    let undisturbed = run(whole(Config { resume: Resume::No, save_every: 0, ..base.clone() }));
    let saved = Config { save: Some(dir.path().join("ckpt")), ..base };
    let detour = of(dir.path(), &schedule("1f1b", 1, &[(1, 0)]), saved.clone());
    let first = run_saving_all(whole(Config { steps: 2, ..saved.clone() }));
    let middle = run_saving_all(Config { steps: 4, ..detour });
    let last = run_saving_all(whole(saved));
    let steps = [first.steps, middle.steps, last.steps.clone()].concat();
    assert_eq!(steps.iter().map(|s| s.step).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
    assert_near(&undisturbed, &Run { steps, ..last });
}

/// Its validation loss is that of the same weights in any layout.
#[test]
fn a_validation_loss_goes_the_same_ways() {
    let dir = tempfile::tempdir().unwrap();
    let data = Some(text_file(&dir, 4000));
    let split = Some("9,1".into());
    let warmup = Some(0);
    let base = Config { data, split, warmup, steps: 1, eval_every: 1, eval_steps: 2, ..tiny() };
    let detour = run(of(dir.path(), &schedule("1f1b", 1, &[(1, 0)]), base.clone()));
    let whole = run(whole(base));
    let loss = |run: &Run| run.steps[0].eval.as_ref().expect("it is measured").loss;
    assert!((loss(&detour) - loss(&whole)).abs() <= 1e-5 * loss(&whole));
}

/// An emulated run executes the program as it is, and its report has the simulator's figures.
#[test]
fn an_emulated_run_is_the_simulated_program() {
    let dir = tempfile::tempdir().unwrap();
    let schedule = schedule("1f1b", 1, &[(1, 0)]);
    let base = Config { steps: 2, warmup: Some(0), ..Config::default() };
    let config = of(dir.path(), &schedule, base);
    let costs = simulate::Costs::uniform(2, 500_000, 400_000, 300_000, 100_000);
    let report = emulate(&config, &Table::from(&costs), |_| {}).unwrap();
    let program = lower(&schedule, &LowerOptions::default());
    verify(&program, &VerifyLimits::default()).unwrap();
    let simulated = simulate::simulate(&program, &costs).unwrap();
    let ends = simulated.ranks.iter().filter_map(|rank| rank.own_span()).map(|(_, end)| end);
    assert_eq!(report.simulated_makespan_ns, ends.max().unwrap());
    assert!(report.median().makespan_ns >= report.simulated_makespan_ns);
    for (rank, actions) in report.measured.ranks.iter().zip(&program.ranks) {
        let done: Vec<_> = rank.spans.iter().map(|span| span.action).collect();
        assert_eq!(&done, actions);
    }
}

#[test]
fn limits_of_stage_copies_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let config = of(dir.path(), &schedule("1f1b", 1, &[(1, 0)]), tiny());
    let told = |change: &dyn Fn(&mut Config)| {
        let mut config = config.clone();
        change(&mut config);
        Trainer::new(config).err().expect("it is refused").to_string()
    };
    assert!(told(&|c| c.dp = 2).contains("has all replicas in it"));
    assert!(told(&|c| c.zero1 = true).contains("copies of stages"));
    assert!(told(&|c| c.tied = true).contains("share a weight"));
    assert!(told(&|c| c.pp = 4).contains("is for 3 ranks"));
}
