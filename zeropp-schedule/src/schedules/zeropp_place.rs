//! ZeroPP steps made and timed by the clock: a given order of F and B on every rank, with every W
//! put where [`Policy`] says.
//!
//! The F and B of a rank are those of ZeroPP's unit, block by block (ZeroPP §3.1), so a unit needs
//! 2V − 1 gathers whatever the policy. Only the depth of the last stage's warm-up and the places of
//! W are free. A W needs no weights; it may run in any later block of its unit.
//!
//! A search tries hundreds of policies and writes one, so [`StepPlacer`] keeps its tables from one
//! to the next, times a step while it places it, and gives up as soon as the step can be no better
//! than what is asked for.

use super::Shape;
use super::costs::{Objective, OrderCosts};
use super::zeropp_spine::{Op, Spines};
use crate::ir::{Action, Compute, Task};

/// Where the W of the stages that are not a rank's last go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Home {
    /// Right after their B, as in the fixed order.
    WithB,
    /// Anywhere in the block of their stage, so that its gradient is reduced when the block ends.
    InBlock,
    /// Anywhere up to the end of the unit.
    InUnit,
}

/// The free choices of a step.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Policy {
    /// Forwards of each rank's last stage before its first B, at most U.
    pub(super) warm_up: Vec<usize>,
    /// A gap takes a W that is longer than it if the gap is at least this many quarters of the W;
    /// 4 takes only those that fit.
    pub(super) quarters: u64,
    /// Follow every B of the last stage with a W once its forwards are spent, as the fixed order
    /// does, whether there is a gap or not.
    pub(super) paced: bool,
    /// See [`Home`].
    pub(super) home: Home,
}

/// Lengths that steps are compared by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Score {
    /// The largest time between a rank's first start and last end.
    pub(super) own_span: u64,
    /// End of the last action or collective of any rank.
    pub(super) makespan: u64,
    /// Sum of those times of all ranks.
    pub(super) all_spans: u64,
}

impl Score {
    /// The lengths in the order of their weight: the first that differs decides.
    pub(super) fn rank(&self, objective: Objective) -> [u64; 3] {
        match objective {
            Objective::OwnSpan => [self.own_span, self.makespan, self.all_spans],
            Objective::Makespan => [self.makespan, self.own_span, self.all_spans],
        }
    }
}

/// What a step must keep to be worth timing to its end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cutoff {
    pub(super) own_span: u64,
    pub(super) makespan: u64,
}

impl Cutoff {
    pub(super) const NONE: Cutoff = Cutoff { own_span: u64::MAX, makespan: u64::MAX };
}

/// The step is of no use: an F does not fit the memory limit, a rank with a deeper warm-up than the
/// one before it waits for forwards that never come, or the cutoff is passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeadEnd;

/// Two clocks of the same actions. W are placed by `placed`, which takes reductions as free; the
/// step takes as long as `timed` says.
#[derive(Clone, Copy, Default)]
struct PlacementTimes {
    placed: u64,
    timed: u64,
}

#[derive(Default)]
struct RankPlacement {
    /// Of the spine: the next F or B and the end.
    next: usize,
    end: usize,
    /// W that may run, first in, first out. As blocks follow each other from the last stage to the
    /// first, these are W of `oldest` and the stages below it.
    waiting: usize,
    oldest: usize,
    now: PlacementTimes,
    /// When the communication lane is free.
    lane: PlacementTimes,
    /// When the block to come has its weights, for `placed`.
    gathered: u64,
    /// For `timed`: the first start, and how long the rank may still idle before the cutoff.
    start: Option<u64>,
    slack: u64,
    memory: i64,
    order: Vec<Action>,
}

/// What has run of a stage. Micro-batches follow each other, so a number says which.
#[derive(Clone, Copy, Default)]
struct StageCounts {
    f: usize,
    b: usize,
    w: usize,
    /// When its weights are there, for `timed`.
    gathered: u64,
}

/// Places and times the steps of one shape and costs.
pub(super) struct StepPlacer<'a> {
    shape: &'a Shape,
    costs: &'a OrderCosts,
    send: u64,
    spines: Spines,
    limits: Vec<i64>,
    /// Computing time of each rank's step.
    busy: Vec<u64>,
    /// The last micro-batch of its unit, by micro-batch.
    ends_unit: Vec<bool>,
    stages: Vec<StageCounts>,
    /// Ends of F and of B by `stage · m + micro-batch`.
    ends_f: Vec<PlacementTimes>,
    ends_b: Vec<PlacementTimes>,
    cutoff: Cutoff,
    writes: bool,
}

/// The most activation memory each rank may hold: that of the step's largest unit, or the costs'
/// limit where that is lower.
pub(super) fn limits(shape: &Shape, costs: &OrderCosts) -> Vec<i64> {
    let unit = shape.unit.min(shape.micro_batches) as i64;
    (0..shape.pp)
        .map(|rank| {
            let stages = (0..shape.virtual_stages).map(|v| v * shape.pp + rank);
            // B may keep more for W than F has kept for it.
            let most = |s: usize| costs.mem_f[s].max(-costs.mem_w[s]);
            let held = unit * stages.map(most).sum::<i64>();
            held.min(costs.mem_limit.unwrap_or(held))
        })
        .collect()
}

impl<'a> StepPlacer<'a> {
    pub(super) fn new(shape: &'a Shape, costs: &'a OrderCosts) -> StepPlacer<'a> {
        let m = shape.micro_batches;
        let busy = |rank: usize| {
            let stages = (0..shape.virtual_stages).map(|v| v * shape.pp + rank);
            m as u64 * stages.map(|s| costs.total(s)).sum::<u64>()
        };
        let slots = shape.stages() * m;
        StepPlacer {
            shape,
            costs,
            send: if shape.pp == 1 { 0 } else { costs.send },
            spines: Spines::new(shape),
            limits: limits(shape, costs),
            busy: (0..shape.pp).map(busy).collect(),
            ends_unit: (1..=m).map(|next| next == m || next % shape.unit == 0).collect(),
            stages: vec![StageCounts::default(); shape.stages()],
            ends_f: vec![PlacementTimes::default(); slots],
            ends_b: vec![PlacementTimes::default(); slots],
            cutoff: Cutoff::NONE,
            writes: false,
        }
    }

    /// The score of the step that `policy` makes.
    ///
    /// # Errors
    /// A step that cannot run, or one with an own span or a makespan over the cutoff.
    pub(super) fn score(&mut self, policy: &Policy, cutoff: Cutoff) -> Result<Score, DeadEnd> {
        (self.cutoff, self.writes) = (cutoff, false);
        let ranks = self.run(policy)?;
        let span = |r: &RankPlacement| r.now.timed - r.start.unwrap_or(0);
        let score = Score {
            own_span: ranks.iter().map(span).max().unwrap_or(0),
            makespan: ranks.iter().map(|r| r.now.timed.max(r.lane.timed)).max().unwrap_or(0),
            all_spans: ranks.iter().map(span).sum(),
        };
        let kept = score.own_span <= cutoff.own_span && score.makespan <= cutoff.makespan;
        if kept { Ok(score) } else { Err(DeadEnd) }
    }

    /// Writes the step's actions for `policy`.
    ///
    /// # Errors
    /// A step that cannot run.
    pub(super) fn write(&mut self, policy: &Policy) -> Result<Vec<Vec<Action>>, DeadEnd> {
        (self.cutoff, self.writes) = (Cutoff::NONE, true);
        Ok(self.run(policy)?.into_iter().map(|r| r.order).collect())
    }

    fn run(&mut self, policy: &Policy) -> Result<Vec<RankPlacement>, DeadEnd> {
        self.stages.fill(StageCounts::default());
        let mut ranks: Vec<RankPlacement> =
            (0..self.shape.pp).map(|r| self.rank(r, policy)).collect();
        // Activations run up the ranks and gradients down, so the rounds take turns.
        let (mut up, mut moved) = (true, true);
        while moved {
            moved = false;
            for n in 0..ranks.len() {
                let rank = if up { n } else { ranks.len() - 1 - n };
                while self.step(policy, rank, &mut ranks[rank])? {
                    moved = true;
                }
            }
            up = !up;
        }
        if ranks.iter().all(|r| r.next == r.end) { Ok(ranks) } else { Err(DeadEnd) }
    }

    fn rank(&mut self, rank: usize, policy: &Policy) -> RankPlacement {
        let spine = self.spines.range(policy.warm_up[rank]);
        let first = self.costs.gather[rank];
        self.stages[rank].gathered = first;
        let actions = 3 * self.shape.virtual_stages * self.shape.micro_batches;
        RankPlacement {
            next: spine.start,
            end: spine.end,
            gathered: first,
            lane: PlacementTimes { placed: 0, timed: first },
            order: Vec::with_capacity(if self.writes { actions } else { 0 }),
            ..RankPlacement::default()
        }
    }

    /// Runs the next F or B of a rank and the W before it; false where its input is not made yet
    /// or nothing is left.
    fn step(
        &mut self,
        policy: &Policy,
        rank: usize,
        state: &mut RankPlacement,
    ) -> Result<bool, DeadEnd> {
        if state.next == state.end {
            return Ok(false);
        }
        let op = self.spines.op(state.next);
        let stage = op.v * self.shape.pp + rank;
        let Some(mut arrival) = self.arrival(op.kind, stage, op.i) else { return Ok(false) };
        if op.opens {
            arrival.placed = arrival.placed.max(state.gathered);
        }
        let more = match op.kind {
            Compute::F => self.costs.mem_f[stage],
            _ => self.costs.mem_b[stage],
        };
        while state.memory + more > self.limits[rank] {
            self.put_w(rank, state)?.ok_or(DeadEnd)?;
        }
        self.fill_gap(policy, rank, state, arrival.placed)?;
        if let Some(ahead) = op.ahead {
            self.gather(ahead * self.shape.pp + rank, state);
        }
        arrival.timed = arrival.timed.max(self.stages[stage].gathered);
        self.put(rank, state, Task { kind: op.kind, stage, micro_batch: op.i }, arrival)?;
        state.next += 1;
        if op.kind == Compute::B {
            if state.waiting == 0 {
                state.oldest = op.v;
            }
            state.waiting += 1;
            self.after_b(policy, rank, state, op)?;
        }
        Ok(true)
    }

    /// The W that the policy does not leave to the gaps.
    fn after_b(
        &mut self,
        policy: &Policy,
        rank: usize,
        state: &mut RankPlacement,
        op: Op,
    ) -> Result<(), DeadEnd> {
        let last = self.shape.virtual_stages - 1;
        let here = op.v < last
            && match policy.home {
                Home::WithB => true,
                Home::InBlock => op.closes,
                Home::InUnit => false,
            };
        if here {
            // Those of this block that wait go before older ones of the blocks before.
            let stage = op.v * self.shape.pp + rank;
            while self.stages[stage].w < self.stages[stage].b {
                self.run_w(rank, state, op.v)?;
            }
        }
        if op.v == last && policy.paced && op.before_b && !op.closes {
            self.put_w(rank, state)?;
        }
        let ends_unit = op.v == 0 && op.closes;
        while ends_unit && self.put_w(rank, state)?.is_some() {}
        Ok(())
    }

    /// Starts the gather of `stage`, the block after the one that opens now.
    fn gather(&mut self, stage: usize, state: &mut RankPlacement) {
        let takes = self.costs.gather[stage];
        state.lane.placed = state.lane.placed.max(state.now.placed) + takes;
        state.lane.timed = state.lane.timed.max(state.now.timed) + takes;
        state.gathered = state.lane.placed;
        self.stages[stage].gathered = state.lane.timed;
    }

    fn fill_gap(
        &mut self,
        policy: &Policy,
        rank: usize,
        state: &mut RankPlacement,
        arrival: u64,
    ) -> Result<(), DeadEnd> {
        while arrival > state.now.placed {
            let Some(v) = self.longest_waiting(rank, state) else { break };
            let w = self.costs.w[v * self.shape.pp + rank];
            let gap = arrival - state.now.placed;
            if gap < w && (policy.quarters == 4 || 4 * gap < policy.quarters * w) {
                break;
            }
            self.run_w(rank, state, v)?;
        }
        Ok(())
    }

    /// The one of a rank's V stages whose W has waited longest.
    fn longest_waiting(&self, rank: usize, state: &mut RankPlacement) -> Option<usize> {
        if state.waiting == 0 {
            return None;
        }
        let spent = |v: usize| {
            let stage = &self.stages[v * self.shape.pp + rank];
            stage.w == stage.b
        };
        while spent(state.oldest) {
            state.oldest -= 1;
        }
        Some(state.oldest)
    }

    /// Runs the W that has waited longest, if one waits.
    fn put_w(&mut self, rank: usize, state: &mut RankPlacement) -> Result<Option<()>, DeadEnd> {
        let Some(v) = self.longest_waiting(rank, state) else { return Ok(None) };
        self.run_w(rank, state, v).map(Some)
    }

    /// Runs the next W of one of the rank's V stages and, if it is the unit's last, the reduction.
    fn run_w(&mut self, rank: usize, state: &mut RankPlacement, v: usize) -> Result<(), DeadEnd> {
        let stage = v * self.shape.pp + rank;
        let i = self.stages[stage].w;
        state.waiting -= 1;
        self.put(
            rank,
            state,
            Task { kind: Compute::W, stage, micro_batch: i },
            PlacementTimes::default(),
        )?;
        if self.ends_unit[i] {
            state.lane.timed = state.lane.timed.max(state.now.timed) + self.costs.reduce[stage];
        }
        Ok(())
    }

    /// When the input of an F or B is on its rank, `None` if it has not been computed.
    fn arrival(&self, kind: Compute, stage: usize, i: usize) -> Option<PlacementTimes> {
        let m = self.shape.micro_batches;
        let end = match kind {
            Compute::F if stage == 0 => return Some(PlacementTimes::default()),
            Compute::F => (self.stages[stage - 1].f > i).then(|| self.ends_f[(stage - 1) * m + i]),
            _ if stage + 1 == self.shape.stages() => return Some(PlacementTimes::default()),
            _ => (self.stages[stage + 1].b > i).then(|| self.ends_b[(stage + 1) * m + i]),
        }?;
        Some(PlacementTimes {
            placed: end.placed.saturating_add(self.send),
            timed: end.timed.saturating_add(self.send),
        })
    }

    fn put(
        &mut self,
        rank: usize,
        state: &mut RankPlacement,
        Task { kind, stage, micro_batch: i }: Task,
        arrival: PlacementTimes,
    ) -> Result<(), DeadEnd> {
        if arrival.timed > state.now.timed || state.start.is_none() {
            self.wait(rank, state, arrival.timed)?;
        }
        let at = stage * self.shape.micro_batches + i;
        let begin = state.now.placed.max(arrival.placed);
        let mut end = |takes: u64| {
            state.now = PlacementTimes { placed: begin + takes, timed: state.now.timed + takes };
            state.now
        };
        let done = &mut self.stages[stage];
        let memory = match kind {
            Compute::F => {
                done.f += 1;
                self.ends_f[at] = end(self.costs.f[stage]);
                self.costs.mem_f[stage]
            }
            Compute::B => {
                done.b += 1;
                self.ends_b[at] = end(self.costs.b[stage]);
                self.costs.mem_b[stage]
            }
            _ => {
                done.w += 1;
                end(self.costs.w[stage]);
                self.costs.mem_w[stage]
            }
        };
        state.memory += memory;
        if state.memory > self.limits[rank] {
            return Err(DeadEnd);
        }
        if self.writes {
            state.order.push(Action::compute(kind, stage, i));
        }
        Ok(())
    }

    /// Idles until `until` by the clock `timed`. A rank's span is its work and its idle time, so
    /// the cutoff is passed as soon as it has idled too long.
    fn wait(&self, rank: usize, state: &mut RankPlacement, until: u64) -> Result<(), DeadEnd> {
        let begin = state.now.timed.max(until);
        if state.start.is_none() {
            let room = self.cutoff.own_span.min(self.cutoff.makespan.saturating_sub(begin));
            state.slack = room.checked_sub(self.busy[rank]).ok_or(DeadEnd)?;
            state.start = Some(begin);
        } else {
            let idle = begin - state.now.timed;
            state.slack = state.slack.checked_sub(idle).ok_or(DeadEnd)?;
        }
        state.now.timed = begin;
        Ok(())
    }
}
