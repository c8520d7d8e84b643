//! Orders for a head that is split over ranks ([`crate::head`]): those of a kind, with more
//! micro-batches ahead, and the slices' F, B and W where a clock finds room for them.
//!
//! F and B of a slice run at the next boundary once their inputs are there, as other ranks wait for
//! them, and messages are passed on there, too; W, its own and the stages', fill gaps. At most
//! [`PENDING_MAX`] micro-batches of a slice are between F and W, which bounds what they keep. The
//! other actions stay in the kind's order, so
//! that no rank waits in a circle; the clock moves only W, and no stage's W past another of its
//! own.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::timing::duration;
use super::{OrderCosts, ScheduleError, Shape};
use crate::head::HeadTree;
use crate::ir::{Action, BLOCKS_MAX, Compute, Schedule, Task};
use crate::simulate::Event;

/// Micro-batches of a slice that have had F and not yet W, at most.
const PENDING_MAX: usize = 3;

/// More forwards ahead than a kind has of its own that are tried.
const AHEAD_MAX: usize = 6;

/// Quarters of a W that a gap must have for it, where its end is known.
const QUARTERS: [u64; 3] = [4, 2, 0];

/// Of the orders that `base` makes with more and more micro-batches ahead the one that takes least
/// time with slices of these blocks, the first of equals. `costs` has entries for stages and
/// slices, and of each for all slices of a sample.
pub(super) fn fastest(
    kind: &'static str,
    shape: &Shape,
    slices: &[usize],
    costs: &OrderCosts,
    base: impl Fn(usize) -> Result<Schedule, ScheduleError>,
) -> Result<Schedule, ScheduleError> {
    let parts = base(0)?.slices_per_sample();
    costs.check(kind, (shape.stages() + slices.len()) * parts)?;
    let mut best: Option<(u64, Schedule)> = None;
    let mut last = None;
    for ahead in 0..=AHEAD_MAX {
        let base = Schedule { head_blocks: slices.to_vec(), ..base(ahead)? };
        if last.as_ref() == Some(&base) {
            break;
        }
        for quarters in QUARTERS {
            let least = best.as_ref().map_or(NEVER, |(least, _)| *least);
            best = Clock::new(&base, costs, quarters).run(least).or(best);
        }
        last = Some(base);
    }
    best.map(|(_, schedule)| schedule).ok_or_else(|| unfit(kind, slices))
}

/// Refuses what are no slices of a head for `pp` ranks.
pub(super) fn check(kind: &'static str, pp: usize, slices: &[usize]) -> Result<(), ScheduleError> {
    let sum = slices.iter().try_fold(0usize, |sum, n| sum.checked_add(*n));
    let fit = slices.len() == pp && sum.is_some_and(|n| (1..=BLOCKS_MAX).contains(&n));
    if fit { Ok(()) } else { Err(unfit(kind, slices)) }
}

fn unfit(kind: &'static str, slices: &[usize]) -> ScheduleError {
    ScheduleError::Field {
        kind,
        field: "head-split",
        value: slices.iter().fold(0, |sum: usize, n| sum.saturating_add(*n)),
        works: format!("give a number for each rank, 1 to {BLOCKS_MAX} in all"),
    }
}

/// Costs of equal stages, and of a head that takes as long as one of them, by tokens.
pub(super) fn equal(shape: &Shape, sample_slices: &[u64], slices: &[usize]) -> OrderCosts {
    let (parts, blocks) = (sample_slices.len(), slices.iter().sum::<usize>() as u64);
    let stages = std::iter::repeat_n(blocks, shape.stages());
    let cells = stages.chain(slices.iter().map(|n| *n as u64));
    let mut costs = OrderCosts::uniform((shape.stages() + slices.len()) * parts, 0, 0, 0, 0);
    let times =
        cells.flat_map(|n| sample_slices.iter().map(move |tokens| n.saturating_mul(*tokens)));
    costs.f = times.collect();
    (costs.b, costs.w) = (costs.f.clone(), costs.f.clone());
    costs
}

const NEVER: u64 = u64::MAX;

/// One rank on its way.
#[derive(Default)]
struct Rank {
    order: Vec<Action>,
    /// The next action of the kind's order.
    next: usize,
    /// Which W of that order have run, by place.
    done: Vec<bool>,
    /// Places of its W, and the first that has not run.
    w: Vec<usize>,
    next_w: usize,
    free: u64,
    /// What the computes take that have not begun.
    left: u64,
    /// Micro-batches of the slice that have had F, B, W.
    slice: [usize; 3],
}

struct Clock<'a> {
    base: &'a Schedule,
    costs: &'a OrderCosts,
    quarters: u64,
    head: HeadTree,
    /// A rank's messages of the head behind computes, and the compute that each is behind.
    leaving: Vec<Vec<((Compute, usize), usize)>>,
    waiting: Vec<Vec<usize>>,
    micro_batches: usize,
    ranks: Vec<Rank>,
    /// Ends of F and B by cell and micro-batch.
    ends: [Vec<u64>; 2],
    /// When a split head's messages arrive, as far as that is known.
    arrival: Vec<u64>,
    /// Messages and ranks to look at, and when.
    agenda: BinaryHeap<Reverse<(u64, Event)>>,
    /// The longest time that a rank takes at the least, as far as is known.
    makespan: u64,
}

impl<'a> Clock<'a> {
    fn new(base: &'a Schedule, costs: &'a OrderCosts, quarters: u64) -> Clock<'a> {
        let head = HeadTree::of(base).expect("it is given slices");
        let micro_batches = base.micro_batches();
        let is_w = |a: &Action| a.computes().all(|t| t.kind == Compute::W);
        let rank = |actions: &Vec<Action>| Rank {
            done: vec![false; actions.len()],
            w: (0..actions.len()).filter(|at| is_w(&actions[*at])).collect(),
            ..Rank::default()
        };
        let none = || vec![NEVER; base.cells() * micro_batches];
        let mut leaving = vec![Vec::new(); base.pp()];
        for (at, edge) in head.edges.iter().enumerate() {
            leaving[edge.from].extend(edge.after.map(|after| (after, at)));
        }
        let mut clock = Clock {
            ranks: base.ranks.iter().map(rank).collect(),
            ends: [none(), none()],
            arrival: vec![NEVER; head.edges.len() * micro_batches],
            agenda: (0..base.pp()).map(|rank| Reverse((0, Event::Rank(rank)))).collect(),
            leaving,
            waiting: head.waiting(),
            base,
            costs,
            quarters,
            head,
            micro_batches,
            makespan: 0,
        };
        for rank in 0..base.pp() {
            let of_stages = base.ranks[rank].iter().flat_map(Action::computes);
            let stages = of_stages.map(|task| clock.takes(rank, task)).sum::<u64>();
            clock.ranks[rank].left = stages + clock.slice_takes(rank);
        }
        clock
    }

    /// What the computes of a rank's slice take.
    fn slice_takes(&self, rank: usize) -> u64 {
        if !self.head.has(rank) {
            return 0;
        }
        let kinds = [Compute::F, Compute::B, Compute::W];
        let of = |micro_batch| kinds.map(|kind| Task { kind, stage: self.head.stage, micro_batch });
        (0..self.micro_batches).flat_map(of).map(|task| self.takes(rank, task)).sum()
    }

    /// The makespan, and the order; none where it takes `least` or longer.
    fn run(mut self, least: u64) -> Option<(u64, Schedule)> {
        while let Some(Reverse((now, event))) = self.agenda.pop() {
            // A rank that waits is to be looked at for each thing that it waits for.
            while self.agenda.peek() == Some(&Reverse((now, event))) {
                self.agenda.pop();
            }
            match event {
                Event::Message(edge, micro_batch) => {
                    let at = self.may_leave(edge, micro_batch);
                    // Ranks pass messages on between computes (ADR 95).
                    let at = at.max(self.ranks[self.head.edges[edge].from].free);
                    if at > now {
                        self.plan(edge, micro_batch, at);
                    }
                }
                Event::Rank(rank) if self.ranks[rank].free <= now => self.decide(rank, now),
                Event::Rank(_) => {}
            }
            if self.makespan >= least {
                return None;
            }
        }
        let ranks = self.ranks.into_iter().map(|rank| rank.order).collect();
        Some((self.makespan, Schedule { ranks, ..self.base.clone() }))
    }

    /// Starts what is best of what `rank` can do now.
    fn decide(&mut self, rank: usize, now: u64) {
        let mut until = NEVER;
        let slice = |kind, micro_batch| Task { kind, stage: self.head.stage, micro_batch };
        if self.head.has(rank) {
            let [f, b, w] = self.ranks[rank].slice;
            if b < f {
                match self.ready(rank, slice(Compute::B, b)) {
                    ready if ready <= now => return self.start(rank, now, slice(Compute::B, b)),
                    ready => until = until.min(ready),
                }
            }
            if f < self.micro_batches {
                let ready = self.ready(rank, slice(Compute::F, f));
                if ready <= now && f - w < PENDING_MAX {
                    return self.start(rank, now, slice(Compute::F, f));
                }
                if ready <= now && w < b {
                    return self.start(rank, now, slice(Compute::W, w));
                }
                if f - w < PENDING_MAX {
                    until = until.min(ready);
                }
            }
        }
        if let Some(action) = self.next_of_kind(rank) {
            let ready = action.computes().map(|t| self.ready(rank, t)).max().unwrap_or(0);
            if ready <= now {
                let at = self.ranks[rank].next;
                self.ranks[rank].done[at] = true;
                return self.start_action(rank, now, action);
            }
            until = until.min(ready);
        }
        self.fill(rank, now, until);
    }

    /// A W in a gap that ends at a known time or not; else the rank waits.
    fn fill(&mut self, rank: usize, now: u64, until: u64) {
        let quarters = self.quarters;
        let fits = |takes: u64| until == NEVER || 4 * (until - now) >= quarters * takes;
        let [_, b, w] = self.ranks[rank].slice;
        let stage = self.head.stage;
        if w < b {
            let task = Task { kind: Compute::W, stage, micro_batch: w };
            if fits(self.takes(rank, task)) {
                return self.start(rank, now, task);
            }
        }
        if let Some((at, task)) = self.waiting_w(rank)
            && fits(self.takes(rank, task))
        {
            self.ranks[rank].done[at] = true;
            return self.start(rank, now, task);
        }
        if until != NEVER {
            self.look_at(rank, until);
        }
    }

    /// The next action of the kind's order.
    fn next_of_kind(&mut self, rank: usize) -> Option<Action> {
        let actions = &self.base.ranks[rank];
        let of = &mut self.ranks[rank];
        while of.done.get(of.next).is_some_and(|done| *done) {
            of.next += 1;
        }
        actions.get(of.next).copied()
    }

    /// The first W of the kind's order that has not run, if its B has.
    fn waiting_w(&mut self, rank: usize) -> Option<(usize, Task)> {
        let of = &mut self.ranks[rank];
        while of.w.get(of.next_w).is_some_and(|at| of.done[*at]) {
            of.next_w += 1;
        }
        let at = *of.w.get(of.next_w)?;
        let task = self.base.ranks[rank][at].computes().next()?;
        let b = self.ends[1][task.stage * self.micro_batches + task.micro_batch];
        (b != NEVER).then_some((at, task))
    }

    fn takes(&self, rank: usize, task: Task) -> u64 {
        let entry = self.base.cost_entry(rank, task.stage, task.micro_batch);
        duration(self.costs, task.kind, entry)
    }

    /// When all that a compute takes is there, if that is known.
    fn ready(&self, rank: usize, Task { kind, stage, micro_batch: i }: Task) -> u64 {
        let (stages, m) = (self.base.stages(), self.micro_batches);
        let needs = self.head.needs(rank, kind, stage).iter();
        let of_head = needs.map(|edge| self.arrival[edge * m + i]).max().unwrap_or(0);
        let end = |which: usize, cell: usize| self.ends[which][cell * m + i];
        let here = match self.head.takes_here(rank, kind, stage) {
            Some(Compute::F) => end(0, stage - 1),
            Some(_) => end(1, self.base.cell(rank, stage + 1)),
            None => 0,
        };
        let sent = |at: u64, far: bool| if far { at.saturating_add(self.costs.send) } else { at };
        let from = kind.needs(stage, stages).and_then(|message| {
            let producer = message.producer(stage, stages)?;
            let which = usize::from(kind != Compute::F);
            Some(sent(end(which, producer), self.base.source(message, stage).is_some()))
        });
        of_head.max(here).max(from.unwrap_or(0))
    }

    fn start(&mut self, rank: usize, now: u64, task: Task) {
        if task.stage == self.head.stage {
            let which = match task.kind {
                Compute::F => 0,
                Compute::B => 1,
                _ => 2,
            };
            self.ranks[rank].slice[which] += 1;
        }
        self.start_action(rank, now, task.into());
    }

    fn start_action(&mut self, rank: usize, now: u64, action: Action) {
        let takes = action.computes().map(|task| self.takes(rank, task)).sum::<u64>();
        // Nothing is done and needed at the same time.
        let end = now + takes.max(1);
        self.ranks[rank].order.push(action);
        self.ranks[rank].free = end;
        self.ranks[rank].left -= takes;
        self.makespan = self.makespan.max(end + self.ranks[rank].left);
        self.look_at(rank, end);
        for Task { kind, stage, micro_batch } in action.computes() {
            let which = match kind {
                Compute::F => 0,
                Compute::B | Compute::BW => 1,
                Compute::W | Compute::R => continue,
            };
            let cell = self.base.cell(rank, stage);
            self.ends[which][cell * self.micro_batches + micro_batch] = end;
            if let Some(message) = kind.gives(stage, self.base.stages())
                && let Some(to) = self.base.destination(message, stage)
            {
                self.look_at(to, end.saturating_add(self.costs.send));
            }
            let leaving = self.leaving[rank].iter();
            let follows = leaving.filter(|(after, _)| *after == (kind, stage));
            let mut after: Vec<usize> = follows.map(|(_, edge)| *edge).collect();
            while let Some(edge) = after.pop() {
                let at = self.may_leave(edge, micro_batch);
                if at != NEVER && self.arrival[edge * self.micro_batches + micro_batch] == NEVER {
                    self.plan(edge, micro_batch, at);
                    after.extend(&self.waiting[edge]);
                }
            }
        }
    }

    fn look_at(&mut self, rank: usize, at: u64) {
        self.agenda.push(Reverse((at, Event::Rank(rank))));
    }

    /// When a message of the head has been made, and all that it passes on is there.
    fn may_leave(&self, edge: usize, micro_batch: usize) -> u64 {
        let m = self.micro_batches;
        let of = &self.head.edges[edge];
        let made = of.after.map_or(0, |(kind, stage)| {
            let which = usize::from(kind != Compute::F);
            self.ends[which][self.base.cell(of.from, stage) * m + micro_batch]
        });
        let there = of.needs.iter().map(|before| self.arrival[before * m + micro_batch]);
        there.max().unwrap_or(0).max(made)
    }

    /// A message of the head leaves then, if its rank computes nothing.
    fn plan(&mut self, edge: usize, micro_batch: usize, at: u64) {
        let of = &self.head.edges[edge];
        let hop = self.costs.head[of.message as usize].saturating_mul(of.tensors);
        let (to, arrival) = (of.to, at.saturating_add(hop));
        self.arrival[edge * self.micro_batches + micro_batch] = arrival;
        self.agenda.push(Reverse((at, Event::Message(edge, micro_batch))));
        self.look_at(to, arrival);
    }
}

#[cfg(test)]
mod tests;
