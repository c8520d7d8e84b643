//! Every schedule kind and file runs, action for action, and changes no bit.

use std::collections::HashMap;

use crate::common::{assert_same_bits, run, tiny};
use zeropp::config::Recompute;
use zeropp::meter::MemoryKind;
use zeropp::pipeline::exchange::csv::{self, Dialect};
use zeropp::pipeline::exchange::json::{self, Document};
use zeropp::pipeline::ir::{Action, Compute, Schedule, vee};
use zeropp::pipeline::lower::{LowerOptions, lower};
use zeropp::pipeline::schedules::{KINDS, Shape};
use zeropp::search::generate;
use zeropp::{Config, Trainer};

const MICRO_BATCHES: usize = 8;

/// Eight micro-batches in one unit, so that every schedule sums in the same order.
fn base() -> Config {
    Config {
        layers: 8,
        steps: 5,
        micro_batches: Some(MICRO_BATCHES),
        unit: Some(MICRO_BATCHES),
        virtual_stages: None,
        ..tiny()
    }
}

fn of_kind(kind: &str, pp: usize, config: Config) -> Config {
    Config { schedule: kind.into(), pp, ..config }
}

fn check_all_kinds(kinds: &[&str], shapes: &[(usize, Option<usize>)], config: &Config) {
    let reference = run(config.clone());
    for kind in kinds {
        for (pp, v) in shapes {
            let config = Config { virtual_stages: *v, ..of_kind(kind, *pp, config.clone()) };
            let what = format!("{kind} pp {pp} virtual {v:?}");
            assert_same_bits(&reference, &run(config), &what);
        }
    }
}

fn all_kinds() -> Vec<&'static str> {
    KINDS.iter().map(|k| k.name).collect()
}

#[test]
fn every_kind_has_the_bits_of_zeropp() {
    check_all_kinds(&all_kinds(), &[(1, None), (2, None), (4, None)], &base());
}

#[test]
fn every_kind_has_the_bits_of_zeropp_with_shards() {
    check_all_kinds(&all_kinds(), &[(2, None)], &Config { zero3: 2, ..base() });
    let replicas = Config { zero3: 2, dp: 2, zero1: true, steps: 2, ..base() };
    check_all_kinds(&["zb-v", "dualpipe-v", "zb-2p"], &[(2, None)], &replicas);
}

#[test]
fn kinds_of_any_v_have_the_same_bits_with_four() {
    let kinds = ["gpipe", "interleaved", "bf-pp", "interleaved-zb", "zeropp-auto"];
    check_all_kinds(&kinds, &[(2, Some(4))], &base());
}

#[test]
fn recomputation_changes_nothing_under_any_kind() {
    let reference = run(base());
    for kind in all_kinds() {
        let config = Config { recompute: Recompute::Full, ..of_kind(kind, 2, base()) };
        assert_same_bits(&reference, &run(config), &format!("{kind} recomputed"));
    }
}

#[test]
fn a_tied_head_on_the_rank_of_the_embedding_changes_nothing() {
    let tied = Config { tied: true, zero3: 2, ..base() };
    let kinds = ["zb-v", "v-half", "v-min", "dualpipe-v"];
    assert_eq!(vee(2, 2)[0], vee(2, 2)[3], "both ends of a V are on rank 0");
    check_all_kinds(&kinds, &[(2, None)], &tied);
}

/// What rank `rank` of `trainer` did in each step, in order.
fn executed(trainer: &Trainer, steps: usize) -> Vec<(usize, Vec<Action>)> {
    let (_, timeline) = trainer.train_to_timeline(|_| {}).unwrap();
    let per_rank = |rank: &zeropp::pipeline::timeline::RankTimeline| {
        let actions: Vec<Action> = rank.spans.iter().map(|s| s.action).collect();
        assert!(actions.len().is_multiple_of(steps), "every step is the same program");
        let length = actions.len() / steps;
        (0..steps).map(|i| (rank.pp, actions[i * length..][..length].to_vec())).collect::<Vec<_>>()
    };
    timeline.ranks.iter().flat_map(per_rank).collect()
}

fn check_executed(config: Config) {
    let what = config.schedule.clone();
    let trainer = Trainer::new(Config { steps: 2, ..config }).unwrap();
    let done = executed(&trainer, 2);
    assert!(!done.is_empty());
    for (pp, actions) in done {
        assert_eq!(actions, trainer.schedule().ranks[pp], "{what} pp {pp}");
    }
}

#[test]
fn the_trace_is_the_lowered_schedule() {
    for kind in all_kinds() {
        check_executed(of_kind(kind, 2, Config { zero3: 2, ..base() }));
    }
    let more = Config { recompute: Recompute::Full, dp: 2, prefetch: 2, ..base() };
    check_executed(of_kind("zeropp", 4, Config { unit: Some(3), ..more }));
}

/// Schedules that go to and fro between two stages keep both, where two may be resident.
#[test]
fn gathers_follow_from_looking_ahead() {
    let gathers = |kind: &str, prefetch: usize| {
        let config = Config { prefetch, zero3: 2, ..of_kind(kind, 2, base()) };
        Trainer::new(config).unwrap().plan().all_gathers_per_rank
    };
    assert_eq!((gathers("zeropp", 1), gathers("bf-pp", 1)), (3, 3));
    for kind in ["interleaved", "zb-v", "dualpipe-v"] {
        assert_eq!(gathers(kind, 1), 2, "{kind}: both stages stay for the step");
        assert!(gathers(kind, 0) > 4, "{kind}: one at a time goes to and fro");
    }
}

/// Predicted and measured peaks of every kind of memory within 10 %, whatever the schedule.
#[test]
fn memory_is_predicted_for_every_kind() {
    for kind in all_kinds() {
        let base = Config { hidden: 32, seq: 16, steps: 2, zero3: 2, ..base() };
        let summary = run(of_kind(kind, 2, base)).summary;
        for memory in MemoryKind::ALL {
            let measured = summary.peak_bytes.get(memory) as f64;
            let predicted = summary.predicted_bytes.get(memory) as f64;
            assert!(
                (measured - predicted).abs() <= 0.1 * measured.max(predicted),
                "{kind}: {memory:?} measured {measured}, predicted {predicted}"
            );
        }
    }
}

fn save(dir: &tempfile::TempDir, name: &str, schedule: &Schedule) -> String {
    let path = dir.path().join(name);
    let mut out = Vec::new();
    if name.ends_with(".json") {
        let document = Document { schedule: schedule.clone(), costs: None, measures: None };
        json::write(&document, &mut out).unwrap();
    } else {
        csv::write(schedule, Dialect::Zeropp, &mut out).unwrap();
    }
    std::fs::write(&path, out).unwrap();
    path.display().to_string()
}

fn schedule(kind: &str, pp: usize, v: usize, m: usize, unit: usize) -> Schedule {
    let shape = Shape { pp, virtual_stages: v, micro_batches: m, unit };
    generate(kind, &shape).unwrap()
}

/// Sizes other than P are left to the file.
fn of_file(path: &str, pp: usize) -> Config {
    Config { unit: None, micro_batches: None, ..of_kind(path, pp, base()) }
}

#[test]
fn files_run_and_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let reference = run(base());
    let check = |name: &str, schedule: &Schedule| {
        let path = save(&dir, name, schedule);
        assert_same_bits(&reference, &run(of_file(&path, schedule.pp())), name);
    };
    let lowered =
        |s: &Schedule, prefetch| lower(s, &LowerOptions { prefetch, ..LowerOptions::default() });
    check("compact.csv", &schedule("zb-v", 2, 2, MICRO_BATCHES, 1));
    check("compact.json", &schedule("zb-2p", 4, 1, MICRO_BATCHES, 1));
    check("program.csv", &lowered(&schedule("dualpipe-v", 2, 2, MICRO_BATCHES, 1), 0));
    check("program.json", &lowered(&schedule("zeropp", 2, 2, MICRO_BATCHES, MICRO_BATCHES), 2));
    check("uneven.csv", &uneven());

    let units = schedule("zeropp", 2, 2, MICRO_BATCHES, 3);
    let path = save(&dir, "units.csv", &units);
    let in_units = Config { unit: Some(3), ..base() };
    assert_same_bits(&run(in_units), &run(of_file(&path, 2)), "units of 3");
    assert_eq!(Trainer::new(of_file(&path, 2)).unwrap().plan().units, [3, 3, 2]);
}

/// Where a program does not say when reductions end, the one of a stage's earlier unit does before
/// the next begins.
#[test]
fn programs_without_ends_of_reductions_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let apart = schedule("zeropp", 2, 1, MICRO_BATCHES, 3);
    let mut whole = apart.clone();
    for action in whole.ranks.iter_mut().flatten() {
        if let Action::Compute { kind: kind @ Compute::B, .. } = action {
            *kind = Compute::BW;
        }
    }
    let is_w = |action: &Action| matches!(action, Action::Compute { kind: Compute::W, .. });
    whole.ranks.iter_mut().for_each(|rank| rank.retain(|action| !is_w(action)));
    for (what, zero3) in [("apart", 1), ("apart", 2), ("whole", 1), ("whole", 2)] {
        let schedule = if what == "whole" { &whole } else { &apart };
        let mut program = lower(schedule, &LowerOptions::default());
        let is_end = |action: &Action| matches!(action, Action::Retire { .. });
        program.ranks.iter_mut().for_each(|rank| rank.retain(|action| !is_end(action)));
        let path = save(&dir, "program.json", &program);
        let found = run(Config { zero3, ..of_file(&path, 2) });
        let reference = run(Config { unit: Some(3), zero3, ..base() });
        assert_same_bits(&reference, &found, &format!("{what}, D {zero3}"));
        assert_eq!(found.summary.peak_bytes, found.summary.predicted_bytes, "{what}, D {zero3}");
    }
}

/// Three stages on two ranks: 1 on rank 1, 0 and 2 on rank 0; all F, then all backwards.
fn uneven() -> Schedule {
    let all = |kind, stage| (0..MICRO_BATCHES).map(move |i| Action::compute(kind, stage, i));
    let rank = |stages: &[usize]| {
        let forward = stages.iter().flat_map(|s| all(Compute::F, *s));
        forward.chain(stages.iter().rev().flat_map(|s| all(Compute::BW, *s))).collect()
    };
    let ranks = vec![rank(&[0, 2]), rank(&[1])];
    let (placement, units) = (vec![0, 1, 0], vec![MICRO_BATCHES]);
    Schedule { kind: "file".into(), placement, units, ranks, ..Schedule::default() }
}

/// A program that ends in an optimizer step runs as it stands, not as this run would lower it.
#[test]
fn a_program_in_a_file_runs_as_it_stands() {
    let dir = tempfile::tempdir().unwrap();
    let options = LowerOptions { prefetch: 0, ..LowerOptions::default() };
    let program = lower(&schedule("zb-v", 2, 2, MICRO_BATCHES, 1), &options);
    let path = save(&dir, "as-it-stands.json", &program);
    let config = Config { prefetch: 2, ..of_file(&path, 2) };
    assert_eq!(Trainer::new(config.clone()).unwrap().schedule(), &program);
    check_executed(config);
}

#[test]
fn a_file_that_is_not_this_run_s_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let good = schedule("zb-v", 2, 2, MICRO_BATCHES, 1);
    let path = save(&dir, "good.csv", &good);
    let mut late = good.clone();
    late.ranks[1].swap(0, 1);
    let late = save(&dir, "late.csv", &late);
    let program = lower(&good, &LowerOptions { recompute: true, ..LowerOptions::default() });
    let program = save(&dir, "program.csv", &program);
    let units = save(&dir, "units.csv", &schedule("zeropp", 2, 2, MICRO_BATCHES, 3));
    std::fs::write(dir.path().join("bad.csv"), "0F0,0B0x\n").unwrap();
    let bad = dir.path().join("bad.csv").display().to_string();
    let with = |path: &str| of_file(path, 2);
    let cases = [
        (with("none.csv"), "schedule = none.csv: ", "No such file"),
        (with(&bad), "schedule = ", "row 1, column 2"),
        (with(&late), "schedule = ", "rank 1, action"),
        (Config { pp: 4, ..with(&path) }, "pp = 4: ", "is for 2 ranks; use 2"),
        (Config { virtual_stages: Some(1), ..with(&path) }, "virtual = 1: ", "has 4 stages"),
        (Config { micro_batches: Some(4), ..with(&path) }, "micro-batches = 4: ", "has 8 a step"),
        (Config { unit: Some(4), ..with(&units) }, "unit = 4: ", "are [3, 3, 2]"),
        (Config { layers: 3, ..with(&path) }, "layers: 4 stages need", "the model has 3"),
        (
            Config { recompute: Recompute::None, ..with(&program) },
            "recompute = none: ",
            "recomputes stages [0, 1]",
        ),
        (
            Config { recompute: Recompute::Full, dp: 2, ..with(&program) },
            "dp = 2: ",
            "does not sum over replicas",
        ),
    ];
    for (config, start, fragment) in cases {
        let error = Trainer::new(config).err().expect(start);
        assert!(error.is_bad_input());
        let text = error.to_string();
        assert!(text.starts_with(start) && text.contains(fragment), "{start}: {text}");
    }
    for recompute in [Recompute::Full, Recompute::Auto] {
        let recomputed = Config { recompute, ..with(&program) };
        assert_same_bits(&run(base()), &run(recomputed), "a program that recomputes");
    }
}

/// The settings know how many stages each schedule takes; the generators have the last word.
#[test]
fn settings_and_generators_agree_on_stages() {
    let mut defaults = HashMap::new();
    for kind in all_kinds() {
        let config = of_kind(kind, 2, Config { virtual_stages: None, ..base() });
        defaults.insert(kind, config.virtual_stages());
        for v in [1, 2, 4] {
            let shape = Shape { pp: 2, virtual_stages: v, micro_batches: 8, unit: 8 };
            let allowed = Config { virtual_stages: Some(v), ..config.clone() }.validate().is_ok();
            assert_eq!(allowed, generate(kind, &shape).is_ok(), "{kind} with virtual {v}");
        }
        // The defaults of every size are ones that the kind takes.
        for pp in [1, 2, 3, 4] {
            let config = Config { schedule: kind.into(), pp, ..Config::default() };
            if let Err(e) = Trainer::new(config) {
                panic!("{kind} pp {pp}: {e}");
            }
        }
    }
    assert_eq!((defaults["1f1b"], defaults["zb-v"], defaults["gpipe"]), (1, 2, 1));
}
