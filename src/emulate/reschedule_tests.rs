//! Emulated runs that exchange their program for a better one.

use std::fs;

use zeropp_pipeline::costs::{Table, write};
use zeropp_pipeline::ir::Action;
use zeropp_pipeline::memory::StageBytes;
use zeropp_pipeline::schedules::{KINDS, StepForm};
use zeropp_pipeline::simulate::{Costs, StageCosts};
use zeropp_pipeline::timeline::Span;

use super::{EmulatedStep, EmulationReport, emulate, emulate_changing};
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

/// A stage on each of four ranks, in the proportions of a real job; one rank may be slower by a
/// half.
fn of_a_real_job(slow: Option<usize>) -> Costs {
    of_stages(4, slow)
}

/// So many stages of such a job on four ranks, as loops or as a V have them; one may be slower.
fn of_stages(stages: usize, slow: Option<usize>) -> Costs {
    let stage = |stage: usize| {
        let head = if stage + 1 == stages { 14 } else { 10 };
        let slower = if slow == Some(stage) { 15 } else { 10 };
        let of = |us: u64| us * 120 / stages as u64 * head * slower;
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
        stages: (0..stages).map(stage).collect(),
        memory: vec![memory; stages],
        step_ns: 3_000_000,
        ..Costs::uniform(stages, 1, 1, 1, 600_000)
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
    let [guessed, slow] = [None, Some(0)].map(of_a_real_job);
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

/// How often the trials here are made: once, or as often as `ZEROPP_TRIALS` says.
fn trials() -> usize {
    std::env::var("ZEROPP_TRIALS").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// What exchanges took of a core, as a share of the steps' time.
fn share_of_exchanges(report: &EmulationReport) -> f64 {
    let all: u64 = report.steps.iter().map(|step| step.step_ns).sum();
    report.exchanging_ns as f64 / all as f64
}

/// A run of 1F1B, a rank of which becomes slower at step 50: at step 70 its order takes at most 1 %
/// longer than that of the best kind made for the slower rank, within the same memory.
fn finds_an_order_for_a_slower_rank(slower: usize, mem_limit: u64, another: bool) {
    let [before, slow] = [None, Some(slower)].map(|slow| Table::from(&of_a_real_job(slow)));
    let config = Config {
        pp: 4,
        schedule: "1f1b".into(),
        micro_batches: Some(16),
        // As long as two searches are 1 % of.
        steps: 120,
        warmup: Some(0),
        emulate: Some("real costs".into()),
        mem_limit: Some(Bytes(mem_limit)),
        reschedule: Some(Reschedule::Auto),
        ..Config::default()
    };
    let (best_ns, best) = best_kind(&config, &slow);
    for trial in 0..trials() {
        let emulated = |steps| {
            let config = Config { steps, ..config.clone() };
            emulate_changing(&config, &before, Some((50, &slow)), |_| {}).expect("it runs")
        };
        let report = emulated(120);
        let ran = report.steps[49].program;
        let last = report.steps[report.steps.len() - 1].program;
        let since = report.steps.iter().find(|step| step.program == last).map(|step| step.step);
        let of = |program: u64| {
            median_of(report.steps[50..].iter().filter(|step| step.program == program))
        };
        // One that ends before the order changes again.
        let (end, stays) = (report.simulated_step_ns, emulated(55).simulated_step_ns);
        let (measured, simulated) = (1.0 - of(last) / of(ran), 1.0 - end as f64 / stays as f64);
        println!(
            "rank {slower}, trial {trial}: order {last} since step {since:?}: {end}, {best} \
             {best_ns}; {measured:.3} measured, {simulated:.3} simulated; {:.4} of the time for it",
            share_of_exchanges(&report)
        );
        assert!(end * 100 <= best_ns * 101, "{end}, {best} {best_ns}");
        assert!(since.is_some_and(|step| step <= 70), "{since:?}");
        assert!(!another || last != ran, "no other order");
        assert!(last == ran || (measured - simulated).abs() < 0.02, "{measured} {simulated}");
    }
}

#[test]
#[ignore = "twenty seconds, in which ranks wait"]
fn a_run_whose_rank_becomes_slower_has_an_order_that_gains_what_is_simulated() {
    std::thread::scope(|scope| {
        // For rank 0 the order that was found before is as good.
        scope.spawn(|| finds_an_order_for_a_slower_rank(0, 600, false));
        scope.spawn(|| finds_an_order_for_a_slower_rank(2, 400, true));
    });
}

/// A run of a kind that begins with equal times for all stages: its order at step 10 takes at most
/// 1 % longer than that of the best kind for the true ones, with the same stages and memory.
fn comes_near_the_best_kind(kind: &str, v: usize) {
    let dir = tempfile::tempdir().expect("a folder");
    let guess = dir.path().join("guess.json");
    let costs = of_stages(4 * v, None);
    let equal = Costs { stages: Costs::uniform(4 * v, 1, 1, 1, 1).stages, ..costs.clone() };
    write(&equal, "a guess", None, fs::File::create(&guess).expect("a file")).expect("a file");
    let costs = Table::from(&costs);
    let config = Config {
        pp: 4,
        virtual_stages: Some(v),
        schedule: kind.into(),
        micro_batches: Some(8),
        unit: (kind == "zeropp").then_some(8),
        // As long as a search is 1 % of.
        steps: 80,
        warmup: Some(0),
        emulate: Some("real costs".into()),
        costs: Some(guess),
        mem_limit: Some(Bytes(800 * v as u64)),
        reschedule: Some(Reschedule::Auto),
        ..Config::default()
    };
    let start = planned(&config, &costs);
    let (best_ns, best) = best_kind(&config, &costs);
    for trial in 0..trials() {
        let report = emulate(&config, &costs, |_| {}).expect("it runs");
        let (before, end) = (start.simulated_step_ns, report.simulated_step_ns);
        let last = report.steps[report.steps.len() - 1].program;
        let since = report.steps.iter().find(|step| step.program == last).map(|step| step.step);
        let share = share_of_exchanges(&report);
        println!(
            "{kind}, trial {trial}: {before} -> {end} since {since:?}, {best} {best_ns}; \
             {share:.4} of the time for it"
        );
        assert!(end * 100 <= best_ns * 101, "{kind}: {end}, {best} {best_ns}");
        assert!(end == before || report.steps[9].program > 0, "{kind}: {since:?}");
    }
}

#[test]
#[ignore = "a minute of a core, most of it for the best kinds"]
fn a_run_with_wrong_proportions_comes_within_a_percent_of_the_best_kind() {
    // Ranks wait for given times, so that several runs share the cores.
    std::thread::scope(|scope| {
        for (kind, v) in [("zeropp", 2), ("1f1b", 1), ("zb-v", 2), ("auto", 2)] {
            scope.spawn(move || comes_near_the_best_kind(kind, v));
        }
    });
}

/// The least time of a kind that is made for these costs from the beginning, with the stages and
/// within the memory of the run, and its name.
fn best_kind(config: &Config, costs: &Table) -> (u64, &'static str) {
    let placement = planned(config, costs).measured.placement;
    let best = KINDS.iter().filter_map(|other| {
        let of_kind = Config {
            schedule: other.name.into(),
            unit: (other.step == StepForm::Units).then_some(config.micro_batches?),
            costs: None,
            ..config.clone()
        };
        let of_kind = emulate(&Config { reschedule: None, steps: 1, ..of_kind }, costs, |_| {});
        let of_kind = of_kind.ok().filter(|of_kind| of_kind.measured.placement == placement)?;
        Some((of_kind.simulated_step_ns, other.name))
    });
    best.min().expect("its own kind is one")
}

/// The run with the order that it was planned with.
fn planned(config: &Config, costs: &Table) -> EmulationReport {
    let stays = Config { reschedule: None, steps: 1, ..config.clone() };
    emulate(&stays, costs, |_| {}).expect("it runs")
}
