//! Several steps, one after the other: each rank begins the next one when it has done its update.

use super::engine::{self, StepCarry};
use super::{Costs, SimulateError};
use crate::ir::Schedule;
use crate::timeline::{Computed, Timeline};
use crate::verify::{VerifyLimits, verify};

/// Steps after which those that still differ from the one before are taken as they are.
const SETTLED_AFTER: usize = 64;

/// Simulates `steps` steps of `schedule`, or forwards only, as [`simulate`](super::simulate) does
/// one: all updates are right, so that nothing is done again.
///
/// # Errors
/// As [`simulate`](super::simulate).
pub fn simulate_steps(
    schedule: &Schedule,
    costs: &Costs,
    steps: usize,
) -> Result<Timeline, SimulateError> {
    let lenient = VerifyLimits {
        w_in_order: false,
        optimizer_step: false,
        forward_only: schedule.is_forward_only(),
        ..Default::default()
    };
    verify(schedule, &lenient)?;
    costs.check(schedule, steps)?;
    let (mut whole, mut begin) = engine::run(schedule, costs, true, &StepCarry::first(schedule));
    for _ in 1..steps {
        let (step, next) = engine::run(schedule, costs, true, &begin);
        for (rank, more) in whole.ranks.iter_mut().zip(step.ranks) {
            rank.spans.extend(more.spans);
            rank.memory.extend(more.memory);
        }
        begin = next;
    }
    Ok(whole)
}

/// From the first compute of one step to that of the next, in a long run of a schedule that
/// [`simulate`](super::simulate) accepts with these costs, ns. In the first steps of a run ranks
/// find their places among each other; this is after those.
///
/// # Panics
/// Panics if `costs` is of other numbers of stages or ranks than `schedule`.
pub fn step_period_ns(schedule: &Schedule, costs: &Costs) -> u64 {
    let first_of = |timeline: &Timeline| {
        let computed = timeline.ranks.iter().filter_map(|rank| Computed::of(&rank.spans));
        computed.map(|computed| computed.start_ns).min().unwrap_or(0)
    };
    let (timeline, next) = engine::run(schedule, costs, false, &StepCarry::first(schedule));
    let (mut first, (mut begin, mut base)) = (first_of(&timeline), next.rebased());
    let mut period = 0;
    for _ in 0..SETTLED_AFTER {
        let (timeline, next) = engine::run(schedule, costs, false, &begin);
        let start = first_of(&timeline);
        period = base + start - first;
        let (next, next_base) = next.rebased();
        if next == begin && next_base == base {
            break;
        }
        (first, begin, base) = (start, next, next_base);
    }
    period
}
