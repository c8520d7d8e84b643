//! The judge of zero-bubble heuristics: how close to the best is a schedule of one stage a rank?
//!
//! It minimises the largest own span, first F to last W of a rank, within a memory limit (Zero
//! Bubble, appendix G), over all orders that ranks can run, each action as soon as it can. Branch
//! and bound proves the optimum for p ≤ 4, m ≤ 8 in a moment; it starts from the heuristic's
//! schedule, so its answer is never worse. The bound beside it holds even for ranks that would
//! delay their first F on purpose to shorten their own span, which the paper's integer program
//! allows and no order can express. That program is here, too, behind the feature `judge`, which
//! brings a solver: it settles up to about p·m = 16 (p = 4, m = 6 not within a minute) and is the
//! search's witness in the tests.
//!
//! F, B and W of a stage run in micro-batch order throughout. Micro-batches being equal, no other
//! order does better, and the sums of gradients need this one.

mod bounds;
#[cfg(feature = "judge")]
mod integer_program;
mod search;

#[cfg(feature = "judge")]
pub use integer_program::{IntegerOptimum, integer_program};

use zeropp_schedule::ir::Schedule;
use zeropp_schedule::schedules::{OrderCosts, ScheduleError, Shape, zb};

/// A problem for the judge: one stage a rank.
#[derive(Clone, Copy, Debug)]
struct Instance<'a> {
    micro_batches: usize,
    costs: &'a OrderCosts,
}

/// The judge's answer.
#[derive(Clone, Debug)]
pub struct Optimum {
    /// The best schedule found, kind `judge`.
    pub schedule: Schedule,
    /// Its largest own span, in the costs' unit of time.
    pub own_span: u64,
    /// The heuristic's largest own span.
    pub heuristic: u64,
    /// A time that no schedule can beat, not even one with deliberate waits.
    pub bound: u64,
    /// Whether no order has a smaller largest own span. If false, time ran out, and the answer is
    /// at most `own_span − bound` from the best.
    pub optimal: bool,
    /// Nodes that the search visited.
    pub nodes: u64,
}

impl Instance<'_> {
    fn stages(&self) -> usize {
        self.costs.f.len()
    }

    fn limit(&self) -> i64 {
        self.costs.mem_limit.unwrap_or(i64::MAX / 4)
    }

    /// Memory of rank `r` after `f` F, `b` B and `w` W.
    fn memory(&self, r: usize, f: usize, b: usize, w: usize) -> i64 {
        let costs = self.costs;
        f as i64 * costs.mem_f[r] + b as i64 * costs.mem_b[r] + w as i64 * costs.mem_w[r]
    }

    /// The most micro-batches that rank `r` may hold whole.
    fn in_flight_max(&self, r: usize) -> usize {
        let most = match self.costs.mem_f[r] {
            0 => i64::MAX,
            mem_f => self.limit() / mem_f,
        };
        usize::try_from(most).unwrap_or(0).min(self.micro_batches)
    }
}

/// Judges the automatic heuristic [`zb`] on `shape` and `costs`, searching until `expired` says so.
///
/// # Errors
/// Problems that [`zb`] refuses; a B or W that takes memory instead of freeing it.
pub fn judge(
    shape: &Shape,
    costs: &OrderCosts,
    expired: &dyn Fn() -> bool,
) -> Result<Optimum, ScheduleError> {
    let schedule = zb("judge", shape, costs)?;
    let grows = |s: &usize| costs.mem_b[*s] > 0 || costs.mem_w[*s] > 0;
    if let Some(value) = (0..shape.pp).find(grows) {
        let works = "the judge wants B and W that free memory: mem_b ≤ 0 and mem_w ≤ 0".into();
        let (kind, field) = ("judge", "mem_b of stage");
        return Err(ScheduleError::Field { kind, field, value, works });
    }
    let instance = Instance { micro_batches: shape.micro_batches, costs };
    let heuristic = own_span(&schedule, costs);
    let bound = bounds::own_span(&instance);
    let found = search::run(&instance, shape.pp, heuristic, bound, expired);
    let (own_span, ranks) = found.better.unwrap_or((heuristic, schedule.ranks));
    let (bound, more) = tighten(shape, costs, own_span, bound, expired);
    Ok(Optimum {
        schedule: Schedule { ranks, ..schedule },
        own_span,
        heuristic,
        bound,
        optimal: found.complete || own_span <= bound,
        nodes: found.nodes + more,
    })
}

/// Lifts `bound` as far as single ranks show, and counts the nodes visited. A rank's own span is
/// least when only the ranks behind it are there, its own is the only one that counts, and those
/// behind start as soon as they can: for that, orders without deliberate waits suffice.
fn tighten(
    shape: &Shape,
    costs: &OrderCosts,
    span: u64,
    mut bound: u64,
    expired: &dyn Fn() -> bool,
) -> (u64, u64) {
    let mut nodes = 0;
    for first in 0..shape.pp {
        if span <= bound {
            break;
        }
        let costs = costs.behind(first);
        let instance = Instance { micro_batches: shape.micro_batches, costs: &costs };
        let found = search::run(&instance, 1, span, bound, expired);
        nodes += found.nodes;
        if found.complete {
            bound = bound.max(found.better.map_or(span, |(least, _)| least));
        }
    }
    (bound, nodes)
}

/// The largest time between a rank's first F and last W.
fn own_span(schedule: &Schedule, costs: &OrderCosts) -> u64 {
    zeropp_schedule::schedules::own_span(schedule, costs).expect("generated schedules run")
}

#[cfg(test)]
mod tests;
