//! The other kinds under the same budgets: what the search starts from and must never lose to.

use super::Objective;
use super::problem::Problem;
use super::residency::ResidencyCounter;
use super::sequence::{RankOrders, RankSequence};
use super::write::with_weights;
use zeropp_schedule::ir::{Action, Compute, Schedule, Task, looping};
use zeropp_schedule::lower::{self, LowerOptions, lower};
use zeropp_schedule::schedules::{KINDS, Kind, Shape, StepForm, generate_with_costs, time};
use zeropp_schedule::simulate::{self, simulate};

/// A finished order within the budgets.
#[derive(Clone, Debug)]
pub(super) struct FinishedOrder {
    /// With gathers and reductions.
    pub(super) schedule: Schedule,
    /// Its entries, with a W where it has one.
    pub(super) plan: RankOrders,
    /// The objective.
    pub(super) value: i64,
    /// By how many gathers it breaks its limit: then it is only something to start from.
    pub(super) excess: usize,
    pub(super) name: String,
}

/// Every kind that can be made for the shape on this placement and keeps the memory; those first
/// that keep all budgets, then by span.
pub(super) fn fitting(p: &Problem, shape: &Shape) -> Vec<FinishedOrder> {
    let mut found: Vec<FinishedOrder> = Vec::new();
    for kind in KINDS.iter().filter(|kind| kind.name != super::write::KIND) {
        for unit in units(p, shape, kind) {
            let shape = Shape { unit, ..*shape };
            let limited = generate_with_costs(kind.name, &shape, &p.costs);
            let Ok(schedule) = limited else { continue };
            let name = match unit == shape.micro_batches {
                true => kind.name.into(),
                false => format!("{} in units of {unit}", kind.name),
            };
            found.extend(fit(p, &schedule, name));
        }
    }
    found.sort_by_key(|other| (other.excess > 0, other.value));
    found
}

/// Entries of a step that is large.
const LARGE: usize = 1 << 15;

/// The units worth trying: for each number of units the smallest U that makes it and that memory
/// has room for; all but B only for the kinds that have units.
fn units(p: &Problem, shape: &Shape, kind: &Kind) -> Vec<usize> {
    let b = shape.micro_batches;
    if kind.step != StepForm::Units {
        return vec![b];
    }
    if p.placement != looping(p.ranks, p.v) {
        return Vec::new();
    }
    if p.units.len() > 1 {
        return vec![shape.unit];
    }
    let mut units: Vec<usize> = (1..=b).map(|n| b.div_ceil(n)).collect();
    units.dedup();
    units.retain(|unit| held(p, *unit) <= p.memory);
    // A search of its own for each: the largest units, which wait least often.
    if kind.obeys_limit {
        units.truncate(if p.entries() > LARGE { 2 } else { 6 });
    }
    units
}

/// Memory of a rank at least when a unit's first backward starts: the forwards of all stages but
/// its last, and one of that.
fn held(p: &Problem, unit: usize) -> i64 {
    let of_rank = |r: usize| {
        let f = &p.need[r * p.classes..][..p.v];
        unit as i64 * f[..p.v - 1].iter().sum::<i64>() + f[p.v - 1]
    };
    (0..p.ranks).map(of_rank).max().unwrap_or(0)
}

/// A schedule's order with gathers and reductions, if it keeps the budgets.
fn fit(p: &Problem, schedule: &Schedule, name: String) -> Option<FinishedOrder> {
    if schedule.placement != p.placement {
        return None;
    }
    let mut residency = ResidencyCounter::default();
    let mut made = p.empty_schedule(super::write::KIND);
    let (mut sequences, mut excess) = (Vec::new(), 0);
    for (r, actions) in schedule.ranks.iter().enumerate() {
        let (sequence, order) = entries(p, r, actions)?;
        if peak(p, r, &sequence) > p.memory {
            return None;
        }
        excess += residency.excess(p, r, &sequence);
        made.ranks[r] = with_weights(p, r, &sequence, &order, &mut residency);
        sequences.push(sequence);
    }
    let value = simulated(p, &made)?;
    let plan = RankOrders { sequences, stride: p.ranks };
    Some(FinishedOrder { schedule: made, plan, value, excess, name })
}

/// A rank's actions, W as entries of their own: the sequence and each action with its entry.
#[allow(clippy::type_complexity)]
fn entries(
    p: &Problem,
    r: usize,
    actions: &[Action],
) -> Option<(RankSequence, Vec<(Option<usize>, Action)>)> {
    let stages = &p.stage[r * p.v..(r + 1) * p.v];
    let mut sequence = RankSequence { threshold: i64::MAX / 4, ..RankSequence::default() };
    let mut order = Vec::new();
    // An overlapped pair is its two halves, one after the other.
    for Task { kind, stage, micro_batch } in actions.iter().flat_map(Action::computes) {
        let action = Action::compute(kind, stage, micro_batch);
        let v = stages.iter().position(|s| *s == stage)?;
        let at = sequence.entries.len();
        match kind {
            Compute::F => sequence.entries.push(v as u8),
            Compute::B | Compute::BW => sequence.entries.push((p.v + v) as u8),
            Compute::W | Compute::R => {}
        }
        match kind {
            Compute::F | Compute::B => order.push((Some(at), action)),
            Compute::BW => {
                // Split, so that it is judged as all others are: its B's result leaves earlier.
                order.push((Some(at), Action::compute(Compute::B, stage, micro_batch)));
                order.push((None, Action::compute(Compute::W, stage, micro_batch)));
                sequence.entries.push(p.classes as u8);
            }
            Compute::W => {
                order.push((None, action));
                sequence.entries.push(p.classes as u8);
            }
            Compute::R => {}
        }
    }
    let numbered = sequence.number(p.v);
    let complete = order.len() == 3 * p.v * p.b;
    (numbered && complete).then_some((sequence, order))
}

/// The most memory of a sequence whose W stand in it.
fn peak(p: &Problem, r: usize, sequence: &RankSequence) -> i64 {
    let (mut now, mut peak) = (0, 0);
    let b = |l: &&u8| (p.v..p.classes).contains(&usize::from(**l));
    let mut waiting = sequence.entries.iter().filter(b);
    for &entry in &sequence.entries {
        let class = usize::from(entry);
        if class == p.classes {
            let class = waiting.next().map_or(0, |l| usize::from(*l) - p.v);
            now -= p.freed[r * p.v + class];
        } else {
            peak = peak.max(now + p.need[r * p.classes + class]);
            now += p.delta[r * p.classes + class];
        }
        peak = peak.max(now);
    }
    peak
}

/// The objective, as the simulator has it. Where collectives and recomputation take no time,
/// the generators' clock has the same and takes a tenth of the time.
pub(super) fn simulated(p: &Problem, schedule: &Schedule) -> Option<i64> {
    let plain = !p.timed && !p.recomputes.contains(&true);
    let (own, last, lane) = if plain {
        let timing = time(&schedule.ranks, &p.placement, p.b, &p.costs).ok()?;
        (timing.own_span() as i64, timing.makespan as i64, 0)
    } else {
        spans(p, schedule)?
    };
    Some(match p.objective {
        Objective::OwnSpan => own,
        Objective::Makespan => last.max(lane),
    })
}

/// The largest own span, the last end of computing, and of any collective.
pub(super) fn spans(p: &Problem, schedule: &Schedule) -> Option<(i64, i64, i64)> {
    let costs = simulator(p);
    let options = LowerOptions { residency: lower::Residency::AsWritten, ..Default::default() };
    let timeline = simulate(&lower(schedule, &options), &costs).ok()?;
    let own = |r: &zeropp_schedule::timeline::RankTimeline| r.own_span();
    let spans = timeline.ranks.iter().filter_map(own).collect::<Vec<_>>();
    let longest = spans.iter().map(|(start, end)| end - start).max()?;
    let last = spans.iter().map(|(_, end)| *end).max()?;
    let collective =
        |a: &Action| matches!(a, Action::AllGather { .. } | Action::ReduceScatter { .. });
    let spans = timeline.ranks.iter().flat_map(|r| &r.spans);
    let lane = spans.filter(|s| collective(&s.action)).map(|s| s.end_ns).max().unwrap_or(0);
    Some((longest as i64, last as i64, lane as i64))
}

/// The problem's costs as the simulator wants them.
fn simulator(p: &Problem) -> simulate::Costs {
    let stages = p.placement.len();
    let mut costs = simulate::Costs::uniform(stages, 0, 0, 0, p.costs.send);
    for (at, &s) in p.stage.iter().enumerate() {
        let (r, v) = (at / p.v, at % p.v);
        let back = p.take[r * p.classes + p.v + v] as u64;
        let stage = &mut costs.stages[s];
        (stage.f_ns, stage.w_ns) = (p.costs.f[s], p.costs.w[s]);
        (stage.b_ns, stage.r_ns) = (p.costs.b[s], back - p.costs.b[s]);
        (stage.all_gather_ns, stage.reduce_scatter_ns) = (p.costs.gather[s], p.costs.reduce[s]);
    }
    costs
}
