//! Emulated runs that exchange their program for a better one.

use std::fs;

use zeropp_pipeline::costs::{Table, write};
use zeropp_pipeline::ir::Action;
use zeropp_pipeline::memory::StageBytes;
use zeropp_pipeline::simulate::{Costs, StageCosts};
use zeropp_pipeline::timeline::Span;

use super::{EmulatedStep, emulate};
use crate::config::{Bytes, Config, Reschedule};

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
        reschedule: Some(Reschedule::Auto),
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

/// A stage on each of four ranks, in the proportions of a real job; rank 0 is slower by a half
/// where it is `slow`.
fn of_a_real_job(slow: bool) -> Costs {
    let stage = |stage: usize| {
        let head = if stage == 3 { 14 } else { 10 };
        let slower = if slow && stage == 0 { 15 } else { 10 };
        let of = |us: u64| us * 30 * head * slower;
        StageCosts {
            f_ns: of(900),
            b_ns: of(1300),
            w_ns: of(600),
            r_ns: of(900),
            ..Default::default()
        }
    };
    let memory = StageBytes { activation: 100, stash: 50, ..StageBytes::default() };
    Costs {
        stages: (0..4).map(stage).collect(),
        memory: vec![memory; 4],
        step_ns: 3_000_000,
        ..Costs::uniform(4, 1, 1, 1, 600_000)
    }
}

fn median_of<'a>(steps: impl Iterator<Item = &'a EmulatedStep>) -> f64 {
    let mut all: Vec<u64> = steps.map(|step| step.step_ns).collect();
    all.sort_unstable();
    all[all.len() / 2] as f64
}

/// Made for ranks that are as fast as each other, and within the limit that the settings have. What
/// the exchange wins, it wins in the simulation too.
#[test]
fn a_run_with_a_rank_that_is_slower_than_guessed_has_a_new_order_within_20_steps() {
    let dir = tempfile::tempdir().expect("a folder");
    let guess = dir.path().join("guess.json");
    let [guessed, slow] = [false, true].map(of_a_real_job);
    write(&guessed, "a guess", None, fs::File::create(&guess).expect("a file")).expect("a file");
    let slow = Table::from(&slow);
    let config = Config {
        pp: 4,
        schedule: "1f1b".into(),
        micro_batches: Some(16),
        steps: 40,
        warmup: Some(0),
        emulate: Some("real costs".into()),
        costs: Some(guess),
        mem_limit: Some(Bytes(1600)),
        reschedule: Some(Reschedule::Auto),
        ..Config::default()
    };
    let report = emulate(&config, &slow, |_| {}).expect("it runs");
    let stays = Config { reschedule: Some(Reschedule::Off), steps: 2, ..config };
    let stays = emulate(&stays, &slow, |_| {}).expect("it runs");
    let first = report.steps.iter().find(|step| step.program > 0);
    let changed = first.expect("no order for the slower rank").step;
    assert!(changed <= 20, "step {changed}");
    let last = report.steps[report.steps.len() - 1].program;
    assert!(last > 0, "it went back");
    let before = report.steps.iter().filter(|step| step.program == 0);
    let after = report.steps.iter().filter(|step| step.program == last);
    let measured = 1.0 - median_of(after) / median_of(before);
    let simulated = 1.0 - report.simulated_step_ns as f64 / stays.simulated_step_ns as f64;
    println!("step {changed}: {measured:.3} measured, {simulated:.3} simulated");
    println!("{} ns for searches", report.exchanging_ns);
    assert!(simulated > 0.03 && (measured - simulated).abs() < 0.02, "{measured} {simulated}");
}
