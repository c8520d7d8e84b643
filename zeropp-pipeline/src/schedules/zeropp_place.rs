//! One ZeroPP step written by the clock: a given order of F and B on every rank, with every W put
//! where [`Policy`] says.
//!
//! The F and B of a rank are those of ZeroPP's unit, block by block (ZeroPP §3.1), so a unit needs
//! 2V − 1 gathers whatever the policy. Only the depth of the last stage's warm-up and the places of
//! W are free. A W needs no weights; it may run in any later block of its unit.

use super::Shape;
use super::costs::Costs;
use crate::ir::{Action, Compute};
use std::collections::VecDeque;

/// Where the W of the stages that are not a rank's last go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    /// Right after their B, as in the fixed order.
    WithB,
    /// Anywhere in the block of their stage, so that its gradient is reduced when the block ends.
    InBlock,
    /// Anywhere up to the end of the unit.
    InUnit,
}

/// The free choices of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
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

/// The policy cannot be run: an F does not fit the memory limit, or a rank with a deeper warm-up
/// than the one before it waits for forwards that never come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeadEnd;

/// An F or B of a rank's fixed sequence.
#[derive(Clone, Copy, Debug)]
struct Spine {
    kind: Compute,
    v: usize,
    i: usize,
    unit: usize,
    /// First of its block: the weights must have come.
    opens: bool,
    /// Last B of its block.
    closes: bool,
}

struct Rank {
    spine: Vec<Spine>,
    next: usize,
    /// W that may run, first in, first out: chunk and micro-batch.
    waiting: VecDeque<(usize, usize)>,
    now: u64,
    /// When the communication lane is free, and when the block to come has its weights.
    lane: u64,
    gathered: u64,
    memory: i64,
    limit: i64,
    order: Vec<Action>,
}

struct Clock<'a> {
    shape: &'a Shape,
    costs: &'a Costs,
    policy: &'a Policy,
    ends_f: Vec<u64>,
    ends_b: Vec<u64>,
}

const NOT_YET: u64 = u64::MAX;

/// The most activation memory each rank may hold: that of the step's largest unit, or the costs'
/// limit where that is lower.
pub(super) fn limits(shape: &Shape, costs: &Costs) -> Vec<i64> {
    let unit = shape.unit.min(shape.micro_batches) as i64;
    (0..shape.pp)
        .map(|rank| {
            let stages = (0..shape.virtual_stages).map(|v| v * shape.pp + rank);
            let held = unit * stages.map(|s| costs.mem_f[s]).sum::<i64>();
            held.min(costs.mem_limit.unwrap_or(held))
        })
        .collect()
}

/// Writes the step's actions for `policy`.
pub(super) fn place(
    shape: &Shape,
    costs: &Costs,
    policy: &Policy,
) -> Result<Vec<Vec<Action>>, DeadEnd> {
    let mut ranks: Vec<Rank> = limits(shape, costs)
        .into_iter()
        .enumerate()
        .map(|(rank, limit)| Rank {
            spine: spine(shape, policy.warm_up[rank]),
            next: 0,
            waiting: VecDeque::new(),
            now: 0,
            lane: 0,
            gathered: costs.gather[rank],
            memory: 0,
            limit,
            order: Vec::with_capacity(3 * shape.virtual_stages * shape.micro_batches),
        })
        .collect();
    let slots = shape.stages() * shape.micro_batches;
    let (ends_f, ends_b) = (vec![NOT_YET; slots], vec![NOT_YET; slots]);
    let mut clock = Clock { shape, costs, policy, ends_f, ends_b };
    loop {
        let mut moved = false;
        for (rank, state) in ranks.iter_mut().enumerate() {
            while clock.step(rank, state)? {
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    if ranks.iter().any(|r| r.next < r.spine.len()) {
        return Err(DeadEnd);
    }
    Ok(ranks.into_iter().map(|r| r.order).collect())
}

fn spine(shape: &Shape, warm_up: usize) -> Vec<Spine> {
    let last = shape.virtual_stages - 1;
    let mut spine = Vec::with_capacity(2 * shape.virtual_stages * shape.micro_batches);
    let mut first = 0;
    for (unit, size) in shape.units().into_iter().enumerate() {
        let mut push = |kind, v, i, opens, closes| {
            spine.push(Spine { kind, v, i: first + i, unit, opens, closes });
        };
        for v in 0..last {
            (0..size).for_each(|i| push(Compute::F, v, i, i == 0, false));
        }
        let warm_up = warm_up.clamp(1, size);
        (0..warm_up).for_each(|i| push(Compute::F, last, i, i == 0, false));
        for i in 0..size {
            push(Compute::B, last, i, false, i + 1 == size);
            if warm_up + i < size {
                push(Compute::F, last, warm_up + i, false, false);
            }
        }
        for v in (0..last).rev() {
            (0..size).for_each(|i| push(Compute::B, v, i, i == 0, i + 1 == size));
        }
        first += size;
    }
    spine
}

impl Clock<'_> {
    /// Runs the next F or B of a rank and the W before it; false where its input is not made yet
    /// or nothing is left.
    fn step(&mut self, rank: usize, state: &mut Rank) -> Result<bool, DeadEnd> {
        let Some(&op) = state.spine.get(state.next) else { return Ok(false) };
        let stage = op.v * self.shape.pp + rank;
        let Some(mut arrival) = self.arrival(op.kind, stage, op.i) else { return Ok(false) };
        if op.opens {
            arrival = arrival.max(state.gathered);
        }
        if op.kind == Compute::F {
            while state.memory + self.costs.mem_f[stage] > state.limit {
                self.put_w(rank, state).ok_or(DeadEnd)?;
            }
        }
        self.fill_gap(rank, state, arrival);
        if op.opens {
            self.gather_ahead(rank, state);
        }
        self.put(state, op.kind, stage, op.i, arrival);
        state.next += 1;
        if op.kind == Compute::B {
            state.waiting.push_back((op.v, op.i));
            self.after_b(rank, state, op);
        }
        Ok(true)
    }

    /// The W that the policy does not leave to the gaps.
    fn after_b(&mut self, rank: usize, state: &mut Rank, op: Spine) {
        let last = self.shape.virtual_stages - 1;
        let here = op.v < last
            && match self.policy.home {
                Home::WithB => true,
                Home::InBlock => op.closes,
                Home::InUnit => false,
            };
        if here {
            // W of a stage run in micro-batch order: those of this block that wait go first.
            while let Some(at) = state.waiting.iter().position(|w| w.0 == op.v) {
                let w = state.waiting.remove(at).expect("position of a W");
                self.run_w(rank, state, w);
            }
        }
        let next = state.spine.get(state.next);
        let spent = next.is_some_and(|next| next.kind == Compute::B);
        if op.v == last && self.policy.paced && spent && !op.closes {
            self.put_w(rank, state);
        }
        let ends = state.spine.get(state.next).is_none_or(|next| next.unit != op.unit);
        while ends && self.put_w(rank, state).is_some() {}
    }

    /// Starts the gather of the block after the one that opens now.
    fn gather_ahead(&self, rank: usize, state: &mut Rank) {
        let rest = &state.spine[state.next + 1..];
        let Some(next) = rest.iter().find(|s| s.opens) else { return };
        let start = state.lane.max(state.now);
        state.lane = start + self.costs.gather[next.v * self.shape.pp + rank];
        state.gathered = state.lane;
    }

    fn fill_gap(&mut self, rank: usize, state: &mut Rank, arrival: u64) {
        while let Some(&(v, _)) = state.waiting.front() {
            let w = self.costs.w[v * self.shape.pp + rank];
            let gap = arrival.saturating_sub(state.now);
            if gap == 0
                || (gap < w && (self.policy.quarters == 4 || 4 * gap < self.policy.quarters * w))
            {
                break;
            }
            self.put_w(rank, state);
        }
    }

    /// Runs the W that has waited longest.
    fn put_w(&mut self, rank: usize, state: &mut Rank) -> Option<()> {
        let w = state.waiting.pop_front()?;
        self.run_w(rank, state, w);
        Some(())
    }

    fn run_w(&mut self, rank: usize, state: &mut Rank, (v, i): (usize, usize)) {
        self.put(state, Compute::W, v * self.shape.pp + rank, i, 0);
    }

    fn arrival(&self, kind: Compute, stage: usize, i: usize) -> Option<u64> {
        let m = self.shape.micro_batches;
        let send = if self.shape.pp == 1 { 0 } else { self.costs.send };
        let (ends, from) = match kind {
            Compute::F if stage == 0 => return Some(0),
            Compute::F => (&self.ends_f, stage - 1),
            _ if stage + 1 == self.shape.stages() => return Some(0),
            _ => (&self.ends_b, stage + 1),
        };
        let end = ends[from * m + i];
        (end != NOT_YET).then_some(end.saturating_add(send))
    }

    fn put(&mut self, state: &mut Rank, kind: Compute, stage: usize, i: usize, arrival: u64) {
        let (takes, memory) = match kind {
            Compute::F => (self.costs.f[stage], self.costs.mem_f[stage]),
            Compute::B => (self.costs.b[stage], self.costs.mem_b[stage]),
            _ => (self.costs.w[stage], self.costs.mem_w[stage]),
        };
        state.now = state.now.max(arrival) + takes;
        state.memory += memory;
        state.order.push(Action::compute(kind, stage, i));
        let at = stage * self.shape.micro_batches + i;
        match kind {
            Compute::F => self.ends_f[at] = state.now,
            Compute::B => self.ends_b[at] = state.now,
            _ => {}
        }
    }
}
