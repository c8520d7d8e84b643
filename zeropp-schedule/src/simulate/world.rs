//! What the ranks of a run share: messages on their way, and what happens next.
//!
//! A rank passes a split head's messages on between its computes (ADR 95), so with one all happens
//! in the order of its time. Else a rank goes as far as its messages let it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::head::HeadTree;
use crate::ir::{Action, Compute, Message, Schedule, Task};
use crate::verify::is_program;

use super::Costs;

/// Not arrived yet.
pub(super) const NEVER: u64 = u64::MAX;

/// What may happen next; messages before ranks that go on at the same time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    /// A split head's message may leave: its edge and micro-batch.
    Message(usize, usize),
    /// A rank may go on.
    Rank(usize),
}

/// A split head's messages on their way.
pub(super) struct HeadWorld {
    pub(super) head: HeadTree,
    /// The messages that wait for each one.
    waiting: Vec<Vec<usize>>,
    /// The messages that come after each compute, by rank: F of the last stage and of the slice, B
    /// of the slice.
    pub(super) after: Vec<[Vec<usize>; 3]>,
    /// When each message's sender came to it; when it left.
    offered: Vec<u64>,
    pub(super) left: Vec<u64>,
}

/// Which of the computes that a split head's messages come after.
pub(super) fn after_which(head: &HeadTree, kind: Compute, stage: usize) -> Option<usize> {
    match kind {
        Compute::F if stage + 1 == head.stage => Some(0),
        Compute::F if stage == head.stage => Some(1),
        Compute::B if stage == head.stage => Some(2),
        _ => None,
    }
}

impl HeadWorld {
    fn new(head: HeadTree, schedule: &Schedule, program: bool) -> HeadWorld {
        let micro_batches = schedule.micro_batches();
        let mut after: Vec<[Vec<usize>; 3]> = vec![Default::default(); schedule.pp()];
        let mut offered = vec![NEVER; head.edges.len() * micro_batches];
        for (at, edge) in head.edges.iter().enumerate() {
            match edge.after.and_then(|(kind, stage)| after_which(&head, kind, stage)) {
                Some(which) => after[edge.from][which].push(at),
                // Without sends of its own a message that is passed on goes by itself.
                None if !program => offered[at * micro_batches..][..micro_batches].fill(0),
                None => {}
            }
        }
        let left = offered.clone();
        HeadWorld { waiting: head.waiting(), after, offered, left, head }
    }
}

/// What all ranks share.
pub(super) struct SimulationState<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) costs: &'a Costs,
    pub(super) program: bool,
    pub(super) micro_batches: usize,
    /// When each message arrives, by [`SimulationState::slot`]; behind them those of a split head.
    pub(super) arrival: Vec<u64>,
    /// When each rank's links are free; empty without a limit.
    links: Vec<Vec<u64>>,
    pub(super) head: Option<HeadWorld>,
    /// The rank that waits for each message to be on its way.
    pub(super) waits: Vec<Option<usize>>,
    /// Until when each rank computes.
    pub(super) busy: Vec<u64>,
    /// What happens next, and when.
    pub(super) agenda: BinaryHeap<Reverse<(u64, Event)>>,
    /// When all ranks know the global norm of the step before.
    pub(super) validated: u64,
}

impl<'a> SimulationState<'a> {
    pub(super) fn new(
        schedule: &'a Schedule,
        costs: &'a Costs,
        validated: u64,
    ) -> SimulationState<'a> {
        let micro_batches = schedule.micro_batches();
        let program = is_program(schedule);
        let head = HeadTree::of(schedule).map(|head| HeadWorld::new(head, schedule, program));
        let edges = head.as_ref().map_or(0, |of| of.head.edges.len());
        let slots = (2 * schedule.stages() + edges) * micro_batches;
        // More links than actions are never used.
        let links = |rank: &Vec<Action>| {
            let of_head = if program { 0 } else { edges * micro_batches };
            vec![0; costs.link.parallel_max.map_or(0, |n| n.min(rank.len() + of_head))]
        };
        SimulationState {
            schedule,
            costs,
            program,
            micro_batches,
            arrival: vec![NEVER; slots],
            waits: vec![None; slots],
            busy: vec![0; schedule.pp()],
            agenda: BinaryHeap::new(),
            links: schedule.ranks.iter().map(links).collect(),
            head,
            validated,
        }
    }

    /// The place of a message in `arrival`, by its producing stage.
    pub(super) fn slot(&self, message: Message, producer: usize, micro_batch: usize) -> usize {
        message.slot(producer, micro_batch, self.micro_batches)
    }

    /// The place of a split head's message in `arrival`.
    pub(super) fn head_slot(&self, edge: usize, micro_batch: usize) -> usize {
        (2 * self.schedule.stages() + edge) * self.micro_batches + micro_batch
    }

    /// Until when a rank that may go on at `now` goes on by itself.
    pub(super) fn horizon(&self, now: u64) -> u64 {
        if self.head.is_some() { now } else { NEVER }
    }

    /// The first of these messages that has not left; else when all are there.
    pub(super) fn arrived(&self, edges: &[usize], micro_batch: usize) -> Result<u64, usize> {
        let mut at = 0;
        for edge in edges {
            let slot = self.head_slot(*edge, micro_batch);
            match self.arrival[slot] {
                NEVER => return Err(slot),
                time => at = at.max(time),
            }
        }
        Ok(at)
    }

    /// The sender of a split head's message has come to it, between two computes.
    pub(super) fn offer(&mut self, edge: usize, micro_batch: usize, now: u64) {
        let Some(of) = &mut self.head else { return };
        of.offered[edge * self.micro_batches + micro_batch] = now;
        match self.may_leave(edge, micro_batch) {
            Some(at) if at > now => self.plan(at, edge, micro_batch),
            Some(_) => self.leave(edge, micro_batch, now),
            None => {}
        }
    }

    /// A split head's message is complete: it leaves when its rank computes nothing.
    pub(super) fn pass_on(&mut self, edge: usize, micro_batch: usize, now: u64) {
        let Some(of) = &self.head else { return };
        let busy = self.busy[of.head.edges[edge].from];
        match busy > now {
            true => self.plan(busy, edge, micro_batch),
            false => self.leave(edge, micro_batch, now),
        }
    }

    fn plan(&mut self, at: u64, edge: usize, micro_batch: usize) {
        self.agenda.push(Reverse((at, Event::Message(edge, micro_batch))));
    }

    /// When a message's sender has come to it and has all that it passes on, if that is known.
    fn may_leave(&self, edge: usize, micro_batch: usize) -> Option<u64> {
        let of = self.head.as_ref()?;
        let offered = of.offered[edge * self.micro_batches + micro_batch];
        let there = self.arrived(&of.head.edges[edge].needs, micro_batch).ok()?;
        (offered != NEVER).then_some(offered.max(there))
    }

    /// Sends a split head's message.
    fn leave(&mut self, edge: usize, micro_batch: usize, now: u64) {
        let Some(of) = &self.head else { return };
        let of_edge = &of.head.edges[edge];
        let cell = self.schedule.cost_entry(of_edge.from, of.head.stage, micro_batch);
        let sizes = self.costs.memory[cell].head;
        let bytes = sizes.message(of_edge.message, of_edge.tensors);
        let (start, arrival) = self.transfer(of_edge.from, now, bytes);
        self.arrive(self.head_slot(edge, micro_batch), arrival);
        let Some(of) = &mut self.head else { return };
        of.left[edge * self.micro_batches + micro_batch] = start;
        for next in of.waiting[edge].clone() {
            if let Some(at) = self.may_leave(next, micro_batch) {
                self.plan(at, next, micro_batch);
            }
        }
    }

    /// A message is on its way: whoever waits for it may go on when it is there.
    pub(super) fn arrive(&mut self, slot: usize, at: u64) {
        self.arrival[slot] = at;
        if let Some(rank) = self.waits[slot].take() {
            self.agenda.push(Reverse((at, Event::Rank(rank))));
        }
    }

    /// Puts bytes on a link of `rank`: the start of the transfer and the arrival.
    pub(super) fn transfer(&mut self, rank: usize, now: u64, bytes: u64) -> (u64, u64) {
        let link = &self.costs.link;
        let transfer = link.transfer_ns(bytes) as u64;
        let start = match self.links[rank].iter_mut().min() {
            Some(free) => {
                let start = now.max(*free);
                *free = start + transfer;
                start
            }
            None => now,
        };
        (start, start + transfer + link.latency_ns)
    }

    /// The slot of what a consumer takes from another rank.
    pub(super) fn incoming(
        &self,
        message: Message,
        stage: usize,
        micro_batch: usize,
    ) -> Option<usize> {
        self.schedule.source(message, stage)?;
        let producer = message.producer(stage, self.schedule.stages())?;
        Some(self.slot(message, producer, micro_batch))
    }

    pub(super) fn duration(&self, rank: usize, action: &Action) -> u64 {
        if let (Action::Overlap { .. }, Some(ns)) = (action, self.costs.overlap_ns) {
            return ns;
        }
        let one = |Task { kind, stage, micro_batch }: Task| {
            self.costs.stages[self.schedule.cost_entry(rank, stage, micro_batch)].of(kind)
        };
        action.computes().map(one).sum()
    }
}
