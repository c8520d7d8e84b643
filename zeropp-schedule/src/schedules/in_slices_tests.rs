//! Orders of samples that are cut into slices.

use super::*;
use crate::check;
use crate::exchange::{Format, csv, json};
use crate::ir::{Action, Compute, Schedule};
use crate::lower::{LowerOptions, OptimizerSync, lower};
use crate::memory::{Ledger, MemoryBytes, StageBytes};
use crate::metrics::Metrics;
use crate::simulate::{Costs, simulate};
use crate::verify::{VerifyLimits, verify};

fn sliced() -> impl Iterator<Item = &'static Kind> {
    KINDS.iter().filter(|kind| kind.in_slices.is_some())
}

/// Sizes of a slice of a stage.
fn sizes(schedule: &Schedule) -> Vec<StageBytes> {
    let stage = StageBytes {
        input: 2,
        activation: 70,
        stash: 5,
        context: 7,
        context_gradient: 9,
        weights: 11,
        gradient: 13,
        gradient_shard: 3,
        message: 2,
        ..StageBytes::default()
    };
    vec![stage; schedule.cost_entries()]
}

/// Everything that holds for an order of slices.
fn check_all(compact: &Schedule) {
    verify(compact, &VerifyLimits::default()).unwrap();
    let entries = compact.cost_entries();
    let costs = Costs { memory: sizes(compact), ..Costs::uniform(entries, 5, 6, 4, 1) };
    simulate(compact, &costs).unwrap();
    for (recompute, replicas) in [(false, false), (true, true)] {
        for sync in [OptimizerSync::Barrier, OptimizerSync::Late] {
            let options = LowerOptions { recompute, replicas, sync, ..LowerOptions::default() };
            let program = lower(compact, &options);
            let limits = VerifyLimits { gathered_max: Some(2), ..VerifyLimits::default() };
            verify(&program, &limits).unwrap();
            simulate(&program, &costs).unwrap();
            for (rank, actions) in program.ranks.iter().enumerate() {
                let mut ledger = Ledger::of(&program, rank, &costs.memory);
                actions.iter().for_each(|action| ledger.run(action));
                assert_eq!(ledger.now(), MemoryBytes::default(), "all is given back");
            }
            let mut text = Vec::new();
            csv::write(&program, csv::Dialect::Zeropp, &mut text).unwrap();
            let read = csv::read(std::str::from_utf8(&text).unwrap()).unwrap();
            assert_eq!(Schedule { kind: program.kind.clone(), ..read }, program);
        }
    }
    let forwards = forwards_of(compact);
    let limits = VerifyLimits { forward_only: true, ..VerifyLimits::default() };
    verify(&forwards, &limits).unwrap();
    let mut ledger = Ledger::of(&forwards, 0, &costs.memory);
    forwards.ranks[0].iter().for_each(|action| ledger.run(action));
    assert_eq!(ledger.now().activation, 0, "a sample's last forward frees its context");
}

#[test]
fn every_order_of_slices_is_sound_and_gives_its_memory_back() {
    let mut made = 0;
    for kind in sliced() {
        for (pp, n) in [(1, 2), (1, 5), (2, 2), (2, 3), (3, 4), (4, 8)] {
            for samples in [1, 2, 3, 5] {
                let virtual_stages = kind.stages.default_number();
                let shape = Shape { pp, virtual_stages, micro_batches: samples, unit: 2 };
                let cut: Vec<u64> = (1..=n).rev().map(|i| 256 * i).collect();
                let schedule = generate_sliced(kind.name, &shape, &cut).unwrap();
                assert_eq!(schedule.micro_batches(), samples * n as usize);
                check_all(&schedule);
                made += 1;
            }
        }
    }
    assert_eq!(made, 24 * sliced().count());
}

#[test]
fn one_slice_is_a_whole_sample() {
    let shape = Shape { pp: 2, virtual_stages: 1, micro_batches: 5, unit: 3 };
    for kind in ["zeropp", "1f1b"] {
        let whole = generate(kind, &shape).unwrap();
        assert_eq!(generate_sliced(kind, &shape, &[]), Ok(whole.clone()));
        let one = generate_sliced(kind, &shape, &[4096]).unwrap();
        assert_eq!(one.ranks, whole.ranks, "{kind}");
    }
}

#[test]
fn rounds_of_a_sample_print_the_worked_example() {
    let shape = Shape { pp: 2, virtual_stages: 2, micro_batches: 2, unit: 2 };
    let schedule = generate_sliced("interleaved-zb", &shape, &[256; 2]).unwrap();
    assert_eq!(schedule.units, [2, 2]);
    let text =
        |rank: &Vec<Action>| rank.iter().map(Action::to_string).collect::<Vec<_>>().join(" ");
    assert_eq!(
        text(&schedule.ranks[1]),
        "1F0 1F1 3F0 3F1 3B1 3W1 1F2 3B0 3W0 1F3 1B1 1W1 3F2 1B0 1W0 3F3 3B3 3W3 3B2 3W2 1B3 1W3 \
         1B2 1W2"
    );
}

#[test]
fn a_kind_without_slices_says_which_kinds_have_them() {
    let shape = Shape { pp: 4, virtual_stages: 2, micro_batches: 2, unit: 2 };
    let error =
        |kind: &str, cut: &[u64]| generate_sliced(kind, &shape, cut).unwrap_err().to_string();
    assert_eq!(
        error("zb-v", &[256; 4]),
        "slices = 4: schedule zb-v has whole samples only; use zeropp, 1f1b or interleaved-zb, or \
         leave slices out"
    );
    assert_eq!(
        error("interleaved-zb", &[256; 3]),
        "schedule interleaved-zb: slices = 3 does not work; a round of a sample has no fewer \
         slices than pp = 4; use that many, or zeropp"
    );
    assert!(error("zeropp", &[256, 0]).contains("sample_slices[1] = 0: each slice has tokens"));
    let many = Shape { micro_batches: 1 << 20, ..shape };
    let error = generate_sliced("zeropp", &many, &[1; 1000]).unwrap_err().to_string();
    assert!(error.contains("more than"), "{error}");
}

/// The bubble of equal times, 0 to 1.
fn bubble(kind: &str, shape: Shape, n: usize) -> f64 {
    let schedule = generate_sliced(kind, &shape, &vec![256; n]).unwrap();
    let costs = Costs::uniform(schedule.cost_entries(), 1, 1, 1, 0);
    let timeline = simulate(&schedule, &costs).unwrap();
    let work = 3 * shape.virtual_stages * shape.micro_batches * n;
    1.0 - work as f64 / Metrics::new(&schedule, &timeline, &costs).makespan_ns as f64
}

/// One rank or many: a unit of two samples or more waits no longer than one of as many independent
/// micro-batches, as the last rank turns round while the first still has forwards.
#[test]
fn reversed_backwards_of_several_samples_lose_nothing() {
    let shape = Shape { pp: 4, virtual_stages: 1, micro_batches: 2, unit: 2 };
    let whole = Shape { micro_batches: 16, unit: 16, ..shape };
    let independent = {
        let costs = Costs::uniform(4, 1, 1, 1, 0);
        let schedule = generate("zeropp", &whole).unwrap();
        let timeline = simulate(&schedule, &costs).unwrap();
        1.0 - 48.0 / Metrics::new(&schedule, &timeline, &costs).makespan_ns as f64
    };
    let two = bubble("zeropp", shape, 8);
    assert!((two - independent).abs() < 1e-9 && (two - 0.0588).abs() < 1e-3, "{two} {independent}");
    // With one sample the turn costs (P − 1)(f + b) of n(f + b + w) more.
    let one = bubble("zeropp", Shape { micro_batches: 1, unit: 1, ..shape }, 16);
    assert!((one - 0.111).abs() < 1e-3, "{one}");
}

/// 1 + 2(P − 1)/(V·n) samples over P, where a unit of U samples holds U over P.
#[test]
fn rounds_hold_little_more_than_a_sample_over_the_ranks() {
    let (pp, v, n) = (4, 4, 16);
    let shape = Shape { pp, virtual_stages: v, micro_batches: 8, unit: 8 };
    let held = |kind: &str| {
        let schedule = generate_sliced(kind, &shape, &vec![256; n]).unwrap();
        let memory = vec![StageBytes { activation: 1, ..StageBytes::default() }; pp * v * n];
        let costs = Costs { memory, ..Costs::uniform(pp * v * n, 1, 1, 1, 0) };
        let timeline = simulate(&schedule, &costs).unwrap();
        *Metrics::new(&schedule, &timeline, &costs).peak_activation.iter().max().unwrap() as usize
    };
    assert_eq!(held("interleaved-zb"), v * n + 2 * (pp - 1));
    assert!(held("zeropp") > 6 * v * n);
}

/// What W needs of a slice is given back after as many slices as there are ranks, not after a unit.
#[test]
fn a_unit_s_weight_gradients_follow_their_backwards() {
    let shape = Shape { pp: 4, virtual_stages: 1, micro_batches: 6, unit: 6 };
    let schedule = generate_sliced("zeropp", &shape, &[256; 16]).unwrap();
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        let (mut waiting, mut most) = (0usize, 0);
        for action in actions {
            match action {
                Action::Compute { kind: Compute::B, .. } => waiting += 1,
                Action::Compute { kind: Compute::W, .. } => waiting -= 1,
                _ => {}
            }
            most = most.max(waiting);
        }
        assert_eq!(most, rank + 1);
    }
}

/// Two stages at a time: each is gathered for a sample's forwards and for its backwards.
#[test]
fn rounds_gather_a_stage_twice_a_sample() {
    let shape = Shape { pp: 2, virtual_stages: 3, micro_batches: 4, unit: 4 };
    let schedule = generate_sliced("interleaved-zb", &shape, &[256; 6]).unwrap();
    let program = lower(&schedule, &LowerOptions::default());
    for rank in &program.ranks {
        let gathers = rank.iter().filter(|a| matches!(a, Action::AllGather { .. })).count();
        let reductions = rank.iter().filter(|a| matches!(a, Action::ReduceScatter { .. })).count();
        assert!(gathers <= 2 * 3 * 4, "{gathers}");
        assert_eq!(reductions, 3 * 4);
    }
}

#[test]
fn files_keep_slices_and_their_costs_and_pytorch_s_leave_them_out() {
    let shape = Shape { pp: 2, virtual_stages: 2, micro_batches: 2, unit: 2 };
    let schedule = generate_sliced("interleaved-zb", &shape, &[512, 256, 100]).unwrap();
    let mut costs = Costs::uniform(schedule.cost_entries(), 5000, 6000, 4000, 0);
    costs.stages.iter_mut().zip(1..).for_each(|(stage, n)| stage.f_ns += 1000 * n);
    let file = Some(json::JsonCosts::from(&costs));
    let document = json::Document { schedule: schedule.clone(), costs: file, measures: None };
    let mut text = Vec::new();
    json::write(&document, &mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("\"sample_slices\": [512,256,100]"), "{text}");
    assert_eq!(json::read(&text).as_ref(), Ok(&document));
    assert!(check::check(&text, Format::Json, &VerifyLimits::default(), 1).is_ok());
    let bad =
        text.replace("[512,256,100]", "[512,256]").replace("\"units\": [3,3]", "\"units\": [6]");
    let said = check::check(&bad, Format::Json, &VerifyLimits::default(), 1);
    assert!(said.is_err(), "another cut has other sums");
    let mut torch = Vec::new();
    csv::write(&schedule, csv::Dialect::Torch, &mut torch).unwrap();
    assert!(!String::from_utf8(torch).unwrap().contains('#'));
    let said = csv::read("#sample_slices,256,0\n0F0,0F1,0B1,0B0\n").unwrap_err().to_string();
    assert_eq!(said, "row 1: sample_slices: found \"0\", not a number above 0");
    let said = csv::read("#sample_slices,256,256\n0F0,0B0\n").unwrap_err().to_string();
    assert!(said.starts_with("row 1: units[0] = 1: units are of whole samples"), "{said}");
}
