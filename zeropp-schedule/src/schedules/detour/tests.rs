//! Schedules around missing ranks: sound for every kind, and no longer than they have to be.

use super::*;
use crate::exchange::json::{self, Document};
use crate::lower::{LowerOptions, OptimizerSync, lower};
use crate::schedules::{KINDS, generate, generate_with_costs};
use crate::simulate::{self, simulate, step_period_ns};
use crate::verify::{VerifyError, VerifyLimits, verify};

fn plain(kind: &str, shape: &Shape, costs: &Costs) -> Schedule {
    generate_with_costs(kind, shape, costs).unwrap()
}

fn at(pp: usize, replica: usize) -> ReplicaRank {
    ReplicaRank { pp, replica }
}

fn shape(pp: usize, virtual_stages: usize, micro_batches: usize) -> Shape {
    Shape { pp, virtual_stages, micro_batches, unit: micro_batches }
}

fn made(kind: &str, shape: Shape, replicas: usize, missing: &[ReplicaRank]) -> Schedule {
    let costs = Costs::uniform(shape.stages(), 2, 2, 1, 0);
    around(&plain(kind, &shape, &costs), &shape, &costs, replicas, missing).unwrap()
}

fn makespan(schedule: &Schedule, costs: &simulate::Costs) -> u64 {
    let timeline = simulate(schedule, costs).unwrap();
    timeline.ranks.iter().filter_map(|rank| rank.own_span()).map(|(_, end)| end).max().unwrap()
}

/// Every kind that there is in some shape, with its routes proven as what `lower` makes of it is:
/// with and without recomputation, and with late updates.
#[test]
fn every_kind_goes_around_what_is_missing() {
    let alone: [&[ReplicaRank]; 5] =
        [&[], &[at(0, 0)], &[at(1, 1)], &[at(0, 1), at(1, 0)], &[at(1, 0), at(1, 2)]];
    for kind in KINDS.iter().filter(|kind| !kind.is_searched()) {
        let mut found = 0;
        for (pp, most) in [(2, 4), (2, 6), (4, 8), (4, 9), (3, 7)] {
            let shape = Shape { unit: 3, ..shape(pp, kind.stages.default_number(), most) };
            let costs = Costs::uniform(shape.stages(), 3, 4, 2, 1);
            if generate_with_costs(kind.name, &shape, &costs).is_err() {
                continue;
            }
            for (replicas, missing) in alone.iter().flat_map(|m| [(2, *m), (3, *m)]) {
                if missing.iter().any(|rank| rank.replica >= replicas) {
                    continue;
                }
                found += 1;
                let compact =
                    around(&plain(kind.name, &shape, &costs), &shape, &costs, replicas, missing)
                        .unwrap();
                assert_eq!(compact.pp(), pp * replicas - missing.len());
                assert_eq!(compact.micro_batches(), most * replicas);
                verify(&compact, &VerifyLimits::default()).unwrap();
                for recompute in [false, true] {
                    for sync in [OptimizerSync::Barrier, OptimizerSync::Late] {
                        let options = LowerOptions { recompute, sync, ..LowerOptions::default() };
                        let program = lower(&compact, &options);
                        let what = format!("{} P {pp} K {replicas} {missing:?}", kind.name);
                        verify(&program, &VerifyLimits::default())
                            .unwrap_or_else(|e| panic!("{what}: {e}"));
                        assert_eq!(program.first_copies(), compact.first_copies());
                    }
                }
            }
        }
        assert!(found >= 8, "{}: {found}", kind.name);
    }
}

/// Each micro-batch is computed in its own pipeline wherever that is whole, and the work of those
/// who are missing is dealt out evenly.
#[test]
fn only_the_missing_are_gone_around() {
    let schedule = made("1f1b", shape(3, 1, 6), 3, &[at(1, 1)]);
    // Replica by replica, the middle one without its second rank.
    let own = [[0, 1, 2], [3, usize::MAX, 4], [5, 6, 7]];
    let mut guests = [0; 8];
    for (micro_batch, route) in schedule.routes.iter().enumerate() {
        for (stage, rank) in route.iter().enumerate() {
            match own[micro_batch % 3][stage] {
                usize::MAX => guests[*rank] += 1,
                home => assert_eq!(*rank, home),
            }
        }
    }
    assert_eq!(guests, [0, 3, 0, 0, 0, 0, 3, 0]);
    assert_eq!(schedule.first_copies(), [0, 1, 2, 0, 2, 0, 1, 2]);
}

/// With all ranks it takes what the kind takes by itself: every replica's order is its own.
#[test]
fn nothing_missing_costs_nothing() {
    for kind in ["1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "zeropp", "hanayo"] {
        let v = Kind::find(kind).unwrap().stages.default_number();
        let shape = shape(4, v, 8);
        let costs = Costs::uniform(shape.stages(), 5, 4, 3, 1);
        let timed = simulate::Costs::uniform(shape.stages(), 5, 4, 3, 1);
        let plain = generate_with_costs(kind, &shape, &costs).unwrap();
        let joint = around(&plain, &shape, &costs, 2, &[]).unwrap();
        let [one, all] = [&plain, &joint].map(|schedule| makespan(schedule, &timed));
        assert_eq!(all, one, "{kind}");
    }
}

/// Three pipelines of four ranks with six micro-batches
/// each, a rank missing, F, B and W of a slot each. 27 slots are 1F1B's with all ranks, and what
/// the two that compute for the missing rank cannot do without: 9 micro-batches of 3 slots each.
#[test]
fn three_pipelines_with_a_rank_missing() {
    let costs = Costs::uniform(4, 1, 1, 1, 0);
    let timed = simulate::Costs::uniform(4, 1, 1, 1, 0);
    let slots = |kind: &str, missing: &[ReplicaRank]| {
        makespan(
            &around(&plain(kind, &shape(4, 1, 6), &costs), &shape(4, 1, 6), &costs, 3, missing)
                .unwrap(),
            &timed,
        )
    };
    let of = |kind: &str| [slots(kind, &[]), slots(kind, &[at(1, 0)])];
    let all = ["1f1b", "zb-h1", "zb-h2"].map(of);
    assert_eq!(all, [[27, 28], [21, 28], [21, 28]]);
}

/// What runs longest has all its work, and no rank takes more memory than in the kind's own order.
#[test]
fn no_order_is_longer_or_larger_than_the_kind_s_own() {
    let mut shorter = 0;
    for kind in ["1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved", "dualpipe-v"] {
        let v = Kind::find(kind).unwrap().stages.default_number();
        for (replicas, missing) in [(2, vec![at(1, 0)]), (3, vec![at(0, 1), at(2, 2)])] {
            let shape = shape(4, v, 8);
            let costs = Costs::uniform(shape.stages(), 5, 4, 3, 1);
            let timed = simulate::Costs {
                memory: vec![
                    crate::memory::StageBytes {
                        activation: 2,
                        stash: 1,
                        ..Default::default()
                    };
                    shape.stages()
                ],
                ..simulate::Costs::uniform(shape.stages(), 5, 4, 3, 1)
            };
            let plain = generate_with_costs(kind, &shape, &costs).unwrap();
            let hosts = Hosts::new("1f1b", 4, replicas, &missing).unwrap();
            let routes = hosts.routes(&plain.placement, 8);
            let joint = Joint::new(&plain, &costs, &routes, replicas);
            let own = joint.run(Choice::OwnOrder, None).unwrap();
            let best = around(&plain, &shape, &costs, replicas, &missing).unwrap();
            let takes = makespan(&best, &timed);
            assert!(takes <= own.makespan, "{kind}: {takes} > {}", own.makespan);
            shorter += usize::from(takes < own.makespan);
            let busiest =
                routes.iter().flatten().fold(vec![0u64; joint.ranks], |mut busy, rank| {
                    busy[*rank] += 12;
                    busy
                });
            assert!(takes >= *busiest.iter().max().unwrap(), "{kind}");
            let metrics =
                crate::metrics::Metrics::new(&best, &simulate(&best, &timed).unwrap(), &timed);
            for (peak, most) in metrics.peak_activation.iter().zip(&own.peaks) {
                assert!(*peak <= *most as u64, "{kind}: {peak} > {most}");
            }
        }
    }
    assert!(shorter >= 3, "{shorter} of 12 found a shorter order");
}

/// Two ranks at different places of different replicas cost no more than one of them would, where
/// leaving out their replicas costs two.
#[test]
fn several_losses_cost_less_than_their_replicas() {
    let shape = shape(4, 1, 24);
    let timed = simulate::Costs::uniform(4, 5, 4, 3, 1);
    let step = |missing: &[ReplicaRank]| {
        let schedule = made("zb-h1", shape, 4, missing);
        step_period_ns(&lower(&schedule, &LowerOptions::default()), &timed)
    };
    let (one, two) = (step(&[at(1, 0)]), step(&[at(1, 0), at(2, 1)]));
    let plain = |micro_batches| {
        let schedule = generate("zb-h1", &Shape { micro_batches, ..shape }).unwrap();
        step_period_ns(&lower(&schedule, &LowerOptions::default()), &timed)
    };
    assert!(plain(24) < one && one <= two && two < plain(48), "{one} {two}");
}

#[test]
fn files_keep_the_routes() {
    let schedule = made("zb-v", shape(2, 2, 4), 2, &[at(1, 0)]);
    for schedule in [lower(&schedule, &LowerOptions::default()), schedule] {
        let document = Document { schedule, costs: None, measures: None };
        let mut text = Vec::new();
        json::write(&document, &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert_eq!(json::read(&text).unwrap(), document);
        let wrong = text.replacen("\"routes\": [[", "\"routes\": [[7,", 1);
        let error = json::read(&wrong).unwrap_err().to_string();
        assert!(error.starts_with("routes: found [[7, "), "{error}");
    }
}

/// Each slip in what copies have to keep is seen.
#[test]
fn copies_that_do_not_go_together_are_refused() {
    let good = lower(&made("1f1b", shape(2, 1, 4), 2, &[at(1, 1)]), &LowerOptions::default());
    let limits = VerifyLimits::default();
    assert_eq!(verify(&good, &limits), Ok(()));
    let refused = |change: &dyn Fn(&mut Schedule), words: &str| {
        let mut bad = good.clone();
        change(&mut bad);
        let error = verify(&bad, &limits).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    let is_sum = |action: &Action| matches!(action, Action::ReplicaReduce { .. });
    refused(&|s| s.ranks[2].retain(|a| !is_sum(a)), "is missing");
    refused(&|s| s.routes[1][0] = 0, "lives on rank 0");
    refused(&|s| drop(s.routes.pop()), "7 routes");
    refused(&|s| s.routes[1][1] = 2, "stage in common");
    refused(&|s| s.routes[3] = vec![0], "a rank of 0..3");
    refused(&|s| s.placement[0] = 2, "not the first route");
    refused(
        &|s| {
            let last = s.ranks[0].iter().rposition(|a| matches!(a, Action::Send { .. })).unwrap();
            s.ranks[0].remove(last);
        },
        "is missing",
    );
    // Sums in another order: on ranks of two stages each.
    let two = made("zb-v", shape(2, 2, 4), 2, &[]);
    let mut bad = lower(&two, &LowerOptions::default());
    assert_eq!(verify(&bad, &limits), Ok(()));
    let sums: Vec<usize> = (0..bad.ranks[0].len()).filter(|i| is_sum(&bad.ranks[0][*i])).collect();
    let (first, last) = (bad.ranks[0].remove(sums[0]), sums[1] - 1);
    bad.ranks[0].insert(last + 1, first);
    assert!(matches!(verify(&bad, &limits), Err(VerifyError::Replicas(_))));
}

#[test]
fn impossible_detours_are_reported() {
    let costs = Costs::uniform(2, 1, 1, 1, 0);
    let told = |kind: &str, replicas: usize, missing: &[ReplicaRank]| {
        around(&plain(kind, &shape(2, 1, 4), &costs), &shape(2, 1, 4), &costs, replicas, missing)
            .unwrap_err()
            .to_string()
    };
    let all = told("1f1b", 2, &[at(1, 0), at(1, 1)]);
    assert!(all.contains("place = 1") && all.contains("must be left"), "{all}");
    assert!(told("1f1b", 2, &[at(2, 0)]).contains("places are 0..2"));
    assert!(told("1f1b", 2, &[at(0, 2)]).contains("replicas are 0..2"));
    assert!(told("1f1b", 0, &[]).contains("at least 1"));
    assert!(told("forward", 2, &[]).contains("trains nothing"));
    assert!(told("1f1b", usize::MAX, &[]).contains("more actions"));
}
