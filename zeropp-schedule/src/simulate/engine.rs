//! The run itself: every rank goes as far as its messages let it, then waits for a peer.

use std::collections::HashSet;

use crate::head::{End, HeadTree};
use crate::ir::{Action, Compute, Message, Schedule, Task};
use crate::memory::{Ledger, MemoryBytes};
use crate::timeline::{MemoryPoint, RankTimeline, Span, Timeline};
use crate::verify::is_program;

use super::copies::{CopyQueue, Way};
use super::{Costs, StateCopies};

/// Not arrived yet.
const NEVER: u64 = u64::MAX;

/// What a step leaves to the next one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StepCarry {
    /// When each rank has done the step before.
    pub(super) free: Vec<u64>,
    /// When all ranks know whether that was right.
    pub(super) validated: u64,
}

impl StepCarry {
    /// Nothing was done before.
    pub(super) fn first(schedule: &Schedule) -> StepCarry {
        StepCarry { free: vec![0; schedule.pp()], validated: 0 }
    }

    /// The same on a clock that starts with the first rank that is free, and how late that is.
    pub(super) fn rebased(self) -> (StepCarry, u64) {
        let base = self.free.iter().copied().min().unwrap_or(0);
        let free = self.free.iter().map(|at| at - base).collect();
        (StepCarry { free, validated: self.validated.saturating_sub(base) }, base)
    }
}

/// Runs a step of a schedule that was verified, with costs that were checked; and follows its
/// memory. What it leaves comes with it.
pub(super) fn run(
    schedule: &Schedule,
    costs: &Costs,
    follow: bool,
    begin: &StepCarry,
) -> (Timeline, StepCarry) {
    let mut world = SimulationState::new(schedule, costs, begin.validated);
    let rank = |r| SimulatedRank::new(schedule, costs, r, follow).starting(begin.free[r]);
    let mut ranks: Vec<SimulatedRank> = (0..schedule.pp()).map(rank).collect();
    let mut waiting: Vec<Vec<(usize, usize)>> = vec![Vec::new(); ranks.len()];
    let mut ready: Vec<usize> = (0..ranks.len()).rev().collect();
    while let Some(rank) = ready.pop() {
        if let Some((slot, from)) = ranks[rank].advance(&mut world) {
            waiting[from].push((slot, rank));
        }
        // Others may have passed on what this one has sent.
        let passed_on = std::mem::take(&mut world.passed_on);
        for from in [rank].into_iter().chain(passed_on) {
            waiting[from].retain(|(slot, waiter)| {
                let waits = world.arrival[*slot] == NEVER;
                if !waits {
                    ready.push(*waiter);
                }
                waits
            });
        }
    }
    let own: Vec<u64> = ranks.iter().map(SimulatedRank::at_step).collect();
    let meet = own.iter().copied().max().unwrap_or(0);
    let late = schedule.validates_late();
    let at_step: Vec<u64> = own.into_iter().map(|own| if late { own } else { meet }).collect();
    let ranks = ranks.into_iter().zip(&at_step).map(|(rank, at)| rank.finish(&world, *at));
    let title = format!("{}, simulated", schedule.kind);
    let timeline = Timeline {
        title,
        placement: placement(schedule),
        ranks: ranks.collect(),
        ..Timeline::default()
    };
    let free = at_step.into_iter().map(|at| at + costs.step_ns).collect();
    (timeline, StepCarry { free, validated: meet })
}

/// The rank of each stage; of a split head, the one that has the stage before it.
fn placement(schedule: &Schedule) -> Vec<usize> {
    let placement = schedule.placement.iter();
    let head = schedule.wide_stage().and(schedule.placement.last());
    placement.chain(head).copied().collect()
}

/// A split head's messages on their way.
struct HeadWorld {
    head: HeadTree,
    /// The messages that wait for each one.
    waiting: Vec<Vec<usize>>,
    /// The messages that come after each compute, by rank: F of the last stage and of the slice, B
    /// of the slice.
    after: Vec<[Vec<usize>; 3]>,
    /// When each message's sender came to it; when it left.
    offered: Vec<u64>,
    left: Vec<u64>,
}

/// Which of the computes that a split head's messages come after.
fn after_which(head: &HeadTree, kind: Compute, stage: usize) -> Option<usize> {
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
struct SimulationState<'a> {
    schedule: &'a Schedule,
    costs: &'a Costs,
    program: bool,
    micro_batches: usize,
    /// When each message arrives, by [`SimulationState::slot`]; behind them those of a split head.
    arrival: Vec<u64>,
    /// When each rank's links are free; empty without a limit.
    links: Vec<Vec<u64>>,
    head: Option<HeadWorld>,
    /// Ranks whose messages went when others' arrived.
    passed_on: Vec<usize>,
    /// When all ranks know the global norm of the step before.
    validated: u64,
}

impl<'a> SimulationState<'a> {
    fn new(schedule: &'a Schedule, costs: &'a Costs, validated: u64) -> SimulationState<'a> {
        let micro_batches = schedule.micro_batches();
        let program = is_program(schedule);
        let head = HeadTree::of(schedule).map(|head| HeadWorld::new(head, schedule, program));
        let edges = head.as_ref().map_or(0, |of| of.head.edges.len());
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
            arrival: vec![NEVER; (2 * schedule.stages() + edges) * micro_batches],
            links: schedule.ranks.iter().map(links).collect(),
            head,
            passed_on: Vec::new(),
            validated,
        }
    }

    /// The place of a message in `arrival`, by its producing stage.
    fn slot(&self, message: Message, producer: usize, micro_batch: usize) -> usize {
        let stage = 2 * producer + usize::from(message == Message::Gradient);
        stage * self.micro_batches + micro_batch
    }

    /// The place of a split head's message in `arrival`.
    fn head_slot(&self, edge: usize, micro_batch: usize) -> usize {
        (2 * self.schedule.stages() + edge) * self.micro_batches + micro_batch
    }

    /// The first of these messages that has not arrived, and its sender; else when all have.
    fn arrived(&self, edges: &[usize], micro_batch: usize) -> Result<u64, (usize, usize)> {
        let mut at = 0;
        for edge in edges {
            let slot = self.head_slot(*edge, micro_batch);
            match self.arrival[slot] {
                NEVER => {
                    let head = &self.head.as_ref().expect("it has edges").head;
                    return Err((slot, head.edges[*edge].from));
                }
                time => at = at.max(time),
            }
        }
        Ok(at)
    }

    /// The sender of a split head's message has come to it.
    fn offer(&mut self, edge: usize, micro_batch: usize, now: u64) {
        if let Some(of) = &mut self.head {
            of.offered[edge * self.micro_batches + micro_batch] = now;
        }
        self.try_head(edge, micro_batch);
    }

    /// Sends a split head's message if its sender has come to it and has what it passes on.
    fn try_head(&mut self, edge: usize, micro_batch: usize) {
        let Some(of) = &self.head else { return };
        let at = edge * self.micro_batches + micro_batch;
        let slot = self.head_slot(edge, micro_batch);
        let of_edge = &of.head.edges[edge];
        let Ok(there) = self.arrived(&of_edge.needs, micro_batch) else { return };
        if of.offered[at] == NEVER || self.arrival[slot] != NEVER {
            return;
        }
        let sizes = self.costs.memory[self.schedule.cell(of_edge.from, of.head.stage)].head;
        let bytes = sizes.message(of_edge.message, of_edge.tensors);
        let (from, now) = (of_edge.from, of.offered[at].max(there));
        let waiting = of.waiting[edge].clone();
        let (start, arrival) = self.transfer(from, now, bytes);
        self.arrival[slot] = arrival;
        self.passed_on.push(from);
        if let Some(of) = &mut self.head {
            of.left[at] = start;
        }
        waiting.into_iter().for_each(|next| self.try_head(next, micro_batch));
    }

    /// Puts bytes on a link of `rank`: the start of the transfer and the arrival.
    fn transfer(&mut self, rank: usize, now: u64, bytes: u64) -> (u64, u64) {
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

    /// The slot and the sending rank of what a consumer takes from another rank.
    fn incoming(
        &self,
        message: Message,
        stage: usize,
        micro_batch: usize,
    ) -> Option<(usize, usize)> {
        let from = self.schedule.source(message, stage)?;
        let producer = message.producer(stage, self.schedule.stages())?;
        Some((self.slot(message, producer, micro_batch), from))
    }

    fn duration(&self, rank: usize, action: &Action) -> u64 {
        if let (Action::Overlap { .. }, Some(ns)) = (action, self.costs.overlap_ns) {
            return ns;
        }
        let one = |Task { kind, stage, micro_batch }: Task| {
            self.costs.stages[self.schedule.cost_entry(rank, stage, micro_batch)].of(kind)
        };
        action.computes().map(one).sum()
    }
}

/// One rank on its way.
struct SimulatedRank<'a> {
    rank: usize,
    program: &'a [Action],
    /// What is held, where that is followed.
    ledger: Option<Ledger<'a>>,
    spans: Vec<Span>,
    memory: Vec<MemoryPoint>,
    /// When the compute thread is free.
    clock: u64,
    /// When the queue of the ZeRO-3 group is empty.
    zero3_free: u64,
    /// When the queue of the replica group is empty.
    replica_free: u64,
    /// When the last RS is done.
    reduced: u64,
    /// Per stage, when its weights are there and when its gradient is reduced.
    stages: Vec<(u64, u64)>,
    copies: CopyQueue,
    /// Stages of which a reduced gradient is out.
    summed: HashSet<usize>,
}

impl<'a> SimulatedRank<'a> {
    fn new(
        schedule: &'a Schedule,
        costs: &'a Costs,
        rank: usize,
        follow: bool,
    ) -> SimulatedRank<'a> {
        let program = &schedule.ranks[rank];
        let stages = schedule.stages() + usize::from(schedule.wide_stage().is_some());
        SimulatedRank {
            rank,
            program,
            ledger: follow.then(|| Ledger::of(schedule, rank, &costs.memory)),
            spans: Vec::with_capacity(program.len()),
            memory: Vec::new(),
            clock: 0,
            zero3_free: 0,
            replica_free: 0,
            reduced: 0,
            stages: vec![(0, 0); stages],
            copies: CopyQueue::new(schedule, costs, rank),
            summed: HashSet::new(),
        }
    }

    /// The same, which has something to do until `free`.
    fn starting(self, free: u64) -> SimulatedRank<'a> {
        SimulatedRank { clock: free, zero3_free: free, replica_free: free, reduced: free, ..self }
    }

    /// Runs until the end, or until a message is missing: then its slot and its sender.
    fn advance(&mut self, world: &mut SimulationState) -> Option<(usize, usize)> {
        while let Some(action) = self.program.get(self.spans.len()) {
            let (start, end) = match *action {
                Action::Compute { .. } | Action::Overlap { .. } => {
                    match self.compute(world, action) {
                        Ok(times) => times,
                        Err(wait) => return Some(wait),
                    }
                }
                Action::Send { message, stage, micro_batch } => {
                    self.send(world, message, stage, micro_batch)
                }
                Action::SendHead { .. } => {
                    let head = world.head.as_ref().map(|of| &of.head);
                    let end = head.and_then(|head| head.end(self.rank, action));
                    if let Some(Ok(End { edge, micro_batch, .. })) = end {
                        world.offer(edge, micro_batch, self.clock);
                    }
                    (self.clock, self.clock)
                }
                Action::AllGather { stage } => {
                    let cell = world.schedule.cost_entry(self.rank, stage, 0);
                    let read = self.read_shard(world.costs.states.get(cell));
                    let end = self.zero3(read, world.costs.stages[cell].all_gather_ns);
                    self.stages[stage].0 = end.1;
                    end
                }
                Action::ReduceScatter { stage } => self.reduce(world, stage),
                Action::ReplicaReduce { stage } => {
                    let start = self.clock.max(self.replica_free).max(self.stages[stage].1);
                    let cell = world.schedule.cost_entry(self.rank, stage, 0);
                    self.replica_free = start + world.costs.stages[cell].replica_reduce_ns;
                    (start, self.replica_free)
                }
                Action::Retire { stage } => {
                    let (start, end) = self.wait_until(self.stages[stage].1);
                    if !world.costs.copies_apart {
                        self.clock = self.add(world, stage, end);
                    }
                    (start, self.clock)
                }
                Action::Out { stage, micro_batch } | Action::In { stage, micro_batch } => {
                    self.copies.start((stage, micro_batch), self.clock)
                }
                Action::Gone { stage, micro_batch } => {
                    self.wait_until(self.copies.end((stage, micro_batch)))
                }
                Action::Validate => self.wait_until(world.validated),
                // A receive's end and the optimizer step's times are filled in at the end.
                Action::Free { .. }
                | Action::Recv { .. }
                | Action::RecvHead { .. }
                | Action::OptimizerStep => (self.clock, self.clock),
            };
            self.spans.push(Span {
                lane: action.lane(),
                action: *action,
                start_ns: start,
                end_ns: end,
            });
        }
        None
    }

    /// Waits until then, if that is not past: from when to when.
    fn wait_until(&mut self, until: u64) -> (u64, u64) {
        let start = self.clock;
        self.clock = start.max(until);
        (start, self.clock)
    }

    /// A compute action, once its messages have arrived and its weights are there.
    fn compute(
        &mut self,
        world: &mut SimulationState,
        action: &Action,
    ) -> Result<(u64, u64), (usize, usize)> {
        let stages = world.schedule.stages();
        let mut start = self.clock;
        for Task { kind, stage, micro_batch } in action.computes() {
            if kind.needs_weights() {
                start = start.max(self.stages[stage].0);
            }
            start = start.max(self.copies.end((stage, micro_batch)));
            if let Some(of) = &world.head {
                let needs = of.head.needs(self.rank, kind, stage);
                start = start.max(world.arrived(needs, micro_batch)?);
            }
            let message = kind.needs(stage, stages);
            if let Some((slot, from)) = message.and_then(|m| world.incoming(m, stage, micro_batch))
            {
                match world.arrival[slot] {
                    NEVER => return Err((slot, from)),
                    at => start = start.max(at),
                }
            }
        }
        let end = start + world.duration(self.rank, action);
        self.clock = end;
        self.account(action, start, end);
        if !world.program {
            for Task { kind, stage, micro_batch } in action.computes() {
                let of_head = world.head.as_ref().and_then(|of| {
                    Some(of.after[self.rank][after_which(&of.head, kind, stage)?].clone())
                });
                for edge in of_head.unwrap_or_default() {
                    world.offer(edge, micro_batch, end);
                }
                if let Some(message) = kind.gives(stage, stages)
                    && world.schedule.destination(message, stage).is_some()
                {
                    self.send(world, message, stage, micro_batch);
                }
            }
        }
        Ok((start, end))
    }

    /// Sends now: the start of the transfer and the arrival.
    fn send(
        &mut self,
        world: &mut SimulationState,
        message: Message,
        stage: usize,
        micro_batch: usize,
    ) -> (u64, u64) {
        // A message has the size of the activation that crosses the same boundary.
        let boundary = if message == Message::Activation { stage } else { stage - 1 };
        let entry = world.schedule.cost_entry(self.rank, boundary, micro_batch);
        let bytes = world.costs.memory[entry].message;
        let (start, arrival) = world.transfer(self.rank, self.clock, bytes);
        let slot = world.slot(message, stage, micro_batch);
        world.arrival[slot] = arrival;
        (start, arrival)
    }

    /// Queues a reduction, whose result is added to one that is out when the rank retires it, or,
    /// on a device, at once.
    fn reduce(&mut self, world: &SimulationState, stage: usize) -> (u64, u64) {
        self.clock = self.clock.max(self.reduced);
        let cell = world.schedule.cost_entry(self.rank, stage, 0);
        let times = self.zero3(self.clock, world.costs.stages[cell].reduce_scatter_ns);
        let beside = world.costs.copies_apart;
        self.reduced = if beside { self.add(world, stage, times.1) } else { times.1 };
        self.stages[stage].1 = self.reduced;
        times
    }

    /// Reads a shard that is out: when it is here.
    fn read_shard(&mut self, states: Option<&StateCopies>) -> u64 {
        let Some(StateCopies { read_ns, waits, .. }) = states.copied() else { return self.clock };
        let (_, end) = self.copies.pass(Way::In, self.clock, read_ns);
        if waits {
            self.clock = end;
        }
        end
    }

    /// Adds a gradient that is reduced at `now` to the one that is out, piece by piece: when that
    /// is done.
    fn add(&mut self, world: &SimulationState, stage: usize, now: u64) -> u64 {
        let cell = world.schedule.cost_entry(self.rank, stage, 0);
        let takes = world.costs.states.get(cell).map_or(0, |states| states.add_ns);
        if takes == 0 {
            return now;
        }
        let is_first = self.summed.insert(stage);
        let read = if is_first { now } else { self.copies.pass(Way::In, now, takes).1 };
        self.copies.pass(Way::Out, now, takes).1.max(read)
    }

    /// Queues an operation of the ZeRO-3 group that can begin at `now`.
    fn zero3(&mut self, now: u64, duration: u64) -> (u64, u64) {
        let start = now.max(self.zero3_free);
        self.zero3_free = start + duration;
        (start, self.zero3_free)
    }

    /// Follows the activations of a compute action.
    fn account(&mut self, action: &Action, start: u64, end: u64) {
        let Some(ledger) = &mut self.ledger else { return };
        action.computes().for_each(|c| ledger.start(c));
        let at_start = ledger.now();
        action.computes().for_each(|c| ledger.end(c));
        let at_end = ledger.now();
        self.mark(start, at_start);
        self.mark(end, at_end);
    }

    fn mark(&mut self, at_ns: u64, now: MemoryBytes) {
        let bytes = now.activation + now.weight_stash;
        match self.memory.last_mut() {
            Some(last) if last.bytes == bytes => {}
            Some(last) if last.at_ns == at_ns => last.bytes = bytes,
            None if bytes == 0 => {}
            _ => self.memory.push(MemoryPoint { at_ns, bytes }),
        }
    }

    /// When this rank is ready for the optimizer step.
    fn at_step(&self) -> u64 {
        self.clock.max(self.reduced).max(self.replica_free)
    }

    /// Fills in what was not known on the way; the optimizer's step begins `at_step`.
    fn finish(mut self, world: &SimulationState, at_step: u64) -> RankTimeline {
        for span in &mut self.spans {
            match span.action {
                Action::Recv { message, stage, micro_batch } => {
                    if let Some((slot, _)) = world.incoming(message, stage, micro_batch) {
                        span.end_ns = span.start_ns.max(world.arrival[slot]);
                    }
                }
                Action::SendHead { .. } | Action::RecvHead { .. } => {
                    let Some(of) = &world.head else { continue };
                    if let Some(Ok(end)) = of.head.end(self.rank, &span.action) {
                        let End { edge, is_send, micro_batch } = end;
                        let arrival = world.arrival[world.head_slot(edge, micro_batch)];
                        if is_send && arrival != NEVER {
                            span.start_ns = of.left[edge * world.micro_batches + micro_batch];
                        }
                        let there = if arrival == NEVER { 0 } else { arrival };
                        span.end_ns = span.start_ns.max(there);
                    }
                }
                Action::OptimizerStep => {
                    (span.start_ns, span.end_ns) = (at_step, at_step + world.costs.step_ns);
                }
                Action::Compute { .. }
                | Action::Overlap { .. }
                | Action::Send { .. }
                | Action::AllGather { .. }
                | Action::Free { .. }
                | Action::ReduceScatter { .. }
                | Action::ReplicaReduce { .. }
                | Action::Retire { .. }
                | Action::Out { .. }
                | Action::Gone { .. }
                | Action::In { .. }
                | Action::Validate => {}
            }
        }
        RankTimeline {
            name: format!("pp {}", self.rank),
            pp: self.rank,
            group: 0,
            spans: self.spans,
            memory: self.memory,
            saves: Vec::new(),
        }
    }
}
