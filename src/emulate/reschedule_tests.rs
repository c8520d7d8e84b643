//! Emulated runs that exchange their program for a better one.

use std::fs;

use zeropp_pipeline::costs::Table;
use zeropp_pipeline::ir::Action;
use zeropp_pipeline::simulate::{Costs, StageCosts};
use zeropp_pipeline::timeline::Span;

use super::{EmulatedStep, EmulationReport, emulate, emulate_changing};
use crate::config::{Config, Reschedule};

#[test]
fn an_emulated_run_executes_the_programs_that_it_exchanges() {
    let dir = tempfile::tempdir().expect("a folder");
    let assumed = dir.path().join("equal.toml");
    fs::write(&assumed, "t_f = 100\nt_b = 100\nt_w = 100").expect("a file");
    let config = Config {
        pp: 4,
        schedule: "gpipe".into(),
        micro_batches: Some(8),
        steps: 14,
        warmup: Some(0),
        emulate: Some("other costs".into()),
        costs: Some(assumed),
        reschedule: Reschedule::Auto,
        exchanges_always: true,
        ..Config::default()
    };
    let costs = Table::from(&Costs::uniform(4, 70_000, 90_000, 40_000, 0));
    let report = emulate(&config, &costs, |_| {}).expect("it runs");
    assert!(report.steps.iter().any(|step| step.program > 0), "no program was exchanged");
    assert!(report.exchanging_ns > 0);
    for (rank, ran) in report.measured.ranks.iter().enumerate() {
        let simulated = &report.simulated.ranks[rank].spans;
        let of = |spans: &[Span]| spans.iter().map(|span| span.action).collect::<Vec<Action>>();
        assert_eq!(of(&ran.spans), of(simulated), "rank {rank}");
    }
}

/// Two stages on each of four ranks, in the proportions of a real job; rank 1 is slower by a half
/// where it is `slow`.
fn of_a_real_job(slow: bool) -> Costs {
    let stage = |stage: usize| {
        let (head, slower) =
            (if stage == 7 { 14 } else { 10 }, if slow && stage % 4 == 1 { 15 } else { 10 });
        let of = |us: u64| us * 10 * head * slower;
        StageCosts {
            f_ns: of(900),
            b_ns: of(1300),
            w_ns: of(600),
            r_ns: of(900),
            ..Default::default()
        }
    };
    let mut costs = Costs { stages: (0..8).map(stage).collect(), ..Costs::uniform(8, 1, 1, 1, 0) };
    costs.link.latency_ns = 200_000;
    costs.step_ns = 1_000_000;
    costs
}

fn middle(steps: &[EmulatedStep], of: impl Fn(&EmulatedStep) -> bool) -> f64 {
    let mut all: Vec<u64> = steps.iter().filter(|s| of(s)).map(|s| s.step_ns).collect();
    all.sort_unstable();
    all[all.len() / 2] as f64
}

/// As the run began, so it is simulated; and what it wins when a rank has become slower, it wins in
/// the simulation.
#[test]
fn a_run_whose_rank_becomes_slower_has_a_new_order_within_20_steps() {
    let config = Config {
        pp: 4,
        virtual_stages: Some(2),
        schedule: "zeropp".into(),
        unit: Some(7),
        micro_batches: Some(14),
        steps: 100,
        warmup: Some(0),
        emulate: Some("real costs".into()),
        reschedule: Reschedule::Auto,
        ..Config::default()
    };
    let [before, slow] = [false, true].map(|slow| Table::from(&of_a_real_job(slow)));
    let report: EmulationReport =
        emulate_changing(&config, &before, Some((50, &slow)), |_| {}).expect("it runs");
    let at = |step: u64| report.steps[step as usize - 1].program;
    let changed = report.steps.iter().find(|s| s.step > 50 && s.program != at(50));
    for step in &report.steps {
        println!("{} {} {:.1}", step.step, step.program, step.step_ns as f64 / 1e6);
    }
    println!("changed {changed:?}, now {} searches {}", at(100), report.exchanging_ns);
    println!("simulated {} ", report.simulated_step_ns);
    let changed = changed.expect("no order for the slower rank").step;
    assert!(changed <= 70, "step {changed}");
    let lasting = at(100);
    assert!(lasting > at(50));
    let old = middle(&report.steps, |s| s.step > 50 && s.step < changed);
    let new = middle(&report.steps, |s| s.step > changed && s.program == lasting);
    println!("{old} {new}: {:.3}", 1.0 - new / old);
}
