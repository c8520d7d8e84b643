//! Kind `auto`: its gathers are part of the order, whatever else is asked of lowering.

use super::*;
use crate::generate_with_costs;
use zeropp_schedule::ir::{Compute, Task};
use zeropp_schedule::lower::{LowerOptions, lower};
use zeropp_schedule::schedules::Limits;
use zeropp_schedule::verify::{VerifyLimits, is_program, verify};

fn made(gathered: usize, gathers: Option<usize>) -> Schedule {
    let shape = Shape { pp: 3, virtual_stages: 4, micro_batches: 9, unit: 4 };
    let mut costs = OrderCosts::uniform(12, 20, 19, 11, 1).with_limit(60);
    costs.limits = Limits { gathered: Some(gathered), gathers, evaluations: Some(60) };
    generate_with_costs("auto", &shape, &costs).unwrap()
}

fn gathers(schedule: &Schedule) -> usize {
    let of_rank =
        |rank: &Vec<Action>| rank.iter().filter(|a| matches!(a, Action::AllGather { .. })).count();
    schedule.ranks.iter().map(of_rank).max().unwrap_or(0)
}

#[test]
fn lowering_leaves_the_gathers_of_an_order_where_they_are() {
    for (gathered, most) in [(1, None), (2, Some(10)), (3, Some(8)), (4, Some(4))] {
        let order = made(gathered, most);
        assert!(order.has_gathers() && !is_program(&order));
        assert_eq!(order.units, [9], "the cut of sums is the step, whatever the times");
        let limits = VerifyLimits { gathered_max: Some(gathered), ..VerifyLimits::default() };
        verify(&order, &limits).unwrap();
        for (prefetch, recompute) in [(0, false), (1, false), (3, true)] {
            let options = LowerOptions { prefetch, recompute, ..LowerOptions::default() };
            let program = lower(&order, &options);
            verify(&program, &limits).unwrap();
            assert_eq!(gathers(&program), gathers(&order));
            assert!(gathers(&program) <= most.unwrap_or(usize::MAX));
            assert_eq!(lower(&program, &options), program, "lowering again changes nothing");
            let r = |a: &Action| matches!(a, Action::Compute { kind: Compute::R, .. });
            assert_eq!(program.ranks.iter().flatten().any(r), recompute);
        }
    }
}

#[test]
fn an_order_that_uses_what_it_has_not_gathered_is_refused() {
    let mut order = made(2, None);
    let of = |a: &Action| matches!(a, Action::AllGather { .. });
    let at = order.ranks[1].iter().rposition(of).unwrap();
    order.ranks[1].remove(at);
    let error = verify(&order, &VerifyLimits::default()).unwrap_err().to_string();
    assert!(error.contains("gathered"), "{error}");
}

#[test]
fn without_limits_it_holds_what_zeropp_s_default_unit_holds() {
    let shape = Shape { pp: 4, virtual_stages: 2, micro_batches: 24, unit: 24 };
    let costs = OrderCosts::uniform(8, 3, 3, 2, 0);
    let found = auto(&shape, &costs).unwrap();
    let held = 4 * default_unit(4, 2, 24) as i64;
    for actions in &found.schedule.ranks {
        let (mut now, mut peak) = (0, 0);
        for Task { kind, .. } in actions.iter().flat_map(Action::computes) {
            now += if kind == Compute::F { 2 } else { -1 };
            peak = peak.max(now);
        }
        assert!(peak <= held, "{peak} of {held}");
    }
    assert!(found.bubble() < 0.05, "{found}");
}
