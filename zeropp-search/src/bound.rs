//! Times that no order can beat within the budgets that a schedule took.

use std::collections::HashSet;

use crate::budgeted::{Budgets, Objective, least_span};
use zeropp_schedule::action::{Cost, HeldKind};
use zeropp_schedule::ir::{Action, Schedule};
use zeropp_schedule::metrics::Metrics;
use zeropp_schedule::schedules::{OrderCosts, Rate, Shape};
use zeropp_schedule::simulate::{self, LinkCosts};

/// The least bubble rate of any order that computes what `schedule` does on the same placement,
/// in no more activation memory than `memory`, or without it than the schedule's own peak, and
/// with no more stages gathered at once than the schedule has. It is counted as
/// [`Metrics::bubble_rate`] counts that of `metrics`, a run of the schedule with `costs`.
///
/// None where the bound does not say anything: forwards alone, ranks with unequal numbers of
/// stages, a forward and a backward that overlap in less than the sum of their times. Where
/// something is recomputed, memory counts as unlimited.
pub fn least_bubble_rate(
    schedule: &Schedule,
    metrics: &Metrics,
    costs: &simulate::Costs,
    memory: Option<i64>,
) -> Option<f64> {
    let (pp, stages) = (schedule.pp(), schedule.stages());
    let v = stages / pp.max(1);
    let even = v > 0 && (0..pp).all(|r| schedule.stages_of(r).len() == v);
    let overlaps = |a: &Action| matches!(a, Action::Overlap { .. });
    let faster = costs.overlap_ns.is_some() && schedule.ranks.iter().flatten().any(overlaps);
    if !even || faster || schedule.is_forward_only() || costs.stages.len() != stages {
        return None;
    }
    let own_peak = metrics.peak_activation.iter().max().copied().unwrap_or(0);
    let memory = memory.unwrap_or(i64::try_from(own_peak).unwrap_or(i64::MAX / 8));
    let (costs, budgets) = within(schedule, costs, memory);
    let b = schedule.micro_batches();
    let unit = schedule.units.iter().max().copied().unwrap_or(b);
    let shape = Shape { pp, virtual_stages: v, micro_batches: b, unit };
    let rate = zeropp_schedule::schedules::Kind::find(&schedule.kind).map(|kind| kind.rate);
    let objective = match rate {
        Some(Rate::OwnSpan) => Objective::OwnSpan,
        _ => Objective::Makespan,
    };
    let (span, work) = least_span(&shape, &costs, &budgets, &schedule.placement, objective);
    let span = match rate {
        Some(rate) => rate.cost(span, span, pp, stages, costs.send).max(work),
        None => span,
    };
    (span > 0).then(|| (span - work) as f64 / span as f64)
}

/// The costs with what the schedule does not do left out, and the budgets that it keeps.
fn within(schedule: &Schedule, given: &simulate::Costs, memory: i64) -> (OrderCosts, Budgets) {
    let actions = || schedule.ranks.iter().flatten();
    let stages_with = |cost: Cost| -> HashSet<usize> {
        actions().filter(|a| a.row().cost == cost).filter_map(Action::stage).collect()
    };
    let (gathered, reduced) = (stages_with(Cost::Gather), stages_with(Cost::Reduce));
    let mut costs = OrderCosts::from(given);
    for s in 0..schedule.stages() {
        costs.gather[s] *= u64::from(gathered.contains(&s));
        costs.reduce[s] *= u64::from(reduced.contains(&s));
    }
    // A message of the largest size may be on one link alone; the smallest is on all of them.
    let LinkCosts { latency_ns, .. } = given.link;
    let least = given.memory.iter().map(|m| given.link.transfer_ns(m.message)).min().unwrap_or(0);
    costs.send = latency_ns.saturating_add(u64::try_from(least).unwrap_or(u64::MAX / 8));
    let recomputes = stages_with(Cost::R);
    costs.mem_limit = recomputes.is_empty().then_some(memory);
    let recompute = (0..schedule.stages()).map(|s| match recomputes.contains(&s) {
        true => (given.stages[s].r_ns, 0),
        false => (0, 0),
    });
    let budgets = Budgets {
        gathered: schedule.has_gathers().then(|| held(schedule, &gathered)),
        recompute: if recomputes.is_empty() { Vec::new() } else { recompute.collect() },
        ..Budgets::default()
    };
    (costs, budgets)
}

/// The most stages of a rank that have their weights at once; those that are never gathered always
/// have them.
fn held(schedule: &Schedule, gathered: &HashSet<usize>) -> u64 {
    let most = |(r, actions): (usize, &Vec<Action>)| {
        let mut now: HashSet<usize> =
            schedule.stages_of(r).into_iter().filter(|s| !gathered.contains(s)).collect();
        let mut most = now.len();
        for action in actions {
            let row = action.row();
            if row.takes.contains(&HeldKind::Gathered) {
                now.extend(action.stage());
            } else if row.gives.contains(&HeldKind::Gathered) {
                action.stage().iter().for_each(|stage| _ = now.remove(stage));
            }
            most = most.max(now.len());
        }
        most as u64
    };
    schedule.ranks.iter().enumerate().map(most).max().unwrap_or(0).max(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::generate;
    use zeropp_schedule::lower::{LowerOptions, lower};
    use zeropp_schedule::memory::StageBytes;
    use zeropp_schedule::schedules::KINDS;
    use zeropp_schedule::simulate::simulate;

    /// The rate that `schedule` has, and the least one.
    fn rates(schedule: &Schedule, costs: &simulate::Costs) -> (f64, Option<f64>) {
        let timeline = simulate(schedule, costs).unwrap();
        let metrics = Metrics::new(schedule, &timeline, costs);
        (metrics.bubble_rate, least_bubble_rate(schedule, &metrics, costs, None))
    }

    #[test]
    fn one_forward_one_backward_could_be_zb_h1_and_zb_v_is_the_best_there_is() {
        // B frees half of what F keeps.
        let halves = StageBytes { activation: 2, stash: 1, ..StageBytes::default() };
        let shape = Shape { pp: 4, virtual_stages: 1, micro_batches: 8, unit: 8 };
        let mut costs = simulate::Costs::uniform(4, 10, 10, 10, 0);
        costs.memory.fill(halves);
        let (found, least) = rates(&generate("1f1b", &shape).unwrap(), &costs);
        // (P − 1)(F + B + W), of which ZB-H1 leaves (P − 1)(F + B − W).
        assert_eq!(found, 90.0 / 330.0);
        assert_eq!(least, Some(30.0 / 270.0));
        let shape = Shape { pp: 8, virtual_stages: 2, micro_batches: 24, unit: 24 };
        let mut costs = simulate::Costs::uniform(16, 1850, 1800, 930, 60);
        costs.memory.fill(halves);
        let (found, least) = rates(&generate("zb-v", &shape).unwrap(), &costs);
        // Its order by hand has 6.34 %, the best one what the bound says.
        assert!(found < 0.0634 && least.is_some_and(|least| (0.0603..0.0604).contains(&least)));
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            cases: 24,
            ..Default::default()
        })]

        #[test]
        fn no_kind_is_below_it(
            (pp, v, b) in (1usize..6, 1usize..5, 1usize..14),
            times in proptest::collection::vec((1u64..30, 1u64..30, 1u64..30, 0u64..40), 20),
            (send, lowered) in (0u64..5, any::<bool>()),
        ) {
            let shape = Shape { pp, virtual_stages: v, micro_batches: b, unit: b.div_ceil(2) };
            let mut costs = simulate::Costs::uniform(pp * v, 1, 1, 1, send);
            for (stage, (f, b, w, gather)) in costs.stages.iter_mut().zip(times) {
                (stage.f_ns, stage.b_ns, stage.w_ns) = (f, b, w);
                (stage.all_gather_ns, stage.reduce_scatter_ns) = (gather, gather / 2);
            }
            for kind in KINDS {
                let Ok(mut schedule) = generate(kind.name, &shape) else { continue };
                if lowered {
                    schedule = lower(&schedule, &LowerOptions::default());
                }
                let (found, least) = rates(&schedule, &costs);
                prop_assert!(least.is_none_or(|least| least <= found + 1e-12), "{}", kind.name);
            }
        }
    }
}
