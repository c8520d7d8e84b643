//! Squeezing an order: a rank that would wait runs a later action early, within a memory peak.

use super::costs::OrderCosts;
use crate::ir::{Action, Compute, Task};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// How far ahead of its next action a rank looks for one that it can run at once.
const WINDOW: usize = 256;

struct ReorderedRank {
    /// Actions not yet run, in the given order.
    rest: Vec<Action>,
    free_at: u64,
    memory: i64,
    order: Vec<Action>,
}

struct Squeeze<'a> {
    placement: &'a [usize],
    micro_batches: usize,
    costs: &'a OrderCosts,
    peak: i64,
    w_only: bool,
    /// When a result is on the rank that needs it, by `stage · m + micro-batch`.
    there_f: Vec<u64>,
    there_b: Vec<u64>,
    ranks: Vec<ReorderedRank>,
    /// Moments at which a rank may have something to do.
    events: BinaryHeap<Reverse<(u64, usize)>>,
}

const NOT_YET: u64 = u64::MAX;

/// The order in which the ranks' actions run when a rank whose next action has no input yet takes
/// the first later one that has, unless that would lift its memory above `peak`; with `w_only`,
/// only a W. What is left of a rank keeps its order, so nothing can get stuck that was not before.
pub(super) fn reorder(
    ranks: &[Vec<Action>],
    placement: &[usize],
    micro_batches: usize,
    costs: &OrderCosts,
    peak: i64,
    w_only: bool,
) -> Vec<Vec<Action>> {
    let slots = placement.len() * micro_batches;
    let start = |order: &Vec<Action>| ReorderedRank {
        rest: order.iter().rev().copied().collect(),
        free_at: 0,
        memory: 0,
        order: Vec::with_capacity(order.len()),
    };
    let mut squeeze = Squeeze {
        placement,
        micro_batches,
        costs,
        peak,
        w_only,
        there_f: vec![NOT_YET; slots],
        there_b: vec![NOT_YET; slots],
        ranks: ranks.iter().map(start).collect(),
        events: (0..ranks.len()).map(|r| Reverse((0, r))).collect(),
    };
    while let Some(Reverse((now, rank))) = squeeze.events.pop() {
        if now >= squeeze.ranks[rank].free_at {
            squeeze.dispatch(now, rank);
        }
    }
    squeeze.ranks.into_iter().map(|r| r.order).collect()
}

impl Squeeze<'_> {
    fn dispatch(&mut self, now: u64, rank: usize) {
        let Some(at) = self.choose(now, rank) else { return };
        let place = self.ranks[rank].rest.len() - 1 - at;
        let action = self.ranks[rank].rest.remove(place);
        let Action::Compute { kind, stage, micro_batch } = action else {
            unreachable!("V schedules have plain compute actions")
        };
        let (takes, memory) = self.cost(kind, stage);
        let end = now + takes;
        let state = &mut self.ranks[rank];
        state.order.push(action);
        state.free_at = end;
        state.memory += memory;
        self.events.push(Reverse((end, rank)));
        let slot = stage * self.micro_batches + micro_batch;
        let (there, to) = match kind {
            Compute::F => (&mut self.there_f, Some(stage + 1)),
            Compute::B => (&mut self.there_b, stage.checked_sub(1)),
            _ => return,
        };
        let Some(to) = to.and_then(|s| self.placement.get(s)) else {
            there[slot] = end;
            return;
        };
        there[slot] = if *to == rank { end } else { end + self.costs.send };
        self.events.push(Reverse((there[slot], *to)));
    }

    /// How far ahead the action to run now lies; `None` where the rank must wait.
    fn choose(&self, now: u64, rank: usize) -> Option<usize> {
        let state = &self.ranks[rank];
        let mut memory = state.memory;
        let mut highest = i64::MIN;
        for (at, action) in state.rest.iter().rev().take(WINDOW).enumerate() {
            let Task { kind, stage, micro_batch: i } = action.computes().next()?;
            let change = self.cost(kind, stage).1;
            // Running it now adds its change to every point that it passes.
            let fits = at == 0 || change <= 0 || highest.max(state.memory) + change <= self.peak;
            let allowed = at == 0 || !self.w_only || kind == Compute::W;
            if fits && allowed && self.ready(now, rank, kind, stage, i) {
                return Some(at);
            }
            memory += change;
            highest = highest.max(memory);
        }
        None
    }

    fn ready(&self, now: u64, rank: usize, kind: Compute, stage: usize, i: usize) -> bool {
        let m = self.micro_batches;
        // The rank's own results are there as soon as it is free: it runs one action at a time.
        let own = |there: &[u64]| there[stage * m + i] != NOT_YET;
        match kind {
            Compute::F => stage == 0 || self.there_f[(stage - 1) * m + i] <= now,
            Compute::B => {
                let last = stage + 1 == self.placement.len();
                own(&self.there_f) && (last || self.there_b[(stage + 1) * m + i] <= now)
            }
            _ => own(&self.there_b) && self.placement[stage] == rank,
        }
    }

    fn cost(&self, kind: Compute, s: usize) -> (u64, i64) {
        match kind {
            Compute::F => (self.costs.f[s], self.costs.mem_f[s]),
            Compute::B => (self.costs.b[s], self.costs.mem_b[s]),
            _ => (self.costs.w[s], self.costs.mem_w[s]),
        }
    }
}
