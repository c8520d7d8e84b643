//! ZeroPP with costs: the unit of ZeroPP with its free choices made for given times.
//!
//! The paper's fixed order fits T_F = T_B = T_W; with real times it leaves gaps (with the 14.6B
//! model's, 4.7 % at U = 2P − 1). Here the depth of each rank's warm-up, the places of W and, if
//! asked, U are chosen by trying them against the clock. Blocks stay blocks: 2V − 1 gathers and V
//! reductions a rank and unit, activations of at most one unit. The result is never slower than the
//! fixed order, neither in makespan nor in the largest own span.

use super::costs::{Objective, OrderCosts};
use super::timing::{Timing, time};
use super::zeropp_place::{Cutoff, Home, Policy, Score, StepPlacer, limits};
use super::{ScheduleError, Shape, zeropp};
use crate::ir::{Action, Compute, Schedule, Task, looping};

const KIND: &str = "zeropp-auto";

/// Actions that one search may time, so that large shapes stay fast. Those of a step given up
/// half-way or known already count as well: what is found does not hang on how fast it is found.
const EFFORT_MAX: usize = 6_000_000;

/// ZeroPP for `shape` with the warm-up and the places of W chosen for `costs`, gathers (one block
/// ahead) and reductions included. The activation memory of a rank stays within that of U
/// micro-batches and within the costs' limit.
///
/// # Errors
/// Costs that are not one a stage; a memory limit under which a unit of U cannot run.
pub fn zeropp_auto(shape: &Shape, costs: &OrderCosts) -> Result<Schedule, ScheduleError> {
    costs.check(KIND, shape.stages())?;
    let found = search(shape, costs, EFFORT_MAX);
    found.map(|(ranks, _)| schedule(shape, ranks)).ok_or_else(|| no_memory(shape, costs))
}

/// Like [`zeropp_auto`], with U chosen as well: of all units within the memory limit, the one with
/// the shortest step, the smaller of two that are equal. `shape.unit` is not looked at. Returns U
/// and the schedule.
///
/// # Errors
/// Costs that are not one a stage; a memory limit under which not even one micro-batch can run.
pub(super) fn zeropp_auto_unit(
    shape: &Shape,
    costs: &OrderCosts,
) -> Result<(usize, Schedule), ScheduleError> {
    shape.check(KIND)?;
    costs.check(KIND, shape.stages())?;
    let mut best: Option<(u64, Shape, Vec<Vec<Action>>)> = None;
    let units = units(shape);
    let effort = EFFORT_MAX / units.len();
    for unit in units {
        let shape = Shape { unit, ..*shape };
        let Some((ranks, makespan)) = search(&shape, costs, effort) else { continue };
        if best.as_ref().is_none_or(|(least, ..)| makespan < *least) {
            best = Some((makespan, shape, ranks));
        }
    }
    best.map(|(_, shape, ranks)| (shape.unit, schedule(&shape, ranks)))
        .ok_or_else(|| no_memory(&Shape { unit: 1, ..*shape }, costs))
}

/// The units worth trying: for each number of units a step may have, the smallest U that makes it.
fn units(shape: &Shape) -> Vec<usize> {
    let m = shape.micro_batches;
    let mut units: Vec<usize> = (1..=m).map(|n| m.div_ceil(n)).collect();
    units.sort_unstable();
    units.dedup();
    units
}

fn schedule(shape: &Shape, ranks: Vec<Vec<Action>>) -> Schedule {
    let placement = looping(shape.pp, shape.virtual_stages);
    let units = shape.units();
    Schedule { kind: KIND.into(), placement, units, ranks, ..Schedule::default() }
}

fn no_memory(shape: &Shape, costs: &OrderCosts) -> ScheduleError {
    let last = (shape.virtual_stages - 1) * shape.pp;
    let least = |rank: usize| {
        let blocks = (0..shape.virtual_stages - 1).map(|v| costs.mem_f[v * shape.pp + rank]);
        shape.unit as i64 * blocks.sum::<i64>() + costs.mem_f[last + rank]
    };
    let least = (0..shape.pp).map(least).max().unwrap_or(0);
    ScheduleError::Field {
        kind: KIND,
        field: "mem_limit",
        value: costs.mem_limit.unwrap_or(0).max(0) as usize,
        works: format!("a unit of {} needs at least {least}; or take a smaller unit", shape.unit),
    }
}

pub(super) fn score(timing: &Timing) -> Score {
    let all_spans = timing.ends.iter().zip(&timing.starts).map(|(end, start)| end - start).sum();
    Score { own_span: timing.own_span(), makespan: timing.makespan, all_spans }
}

/// A step timed with its collectives, if it keeps the limits.
fn timed(shape: &Shape, costs: &OrderCosts, ranks: &[Vec<Action>]) -> Option<Timing> {
    let lowered: Vec<Vec<Action>> = ranks.iter().map(|r| with_collectives(shape, r)).collect();
    let placement = looping(shape.pp, shape.virtual_stages);
    let timing = time(&lowered, &placement, shape.micro_batches, costs).ok()?;
    let kept = timing.peaks.iter().zip(limits(shape, costs)).all(|(peak, limit)| *peak <= limit);
    kept.then_some(timing)
}

/// The best order found and its makespan.
fn search(shape: &Shape, costs: &OrderCosts, effort: usize) -> Option<(Vec<Vec<Action>>, u64)> {
    let fixed = zeropp::generate(shape).ok()?.ranks;
    let best = timed(shape, costs, &fixed).map(|timing| (score(&timing), None));
    let bound = best.as_ref().map_or(Cutoff::NONE, |(score, _)| Cutoff {
        own_span: score.own_span,
        makespan: score.makespan,
    });
    let steps = StepPlacer::new(shape, costs);
    let mut search = OrderSearch { shape, costs, steps, bound, best, tried: Vec::new(), effort };
    search.try_all();
    search.improve();
    let (score, policy) = search.best?;
    let ranks = match policy {
        Some(policy) => search.steps.write(&policy).ok()?,
        None => fixed,
    };
    Some((ranks, score.makespan))
}

/// Values of [`Policy::quarters`] and [`Policy::paced`] worth trying.
const USES_OF_GAPS: [(u64, bool); 7] =
    [(4, false), (3, false), (2, false), (1, false), (0, false), (4, true), (0, true)];

struct OrderSearch<'a> {
    shape: &'a Shape,
    costs: &'a OrderCosts,
    steps: StepPlacer<'a>,
    /// Of the fixed order, which nothing may exceed.
    bound: Cutoff,
    /// The best score and the policy that made it (none: the fixed order).
    best: Option<(Score, Option<Policy>)>,
    /// What need not be tried again, in order: the best only gets better.
    tried: Vec<Policy>,
    /// Actions that may still be timed.
    effort: usize,
}

impl OrderSearch<'_> {
    /// Tries one policy and keeps it if it is better.
    fn attempt(&mut self, mut policy: Policy) -> bool {
        let actions = 3 * self.shape.stages() * self.shape.micro_batches;
        self.effort = self.effort.saturating_sub(actions);
        if self.shape.virtual_stages == 1 {
            // No stage but the last, so none that `home` is about.
            policy.home = Home::WithB;
        }
        match self.tried.binary_search(&policy) {
            Ok(_) => return false,
            Err(at) => self.tried.insert(at, policy.clone()),
        }
        let best = self.best.as_ref().map(|(score, _)| *score);
        let objective = self.costs.objective;
        let cutoff = match (best, objective) {
            (None, _) => self.bound,
            (Some(Score { own_span, .. }), Objective::OwnSpan) => Cutoff { own_span, ..self.bound },
            (Some(Score { makespan, .. }), Objective::Makespan) => {
                Cutoff { makespan, ..self.bound }
            }
        };
        let Ok(score) = self.steps.score(&policy, cutoff) else { return false };
        let better = best.is_none_or(|best| score.rank(objective) < best.rank(objective));
        if better {
            self.best = Some((score, Some(policy)));
        }
        better
    }

    /// Every combination of the places of W with a few shapes of warm-up.
    fn try_all(&mut self) {
        for home in [Home::WithB, Home::InBlock, Home::InUnit] {
            for (quarters, paced) in USES_OF_GAPS {
                for warm_up in self.warm_ups() {
                    if self.effort == 0 && self.best.is_some() {
                        return;
                    }
                    self.attempt(Policy { warm_up, quarters, paced, home });
                }
            }
        }
    }

    /// The fixed order's warm-up with up to three more forwards, and the ones that the times ask
    /// for: as many as end before the first gradient arrives, and one more.
    fn warm_ups(&self) -> Vec<Vec<usize>> {
        let unit = self.shape.unit.min(self.shape.micro_batches);
        let pp = self.shape.pp;
        let fixed = |more: usize| (0..pp).map(|r| (2 * (pp - r) - 1 + more).min(unit)).collect();
        let by_time = |more: usize| -> Vec<usize> {
            let mut deep: Vec<usize> =
                (0..pp).map(|r| (self.forwards_until_first_b(r) + more).clamp(1, unit)).collect();
            // A rank must not warm up deeper than the one before it, from which its input comes.
            for r in (1..pp).rev() {
                deep[r - 1] = deep[r - 1].max(deep[r]);
            }
            deep
        };
        let mut all: Vec<Vec<usize>> = (0..4).map(fixed).collect();
        all.extend([by_time(0), by_time(1)]);
        all.dedup();
        all
    }

    /// Forwards of rank `r`'s last stage that end before its first gradient can come back.
    fn forwards_until_first_b(&self, r: usize) -> usize {
        let (pp, costs) = (self.shape.pp, self.costs);
        let last = (self.shape.virtual_stages - 1) * pp;
        let there: u64 =
            (last + r + 1..last + pp).map(|s| costs.f[s] + costs.b[s] + 2 * costs.send).sum();
        ((there + costs.f[last + r]) / costs.f[last + r].max(1)) as usize
    }

    /// Moves one rank's warm-up by one, with any use of short gaps, as long as that helps and
    /// effort is left.
    fn improve(&mut self) {
        let mut better = true;
        while better {
            better = false;
            let Some((_, Some(policy))) = &self.best else { return };
            for neighbour in self.neighbours(&policy.clone()) {
                if self.effort == 0 {
                    return;
                }
                better |= self.attempt(neighbour);
            }
        }
    }

    fn neighbours(&self, policy: &Policy) -> Vec<Policy> {
        let unit = self.shape.unit.min(self.shape.micro_batches);
        let mut all = Vec::new();
        for rank in 0..self.shape.pp {
            let depth = policy.warm_up[rank];
            for to in [depth + 1, depth.saturating_sub(1)] {
                if !(1..=unit).contains(&to) {
                    continue;
                }
                let mut warm_up = policy.warm_up.clone();
                warm_up[rank] = to;
                let with = |(quarters, paced)| Policy {
                    warm_up: warm_up.clone(),
                    quarters,
                    paced,
                    home: policy.home,
                };
                all.extend(USES_OF_GAPS.map(with));
            }
        }
        all
    }
}

/// The rank's actions with a gather of every block, one block ahead, and a reduction after the last
/// W of every stage and unit.
fn with_collectives(shape: &Shape, actions: &[Action]) -> Vec<Action> {
    // Stage and unit of every F and B; where they change, a block begins.
    let unit_of = |i: usize| i / shape.unit;
    let mut blocks: Vec<(usize, usize)> = Vec::new();
    let mut open = None;
    for (at, Task { kind, stage, micro_batch: i }) in actions.iter().map(compute_of).enumerate() {
        if kind != Compute::W && open != Some((stage, unit_of(i))) {
            open = Some((stage, unit_of(i)));
            blocks.push((at, stage));
        }
    }
    let mut lowered = Vec::with_capacity(actions.len() + 3 * blocks.len());
    lowered.extend(blocks.first().map(|(_, stage)| Action::AllGather { stage: *stage }));
    let mut next = 0;
    for (at, action) in actions.iter().enumerate() {
        if blocks.get(next).is_some_and(|block| block.0 == at) {
            next += 1;
            lowered.extend(blocks.get(next).map(|b| Action::AllGather { stage: b.1 }));
        }
        lowered.push(*action);
        let Task { kind, stage, micro_batch: i } = compute_of(action);
        let last = (i + 1).is_multiple_of(shape.unit) || i + 1 == shape.micro_batches;
        if kind == Compute::W && last {
            lowered.push(Action::ReduceScatter { stage });
        }
    }
    lowered
}

/// What the search itself measures a schedule by.
#[cfg(test)]
pub(super) fn lowered_timing(shape: &Shape, costs: &OrderCosts, schedule: &Schedule) -> Timing {
    timed(shape, costs, &schedule.ranks).expect("a ZeroPP order within the unit's memory")
}

fn compute_of(action: &Action) -> Task {
    action.computes().next().expect("ZeroPP orders are of compute actions")
}
