//! When the actions of a compute schedule run: the clock that generators choose by.
//!
//! Exact integers, one pass over the actions, no links and no lanes beyond one for collectives; the
//! simulator models the rest. Results on the same rank are there at once, others after
//! [`OrderCosts::send`].

use super::costs::{Objective, OrderCosts};
use crate::ir::{Action, Compute, Schedule, Task};

/// Start and end of every action, and what follows from them.
#[derive(Clone, Debug)]
pub struct Timing {
    /// Start and end of each rank's actions, in the order of its program.
    pub spans: Vec<Vec<(u64, u64)>>,
    /// First start of a compute action, per rank.
    pub starts: Vec<u64>,
    /// Last end of a compute action, per rank.
    pub ends: Vec<u64>,
    /// Time spent computing, per rank.
    pub busy: Vec<u64>,
    /// Highest activation memory, per rank.
    pub peaks: Vec<i64>,
    /// End of the last collective or compute action of any rank.
    pub makespan: u64,
}

impl Timing {
    /// The largest time between a rank's first start and last end.
    pub fn own_span(&self) -> u64 {
        self.starts.iter().zip(&self.ends).map(|(s, e)| e - s).max().unwrap_or(0)
    }

    /// Lengths that orders are compared by: the smaller, the better.
    pub(super) fn rank(&self, objective: Objective) -> (u64, u64) {
        match objective {
            Objective::Makespan => (self.makespan, self.own_span()),
            Objective::OwnSpan => (self.own_span(), self.makespan),
        }
    }

    /// The highest activation memory of any rank.
    pub(super) fn peak(&self) -> i64 {
        self.peaks.iter().max().copied().unwrap_or(0)
    }
}

/// The schedule that is best for the costs' objective, the first of equals, of those that keep to
/// `limit`; none where none does. All are of the same placement and number of micro-batches.
pub(super) fn best_within(all: Vec<Schedule>, costs: &OrderCosts, limit: i64) -> Option<Schedule> {
    let timed = all.into_iter().filter_map(|schedule| {
        let m = schedule.micro_batches();
        let timing = time(&schedule.ranks, &schedule.placement, m, costs).ok()?;
        (timing.peak() <= limit).then(|| (timing.rank(costs.objective), schedule))
    });
    timed.min_by_key(|(rank, _)| *rank).map(|(_, schedule)| schedule)
}

/// No rank could go on; the action each one waits at, if any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoProgress(pub Vec<Option<Action>>);

const NOT_YET: u64 = u64::MAX;

struct Clock<'a> {
    costs: &'a OrderCosts,
    placement: &'a [usize],
    micro_batches: usize,
    /// End of F and of B (or BW) by `stage · m + micro-batch`.
    done_f: Vec<u64>,
    done_b: Vec<u64>,
    /// When a stage's weights are there; 0 where nothing gathers them.
    gathered: Vec<u64>,
    now: Vec<u64>,
    lane: Vec<u64>,
    memory: Vec<i64>,
    timing: Timing,
}

/// Times `ranks`; gathers and reductions among the actions are followed, sends are implied.
pub fn time(
    ranks: &[Vec<Action>],
    placement: &[usize],
    micro_batches: usize,
    costs: &OrderCosts,
) -> Result<Timing, NoProgress> {
    let mut clock = Clock::new(ranks.len(), placement, micro_batches, costs);
    let mut next = vec![0; ranks.len()];
    // Activations mostly run up the ranks and gradients down, so the rounds take turns.
    let (mut up, mut moved) = (true, true);
    while moved {
        moved = false;
        for n in 0..ranks.len() {
            let rank = if up { n } else { ranks.len() - 1 - n };
            while let Some(action) = ranks[rank].get(next[rank]) {
                if !clock.step(rank, action) {
                    break;
                }
                next[rank] += 1;
                moved = true;
            }
        }
        up = !up;
    }
    if next.iter().zip(ranks).any(|(n, actions)| *n < actions.len()) {
        let at = next.iter().zip(ranks).map(|(n, actions)| actions.get(*n).copied());
        return Err(NoProgress(at.collect()));
    }
    Ok(clock.finish())
}

impl<'a> Clock<'a> {
    fn new(pp: usize, placement: &'a [usize], m: usize, costs: &'a OrderCosts) -> Clock<'a> {
        let stages = placement.len();
        let timing = Timing {
            spans: vec![Vec::new(); pp],
            starts: vec![NOT_YET; pp],
            ends: vec![0; pp],
            busy: vec![0; pp],
            peaks: vec![0; pp],
            makespan: 0,
        };
        Clock {
            costs,
            placement,
            micro_batches: m,
            done_f: vec![NOT_YET; stages * m],
            done_b: vec![NOT_YET; stages * m],
            gathered: vec![0; stages],
            now: vec![0; pp],
            lane: vec![0; pp],
            memory: vec![0; pp],
            timing,
        }
    }

    fn step(&mut self, rank: usize, action: &Action) -> bool {
        let span = match *action {
            Action::AllGather { stage } => {
                let span = self.collective(rank, self.costs.gather[stage]);
                self.gathered[stage] = span.1;
                span
            }
            Action::ReduceScatter { stage } => self.collective(rank, self.costs.reduce[stage]),
            Action::Compute { .. } | Action::Overlap { .. } => match self.compute(rank, action) {
                Some(span) => span,
                None => return false,
            },
            // What these take is not among the costs that an order is found with.
            Action::Send { .. }
            | Action::Recv { .. }
            | Action::SendHead { .. }
            | Action::RecvHead { .. }
            | Action::Free { .. }
            | Action::ReplicaReduce { .. }
            | Action::Retire { .. }
            | Action::Out { .. }
            | Action::Gone { .. }
            | Action::In { .. }
            | Action::OptimizerStep
            | Action::Validate => (self.now[rank], self.now[rank]),
        };
        self.timing.spans[rank].push(span);
        true
    }

    fn collective(&mut self, rank: usize, takes: u64) -> (u64, u64) {
        let start = self.lane[rank].max(self.now[rank]);
        self.lane[rank] = start + takes;
        (start, start + takes)
    }

    /// Runs all computes of one action as a block: it starts when every input is there.
    fn compute(&mut self, rank: usize, action: &Action) -> Option<(u64, u64)> {
        let mut start = self.now[rank];
        for Task { kind, stage, micro_batch: i } in action.computes() {
            start = start.max(self.ready(rank, kind, stage, i)?);
        }
        let costs = self.costs;
        let takes: u64 = action.computes().map(|t| duration(costs, t.kind, t.stage)).sum();
        let end = start + takes;
        for Task { kind, stage, micro_batch: i } in action.computes() {
            self.record(rank, kind, stage, i, end);
        }
        self.now[rank] = end;
        self.timing.starts[rank] = self.timing.starts[rank].min(start);
        self.timing.ends[rank] = end;
        self.timing.busy[rank] += takes;
        Some((start, end))
    }

    /// When the inputs of an action are on `rank`, `None` if they have not been computed.
    fn ready(&self, rank: usize, kind: Compute, stage: usize, i: usize) -> Option<u64> {
        let at = |done: &[u64], from: usize| {
            let end = done[from * self.micro_batches + i];
            let send = if self.placement[from] == rank { 0 } else { self.costs.send };
            (end != NOT_YET).then_some(end.saturating_add(send))
        };
        match kind {
            Compute::F if stage == 0 => Some(self.gathered[stage]),
            Compute::F => Some(at(&self.done_f, stage - 1)?.max(self.gathered[stage])),
            Compute::B | Compute::BW => {
                let forward = at(&self.done_f, stage)?.max(self.gathered[stage]);
                let last = stage + 1 == self.placement.len();
                let behind = if last { 0 } else { at(&self.done_b, stage + 1)? };
                Some(forward.max(behind))
            }
            Compute::W => at(&self.done_b, stage),
            Compute::R => at(&self.done_f, stage),
        }
    }

    fn record(&mut self, rank: usize, kind: Compute, stage: usize, i: usize, end: u64) {
        let at = stage * self.micro_batches + i;
        match kind {
            Compute::F => self.done_f[at] = end,
            Compute::B | Compute::BW => self.done_b[at] = end,
            Compute::W | Compute::R => {}
        }
        self.memory[rank] += memory_change(self.costs, kind, stage);
        self.timing.peaks[rank] = self.timing.peaks[rank].max(self.memory[rank]);
    }

    fn finish(mut self) -> Timing {
        for start in &mut self.timing.starts {
            *start = if *start == NOT_YET { 0 } else { *start };
        }
        self.timing.makespan =
            self.timing.ends.iter().chain(&self.lane).copied().max().unwrap_or(0);
        self.timing
    }
}

/// How long a compute of stage `s` takes.
pub(super) fn duration(costs: &OrderCosts, kind: Compute, s: usize) -> u64 {
    match kind {
        Compute::F | Compute::R => costs.f[s],
        Compute::B => costs.b[s],
        Compute::W => costs.w[s],
        Compute::BW => costs.b[s] + costs.w[s],
    }
}

/// By how much a compute of stage `s` changes the memory of activations.
pub(super) fn memory_change(costs: &OrderCosts, kind: Compute, s: usize) -> i64 {
    match kind {
        Compute::F => costs.mem_f[s],
        Compute::B => costs.mem_b[s],
        Compute::W => costs.mem_w[s],
        Compute::BW => costs.mem_b[s] + costs.mem_w[s],
        Compute::R => 0,
    }
}

/// The largest time between a rank's first and last action; `None` where the schedule gets stuck.
pub fn own_span(schedule: &Schedule, costs: &OrderCosts) -> Option<u64> {
    let timing = time(&schedule.ranks, &schedule.placement, schedule.micro_batches(), costs);
    timing.ok().map(|t| t.own_span())
}
