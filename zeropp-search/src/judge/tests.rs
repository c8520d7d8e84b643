//! The judge against all orders there are, and against the heuristic.

use super::*;
use proptest::prelude::*;
use std::time::{Duration, Instant};
use zeropp_schedule::ir::{Action, Compute, looping};

fn shape(pp: usize, micro_batches: usize) -> Shape {
    Shape { pp, virtual_stages: 1, micro_batches, unit: micro_batches }
}

/// A clock that runs out after `time`.
fn within(time: Duration) -> impl Fn() -> bool {
    let deadline = Instant::now() + time;
    move || Instant::now() >= deadline
}

fn verdict(pp: usize, m: usize, costs: &OrderCosts) -> Optimum {
    judge(&shape(pp, m), costs, &within(Duration::from_secs(60))).unwrap()
}

/// Every order of one rank in which F, B and W come in micro-batch order and memory suffices.
fn all_orders(rank: usize, m: usize, costs: &OrderCosts) -> Vec<Vec<Action>> {
    let instance = Instance { micro_batches: m, costs };
    let mut done = Vec::new();
    let mut open = vec![(Vec::new(), 0, 0, 0)];
    while let Some((order, f, b, w)) = open.pop() {
        if w == m {
            done.push(order);
            continue;
        }
        let mut push = |kind, i, (f, b, w)| {
            let mut order: Vec<Action> = order.clone();
            order.push(Action::compute(kind, rank, i));
            open.push((order, f, b, w));
        };
        if f < m && instance.memory(rank, f + 1, b, w) <= instance.limit() {
            push(Compute::F, f, (f + 1, b, w));
        }
        if b < f {
            push(Compute::B, b, (f, b + 1, w));
        }
        if w < b {
            push(Compute::W, w, (f, b, w + 1));
        }
    }
    done
}

/// The smallest largest own span of all combinations of orders.
fn brute_force(pp: usize, m: usize, costs: &OrderCosts) -> u64 {
    let orders: Vec<_> = (0..pp).map(|r| all_orders(r, m, costs)).collect();
    let combinations: usize = orders.iter().map(Vec::len).product();
    let of = |mut n: usize| {
        let pick = |of: &Vec<Vec<Action>>| {
            let order = of[n % of.len()].clone();
            n /= of.len();
            order
        };
        let ranks = orders.iter().map(pick).collect();
        let (kind, placement) = ("all".into(), looping(pp, 1));
        Schedule { kind, placement, units: vec![m], ranks, ..Schedule::default() }
    };
    let spans =
        (0..combinations).filter_map(|n| zeropp_schedule::schedules::own_span(&of(n), costs));
    spans.min().unwrap()
}

/// Costs of up to four uneven stages, a limit of `half_room` halves of a micro-batch per rank.
fn costs() -> impl Strategy<Value = (Vec<(u64, u64, u64)>, u64, i64)> {
    (proptest::collection::vec((1u64..16, 1u64..16, 1u64..16), 4), 0u64..4, 2i64..9)
}

fn uneven(pp: usize, (times, send, half_room): (Vec<(u64, u64, u64)>, u64, i64)) -> OrderCosts {
    let mut costs = OrderCosts::uniform(pp, 0, 0, 0, send).with_limit(half_room);
    for (s, (f, b, w)) in times.into_iter().take(pp).enumerate() {
        (costs.f[s], costs.b[s], costs.w[s]) = (f, b, w);
    }
    costs
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 60,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn agrees_with_brute_force(given in costs(), at in 0usize..4) {
        let (pp, m) = [(2, 2), (2, 3), (3, 2), (4, 2)][at];
        let costs = uneven(pp, given);
        let found = verdict(pp, m, &costs);
        prop_assert!(found.optimal);
        prop_assert_eq!(found.own_span, brute_force(pp, m, &costs));
        prop_assert!(found.bound <= found.own_span);
    }

    #[test]
    fn proves_small_cases_and_is_never_worse(given in costs(), pp in 1usize..5, m in 1usize..9) {
        let costs = uneven(pp, given);
        let found = verdict(pp, m, &costs);
        prop_assert!(found.optimal);
        prop_assert!(found.bound <= found.own_span && found.own_span <= found.heuristic);
        prop_assert_eq!(own_span(&found.schedule, &costs), found.own_span);
    }
}

#[test]
fn agrees_with_brute_force_on_three_ranks_and_micro_batches() {
    let given = (vec![(5, 7, 3), (6, 4, 5), (4, 9, 2)], 1, 4);
    let costs = uneven(3, given);
    assert_eq!(verdict(3, 3, &costs).own_span, brute_force(3, 3, &costs));
}

/// A last rank so fast that what is left of its work seems done before its first F can start.
#[test]
fn a_rank_that_has_not_started_ends_no_earlier_than_it_could_start() {
    let costs = uneven(4, (vec![(6, 1, 1), (7, 1, 11), (5, 1, 1), (1, 1, 1)], 2, 4));
    let found = verdict(4, 2, &costs);
    assert!(found.optimal);
    assert_eq!(found.own_span, brute_force(4, 2, &costs));
}

#[test]
fn worked_numbers_are_optimal() {
    let span = |p, f, b, w, m, limit| {
        let found = verdict(p, m, &OrderCosts::uniform(p, f, b, w, 0).with_limit(limit));
        assert!(found.optimal);
        assert_eq!(found.bound, found.own_span);
        (found.heuristic, found.own_span)
    };
    assert_eq!(span(4, 5, 6, 4, 12, 10), (193, 193));
    assert_eq!(span(4, 5, 6, 4, 12, 14), (183, 183));
    assert_eq!(span(4, 1, 1, 1, 8, 8), (27, 27));
    assert_eq!(span(4, 1, 1, 1, 8, 16), (24, 24));
    assert_eq!(span(8, 1, 1, 1, 16, 16), (55, 55));
    assert_eq!(span(8, 1, 1, 1, 16, 32), (48, 48));
}

#[test]
fn without_time_the_heuristic_stands_and_is_bounded() {
    let costs = OrderCosts::uniform(4, 11, 7, 9, 2).with_limit(8);
    let found = judge(&shape(4, 8), &costs, &|| true).unwrap();
    assert!(found.own_span <= found.heuristic && found.bound <= found.own_span);
}

#[cfg(feature = "judge")]
#[test]
fn the_integer_program_lies_between_bound_and_search() {
    let times = [
        (vec![(5, 7, 3), (6, 4, 5), (4, 9, 2), (1, 1, 1)], 1, 4),
        (vec![(1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1)], 0, 8),
        (vec![(7, 4, 11), (9, 3, 8), (2, 2, 2), (5, 5, 5)], 2, 5),
    ];
    for given in times {
        for (pp, m) in [(2, 2), (2, 3), (3, 2)] {
            let costs = uneven(pp, given.clone());
            let found = verdict(pp, m, &costs);
            let program = integer_program(&shape(pp, m), &costs, Duration::from_secs(20));
            let answer = program.unwrap().expect("a solution in time");
            assert!(answer.optimal);
            assert!(answer.own_span <= found.own_span as f64 + 1e-6, "{pp} {m}: {answer:?}");
            assert!(answer.own_span >= found.bound as f64 - 1e-6, "{pp} {m}: {answer:?}");
        }
    }
}
