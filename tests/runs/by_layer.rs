//! W that run layer by layer, and last backwards with theirs, the reduction and the sum over the
//! replicas of each layer behind them; F that wait for each layer as they come to it.

use crate::common::{assert_same_bits, llama, run, tiny};
use crate::counts::check_memory;
use zeropp::config::{OptimizerSync, OutStates, Precision, Recompute};
use zeropp::pipeline::costs::Table;
use zeropp::pipeline::ir::{Action, Compute, LayerRun, Schedule};
use zeropp::pipeline::lower::{LowerOptions, lower};
use zeropp::pipeline::schedules::Shape;
use zeropp::pipeline::simulate::{Costs, StageCosts};
use zeropp::pipeline::timeline::{Lane, Span};
use zeropp::search::generate;
use zeropp::{Config, emulate};

/// Six micro-batches in one unit, 4 blocks a stage and more.
fn base() -> Config {
    Config { layers: 12, steps: 3, unit: Some(6), pp: 2, zero3: 2, ..tiny() }
}

fn of(schedule: &str, virtual_stages: usize, config: &Config) -> Config {
    Config { schedule: schedule.into(), virtual_stages: Some(virtual_stages), ..config.clone() }
}

/// What runs layer by layer on each rank.
fn runs(program: &Schedule) -> Vec<Vec<LayerRun>> {
    let of_rank = |actions: &Vec<_>| {
        let (mut found, mut at) = (Vec::new(), 0);
        while at < actions.len() {
            let run = LayerRun::at(actions, at);
            found.extend(run);
            at += run.map_or(1, |run| run.len);
        }
        found
    };
    program.ranks.iter().map(of_rank).collect()
}

/// Every reduction has W before it, and the ranks behind the first leave several to the end.
#[test]
fn left_over_w_stand_before_their_reductions() {
    for (kind, virtual_stages) in [("zb-h1", 1), ("zb-v", 2), ("zeropp", 2), ("zeropp", 1)] {
        let shape = Shape { pp: 4, virtual_stages, micro_batches: 8, unit: 8 };
        let compact = generate(kind, &shape).unwrap();
        for replicas in [false, true] {
            let program = lower(&compact, &LowerOptions { replicas, ..Default::default() });
            let runs = runs(&program);
            assert!(runs.iter().all(|all| all.len() == virtual_stages), "{kind}: {runs:?}");
            assert!(runs.iter().flatten().all(|run| run.sums == replicas), "{kind}: {runs:?}");
            let is_long = |run: &LayerRun| !run.backward && run.len > 2;
            assert!(runs.iter().flatten().any(is_long), "{kind}: {runs:?}");
        }
    }
}

/// Of B and W apart that of stage 0, of whole backwards all.
#[test]
fn last_backwards_that_no_rank_waits_for_run_with_their_w() {
    for (kind, virtual_stages, stages) in
        [("zb-h1", 1, vec![0]), ("1f1b", 1, vec![0, 1, 2, 3]), ("gpipe", 1, vec![0, 1, 2, 3])]
    {
        let shape = Shape { pp: 4, virtual_stages, micro_batches: 8, unit: 8 };
        let program = lower(&generate(kind, &shape).unwrap(), &LowerOptions::default());
        let all = runs(&program).into_iter().flatten().filter(|run| run.backward);
        let mut found: Vec<usize> = all.map(|run| run.stage).collect();
        found.sort_unstable();
        assert_eq!(found, stages, "{kind}");
    }
}

#[test]
fn layers_change_no_bit_and_take_what_is_predicted() {
    let bases = [
        base(),
        Config { zero3: 1, dp: 2, ..base() },
        Config { dp: 2, tied: true, ..base() },
        Config { dp: 2, zero1: true, precision: Precision::Bf16, ..llama(base()) },
        Config { unit: Some(3), dp: 2, ..base() },
    ];
    for (i, config) in bases.into_iter().enumerate() {
        let one = Config { pp: 1, ..of("1f1b", 1, &config) };
        // The cut of sums is the same.
        let one = if config.unit == Some(3) { of("zeropp", 2, &one) } else { one };
        let reference = run(one);
        let in_units = [("zeropp", 2), ("zeropp", 1)];
        let whole = [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)];
        let once = whole.into_iter().filter(|_| config.unit != Some(3));
        for (kind, v) in in_units.into_iter().chain(once) {
            let trained = run(of(kind, v, &config));
            let what = format!("{kind} V {v}, case {i}");
            assert_same_bits(&reference, &trained, &what);
            let summary = &trained.summary;
            assert_eq!(summary.peak_bytes, summary.predicted_bytes, "{what}");
        }
    }
}

/// Where a step's last backward is when a rank holds the most.
#[test]
fn a_last_backward_by_layer_holds_what_is_predicted() {
    let base = Config { unit: Some(2), micro_batches: Some(2), layers: 6, pp: 1, ..base() };
    // The last has two stages, one of which gives the other what its B makes.
    let kinds = [("1f1b", 2, 1), ("zb-h1", 2, 2), ("zb-h1", 1, 2), ("1f1b", 1, 1), ("zb-v", 2, 1)];
    for (kind, zero3, dp) in kinds {
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
            let virtual_stages = if kind == "zb-v" { 2 } else { 1 };
            let config = Config { zero3, dp, recompute, ..of(kind, virtual_stages, &base) };
            check_memory(config.clone());
            let precision = Precision::Bf16;
            let adapters = Config { lora_rank: 2, lora_targets: Some("all".into()), ..config };
            check_memory(Config { precision, tied: true, ..llama(adapters) });
        }
    }
}

#[test]
fn layers_go_with_late_updates_recomputation_and_states_out() {
    let dir = tempfile::tempdir().unwrap();
    let base = base();
    let out = |base: &Config, optimizer_out_states| {
        let optimizer_out = Some(dir.path().into());
        Config { optimizer_out, optimizer_out_states, ..base.clone() }
    };
    for (what, config) in [
        ("late", Config { optimizer_sync: OptimizerSync::Late, dp: 2, ..base.clone() }),
        ("recomputed", Config { recompute: Recompute::Full, dp: 2, ..base.clone() }),
        ("moments out", out(&base, OutStates::Moments)),
        ("all out", out(&base, OutStates::All)),
    ] {
        let plain = Config { dp: config.dp, ..of("1f1b", 1, &base) };
        let reference = run(Config { pp: 1, ..plain });
        for (kind, v) in [("zb-h1", 1), ("zb-v", 2), ("1f1b", 1)] {
            let trained = run(of(kind, v, &config));
            assert_same_bits(&reference, &trained, &format!("{kind} {what}"));
            let summary = &trained.summary;
            assert_eq!(summary.peak_bytes, summary.predicted_bytes, "{kind} {what}");
        }
    }
}

/// What layers hide in the simulation, a run with these times hides.
#[test]
fn layers_are_executed_as_simulated() {
    let stage = StageCosts {
        f_ns: 12_000_000,
        b_ns: 12_000_000,
        w_ns: 12_000_000,
        reduce_scatter_ns: 24_000_000,
        replica_reduce_ns: 36_000_000,
        ..StageCosts::default()
    };
    for (kind, v, replicas) in [
        ("zb-h1", 1, 1),
        ("zb-v", 2, 1),
        ("zb-h1", 1, 2),
        ("zb-v", 2, 2),
        ("1f1b", 1, 1),
        ("1f1b", 1, 2),
    ] {
        let costs = Costs { stages: vec![stage; 2 * v], ..Costs::uniform(2 * v, 1, 1, 1, 1000) };
        let config = Config { dp: replicas, warmup: Some(0), ..of(kind, v, &base()) };
        let emulated = |blocks: usize| {
            let mut table = Table::from(&costs);
            table.set("blocks", vec![blocks; 2 * v].into());
            emulate(&config, &table, |_| ()).unwrap()
        };
        let [whole, layers] = [1, 6].map(emulated);
        for (rank, measured) in layers.measured.ranks.iter().enumerate() {
            let simulated = &layers.simulated.ranks[measured.pp];
            assert_eq!(measured.spans.len() % simulated.spans.len(), 0, "{kind} rank {rank}");
            let program: Vec<Action> = simulated.spans.iter().map(|span| span.action).collect();
            for (at, (m, s)) in measured.spans.iter().zip(&simulated.spans).enumerate() {
                assert_eq!(m.action, s.action, "{kind} rank {rank}");
                // Of a run's computes only the last one's end is one of its own.
                let is_inside = LayerRun::at(&program, at).is_some_and(|run| run.len > 1);
                if s.lane == Lane::Compute && !is_inside {
                    assert!(m.end_ns >= s.end_ns, "{kind} rank {rank}: {}", m.action);
                }
            }
        }
        let quickest = layers.steps.iter().map(|step| step.step_ns).min().unwrap();
        let (simulated, whole) = (layers.simulated_step_ns, whole.simulated_step_ns);
        let longer = 100.0 * (quickest as f64 / simulated as f64 - 1.0);
        println!(
            "{kind} K {replicas}: {quickest} ns, {longer:.2} % above the simulated {simulated}; \
             {whole} with whole stages"
        );
        assert!(simulated < whole && quickest < whole, "{kind}: {quickest} {simulated} {whole}");
    }
}

/// Of six layers each is gathered in 10 ms and takes 5 of an F, which begins at 35 and not at 60.
#[test]
fn an_f_waits_for_each_layer_as_simulated() {
    let ms = |n: u64| n * 1_000_000;
    let stage = StageCosts {
        f_ns: ms(30),
        b_ns: ms(10),
        w_ns: ms(10),
        all_gather_ns: ms(60),
        ..StageCosts::default()
    };
    let costs = Costs { stages: vec![stage; 2], ..Costs::uniform(2, 1, 1, 1, 1000) };
    let config = Config { warmup: Some(0), ..of("zb-h1", 1, &base()) };
    let emulated = |blocks: usize| {
        let mut table = Table::from(&costs);
        table.set("blocks", vec![blocks; 2].into());
        emulate(&config, &table, |_| ()).unwrap()
    };
    let [whole, layers] = [1, 6].map(emulated);
    let first = |spans: &[Span]| {
        let of = |action| spans.iter().find(|span| span.action == action).unwrap();
        let f = of(Action::compute(Compute::F, 0, 0));
        (f.start_ns, f.end_ns, of(Action::AllGather { stage: 0 }).end_ns)
    };
    assert_eq!(first(&whole.simulated.ranks[0].spans), (ms(60), ms(90), ms(60)));
    assert_eq!(first(&layers.simulated.ranks[0].spans), (ms(35), ms(65), ms(60)));
    for rank in layers.measured.ranks.iter().filter(|rank| rank.pp == 0) {
        let (start, end, gathered) = first(&rank.spans);
        println!("F of {start} to {end} ns, gathered at {gathered} ns");
        assert!(end >= ms(65) && gathered >= ms(60) && gathered <= end && start < gathered);
    }
    let quickest = layers.steps.iter().map(|step| step.step_ns).min().unwrap();
    assert!(quickest < whole.simulated_step_ns, "{quickest} ns");
}
