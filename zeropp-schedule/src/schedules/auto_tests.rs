//! ZeroPP with costs: never slower than the fixed order, never over a limit, still blockwise.

use super::closed_forms::{complete, config, timed};
use super::timing::Timing;
use super::zeropp_auto::zeropp_auto_unit;
use super::zeropp_place::{Cutoff, DeadEnd, Home, Policy, StepPlacer};
use super::*;
use crate::ir::Schedule;
use crate::ir::{Compute, Task};
use proptest::prelude::*;

/// The largest idle share of a rank between its first and last action.
fn bubble(t: &Timing) -> f64 {
    let of = |r: usize| 1.0 - t.busy[r] as f64 / (t.ends[r] - t.starts[r]) as f64;
    (0..t.busy.len()).map(of).fold(0.0, f64::max)
}

/// Unit by unit and without overlap; 2V − 1 blocks of F and B on every rank and unit.
fn blockwise(shape: &Shape, schedule: &Schedule) {
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        let mut blocks = Vec::new();
        let mut unit = 0;
        for Task { kind, stage, micro_batch: i } in actions.iter().flat_map(|a| a.computes()) {
            let of = schedule.unit_of(i);
            assert!(of >= unit, "rank {rank} goes back to unit {of}");
            unit = of;
            if kind != Compute::W && blocks.last() != Some(&(unit, stage)) {
                blocks.push((unit, stage));
            }
        }
        // Units of one stage a rank follow each other on the same stage.
        let want = (2 * shape.virtual_stages - 1) * shape.units().len();
        assert_eq!(blocks.len(), want, "rank {rank}: {blocks:?}");
    }
}

#[test]
fn bubble_of_the_14b_profile() {
    let costs = OrderCosts::uniform(8, 11347, 11248, 8132, 377);
    for (unit, fixed_at, at_most) in [(7, 0.0471, 0.0471), (8, 0.0414, 0.0261), (12, 0.028, 0.002)]
    {
        for units in [1, 4] {
            let shape = Shape { pp: 4, virtual_stages: 2, micro_batches: units * unit, unit };
            let fixed = timed(&generate("zeropp", &shape).unwrap(), &costs);
            assert!((bubble(&fixed) - fixed_at).abs() < 5e-5, "{}", bubble(&fixed));
            let schedule = zeropp_auto(&shape, &costs).unwrap();
            blockwise(&shape, &schedule);
            let t = timed(&schedule, &costs);
            assert!(bubble(&t) <= at_most, "U = {unit}: {}", bubble(&t));
            let bound = zeropp_bound(&shape, &costs);
            if unit == 12 {
                assert!(t.own_span() >= bound);
            } else {
                assert_eq!(t.own_span(), bound, "no blockwise order is better at U = {unit}");
            }
            assert!(t.peaks.iter().all(|peak| *peak <= 4 * unit as i64));
        }
    }
}

#[test]
fn unit_is_chosen_within_the_limit() {
    let costs = OrderCosts::uniform(8, 11347, 11248, 8132, 377);
    let shape = Shape { pp: 4, virtual_stages: 2, micro_batches: 48, unit: 1 };
    // Room for 12 micro-batches on two stages, at two units of memory each.
    let (unit, schedule) = zeropp_auto_unit(&shape, &costs.clone().with_limit(48)).unwrap();
    complete(&schedule);
    assert_eq!(schedule.units.iter().max(), Some(&unit));
    assert!(timed(&schedule, &costs).peaks.iter().all(|peak| *peak <= 48));
    let (smaller, slow) = zeropp_auto_unit(&shape, &costs.clone().with_limit(20)).unwrap();
    assert!(smaller < unit);
    assert!(timed(&slow, &costs).makespan > timed(&schedule, &costs).makespan);

    let error = zeropp_auto_unit(&shape, &costs.with_limit(3)).unwrap_err().to_string();
    assert!(error.contains("mem_limit = 3") && error.contains("at least 4"), "{error}");
}

/// Shapes with uneven stages, gathers and reductions.
fn settings() -> impl Strategy<Value = (Shape, OrderCosts)> {
    let times = proptest::collection::vec((1u64..30, 1u64..30, 1u64..30, 0u64..60, 0u64..60), 20);
    (1usize..6, 1usize..5, 1usize..12, 1usize..20, 0u64..9, times).prop_map(
        |(pp, virtual_stages, unit, micro_batches, send, times)| {
            let shape = Shape { pp, virtual_stages, micro_batches, unit };
            let mut costs = OrderCosts::uniform(shape.stages(), 0, 0, 0, send);
            for (s, (f, b, w, gather, reduce)) in times.into_iter().take(shape.stages()).enumerate()
            {
                (costs.f[s], costs.b[s], costs.w[s]) = (f, b, w);
                (costs.gather[s], costs.reduce[s]) = (gather, reduce);
                costs.mem_f[s] = 2 * (1 + s as i64 % 3);
                costs.mem_b[s] = -costs.mem_f[s] / 2;
                costs.mem_w[s] = -costs.mem_f[s] / 2;
            }
            (shape, costs)
        },
    )
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn never_slower_never_over_the_limit((shape, costs) in settings(), less in 1i64..10) {
        let fixed = generate("zeropp", &shape).unwrap();
        let free = zeropp_auto(&shape, &costs).unwrap();
        complete(&free);
        if shape.virtual_stages > 1 {
            blockwise(&shape, &free);
        }
        let [fixed, free] = [&fixed, &free].map(|s| zeropp_auto::lowered_timing(&shape, &costs, s));
        prop_assert!(free.own_span() >= zeropp_bound(&shape, &costs));
        prop_assert!(free.makespan <= fixed.makespan);
        prop_assert!(free.own_span() <= fixed.own_span());
        let unit = shape.unit.min(shape.micro_batches) as i64;
        for (rank, peak) in free.peaks.iter().enumerate() {
            let of_unit = (0..shape.virtual_stages).map(|v| costs.mem_f[v * shape.pp + rank]);
            prop_assert!(*peak <= unit * of_unit.sum::<i64>());
        }
        // Less room: either an error that says how much is needed, or a schedule that fits.
        let limit = (free.peaks.iter().max().unwrap() - less).max(0);
        match zeropp_auto(&shape, &costs.clone().with_limit(limit)) {
            Ok(tight) => {
                complete(&tight);
                let peaks = timed(&tight, &costs).peaks;
                prop_assert!(peaks.iter().all(|peak| *peak <= limit));
            }
            Err(error) => prop_assert!(error.to_string().contains("needs at least")),
        }
    }
}

proptest! {
    #![proptest_config(config(300))]

    /// The search's own clock agrees with the one that times written actions, and a cutoff stops
    /// what passes it and nothing else.
    #[test]
    fn steps_are_scored_as_they_are_written(
        (shape, costs) in settings(), depths in proptest::collection::vec(1usize..12, 5),
        quarters in 0u64..5, paced: bool, home in 0usize..3,
        limit in proptest::option::of(0i64..80),
    ) {
        let unit = shape.unit.min(shape.micro_batches);
        let mut warm_up: Vec<usize> = depths[..shape.pp].iter().map(|d| (*d).min(unit)).collect();
        if limit.is_none() {
            // Deepest first, so that the step can run.
            warm_up.sort_by(|a, b| b.cmp(a));
        }
        let home = [Home::WithB, Home::InBlock, Home::InUnit][home];
        let policy = Policy { warm_up, quarters, paced, home };
        let costs = OrderCosts { mem_limit: limit, ..costs };
        let mut steps = StepPlacer::new(&shape, &costs);
        let Ok(score) = steps.score(&policy, Cutoff::NONE) else {
            prop_assert!(limit.is_some());
            prop_assert_eq!(steps.write(&policy), Err(DeadEnd));
            return Ok(());
        };
        let kind = "zeropp-auto".into();
        let placement = crate::ir::looping(shape.pp, shape.virtual_stages);
        let ranks = steps.write(&policy).unwrap();
        let units = shape.units();
        let written = Schedule { kind, placement, units, ranks, ..Schedule::default() };
        complete(&written);
        let timing = zeropp_auto::lowered_timing(&shape, &costs, &written);
        prop_assert_eq!(score, zeropp_auto::score(&timing));

        let exact = Cutoff { own_span: score.own_span, makespan: score.makespan };
        prop_assert_eq!(steps.score(&policy, exact), Ok(score));
        for less in [
            Cutoff { own_span: score.own_span - 1, ..exact },
            Cutoff { makespan: score.makespan - 1, ..exact },
        ] {
            prop_assert_eq!(steps.score(&policy, less), Err(DeadEnd));
        }
    }
}

/// Peak in micro-batches (of two chunks, held from F to W) and idle time in sixths of a
/// micro-batch, with F = B = W.
fn v_block(kind: &str, pp: usize, micro_batches: usize) -> (i64, u64) {
    let shape = Shape { pp, virtual_stages: 2, micro_batches, unit: micro_batches };
    let mut costs = OrderCosts::uniform(2 * pp, 1, 1, 1, 0);
    (costs.mem_b, costs.mem_w) = (vec![0; 2 * pp], vec![-2; 2 * pp]);
    let schedule = match kind {
        "v-half" => v_half(&shape, &costs),
        _ => v_min(&shape, &costs),
    }
    .unwrap();
    complete(&schedule);
    let t = timed(&schedule, &costs);
    (t.peaks.iter().max().unwrap() / 4, t.makespan - 6 * micro_batches as u64)
}

#[test]
fn v_half_and_v_min_keep_their_memory_and_idle_less_than_1f1b() {
    for pp in 1..=32 {
        for m in [3 * pp, 4 * pp + 1] {
            let of_1f1b = 6 * (pp as u64 - 1);
            let (peak, idle) = v_block("v-half", pp, m);
            assert_eq!(peak, (pp as i64 + 2) / 2, "v-half, p = {pp}");
            assert!(10 * idle <= 6 * of_1f1b, "v-half, p = {pp}: {idle} of {of_1f1b}");
            let (peak, idle) = v_block("v-min", pp, m);
            assert_eq!(peak, (pp as i64 + 4) / 3, "v-min, p = {pp}");
            assert!(3 * idle <= 2 * of_1f1b, "v-min, p = {pp}: {idle} of {of_1f1b}");
        }
    }
}

proptest! {
    #![proptest_config(config(100))]

    #[test]
    fn v_blocks_with_uneven_times(
        pp in 1usize..8, m in 1usize..24, c in 0u64..9,
        times in proptest::collection::vec((1u64..30, 1u64..30, 1u64..30), 14),
    ) {
        let mut costs = OrderCosts::uniform(2 * pp, 0, 0, 0, c);
        for (s, (f, b, w)) in times.into_iter().take(2 * pp).enumerate() {
            (costs.f[s], costs.b[s], costs.w[s]) = (f, b, w);
        }
        let shape = Shape { pp, virtual_stages: 2, micro_batches: m, unit: m };
        // Four units of memory a micro-batch.
        for (of, most) in [(v_half as fn(&_, &_) -> _, 2 * (pp + 2)), (v_min, 4 * (pp + 4) / 3)] {
            let schedule: Schedule = of(&shape, &costs).unwrap();
            complete(&schedule);
            let peak = timed(&schedule, &costs).peaks.into_iter().max().unwrap();
            prop_assert!(peak <= most as i64);
            prop_assert!(of(&shape, &costs.clone().with_limit(peak)).is_ok());
            prop_assert!(of(&shape, &costs.clone().with_limit(1)).is_err());
        }
    }
}
