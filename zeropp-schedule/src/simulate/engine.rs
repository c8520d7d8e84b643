//! The run itself: every rank goes as far as its messages let it, then waits for a peer.

use std::cmp::Reverse;
use std::collections::{HashSet, VecDeque};

use crate::head::End;
use crate::ir::{self, Action, Compute, Message, Schedule, Task};
use crate::memory::{Ledger, MemoryBytes};
use crate::timeline::{MemoryPoint, RankTimeline, Span, Timeline};

use super::copies::{CopyQueue, Way};
use super::world::{Event, NEVER, SimulationState, after_which};
use super::{Costs, StageCosts, StateCopies};

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
    let rank = |r| {
        let mut rank = SimulatedRank::new(schedule, costs, r, follow).starting(begin.free[r]);
        // A device has read the first stage's ahead.
        match costs.copies_apart {
            true => rank.updating = rank.to_update.pop_front().map(|first| (first, begin.free[r])),
            false => rank.update_next(schedule, costs, begin.free[r]),
        }
        rank
    };
    let mut ranks: Vec<SimulatedRank> = (0..schedule.pp()).map(rank).collect();
    world.agenda.extend((0..ranks.len()).map(|r| Reverse((begin.free[r], Event::Rank(r)))));
    while let Some(Reverse((now, event))) = world.agenda.pop() {
        match event {
            Event::Message(edge, micro_batch) => world.pass_on(edge, micro_batch, now),
            Event::Rank(rank) => match ranks[rank].advance(&mut world, now) {
                Some(Pause::Until(at)) => world.agenda.push(Reverse((at, Event::Rank(rank)))),
                Some(Pause::For(slot)) => world.waits[slot] = Some(rank),
                None => {}
            },
        }
    }
    let own: Vec<u64> = ranks.iter().map(SimulatedRank::at_step).collect();
    let meet = own.iter().copied().max().unwrap_or(0);
    let late = schedule.validates_late();
    let at_step: Vec<u64> = own.into_iter().map(|own| if late { own } else { meet }).collect();
    let ends = ranks.iter().zip(&at_step).map(|(rank, at)| rank.step_end(costs, *at));
    let free = ends.collect();
    let ranks = ranks.into_iter().zip(&at_step).map(|(rank, at)| rank.finish(&world, *at));
    let title = format!("{}, simulated", schedule.kind);
    let timeline = Timeline {
        title,
        placement: placement(schedule),
        ranks: ranks.collect(),
        ..Timeline::default()
    };
    (timeline, StepCarry { free, validated: meet })
}

/// The rank of each stage; of a split head, the one that has the stage before it.
fn placement(schedule: &Schedule) -> Vec<usize> {
    let placement = schedule.placement.iter();
    let head = schedule.wide_stage().and(schedule.placement.last());
    placement.chain(head).copied().collect()
}

/// Why a rank does not go on.
enum Pause {
    /// Until this time.
    Until(u64),
    /// Until a message is on its way: its slot.
    For(usize),
}

/// Computes that run layer by layer, and the reductions between them.
struct LayerRun {
    stage: usize,
    /// Of those that are still to be told, as if each had run by itself: when they end.
    ends: VecDeque<u64>,
    /// When the rank goes on.
    end: u64,
    /// When the reduction before is done.
    before: u64,
    /// The reduction, and the sum over the replicas.
    reduce: (u64, u64),
    sum: Option<(u64, u64)>,
}

/// One rank on its way.
struct SimulatedRank<'a> {
    rank: usize,
    program: &'a [Action],
    /// Actions until the last backward is done.
    backwards_end: usize,
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
    /// The last stage to be reduced, and when its layers are, in their order.
    layers: (usize, Vec<u64>),
    /// What runs layer by layer, from its first compute to its reduction and sum.
    run: Option<LayerRun>,
    copies: CopyQueue,
    /// Stages of which a reduced gradient is out.
    summed: HashSet<usize>,
    /// The stages of which what an update beside the step keeps has not begun to come in, in their
    /// order.
    to_update: VecDeque<usize>,
    first_update: Option<usize>,
    /// The one whose has begun last, and when it is there, or, from a file, updated.
    updating: Option<(usize, u64)>,
    /// When what went out last of such an update is out.
    gone: u64,
    /// When what the first update of the next step takes is there, where that is read ahead.
    read: u64,
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
        let mut to_update = VecDeque::new();
        if !costs.states.is_empty() {
            let gathered = ir::gathered(program, stages);
            // On a device nothing is asked of stages that keep nothing.
            let takes = |stage| costs.states[schedule.cost_entry(rank, stage, 0)].update_ns;
            let is_one =
                |stage: &usize| gathered[*stage] && (!costs.copies_apart || takes(*stage) > 0);
            to_update = (0..stages).filter(is_one).collect();
        }
        SimulatedRank {
            rank,
            program,
            backwards_end: ir::backwards_end(program),
            ledger: follow.then(|| Ledger::of(schedule, rank, &costs.memory)),
            spans: Vec::with_capacity(program.len()),
            memory: Vec::new(),
            clock: 0,
            zero3_free: 0,
            replica_free: 0,
            reduced: 0,
            stages: vec![(0, 0); stages],
            layers: (0, Vec::new()),
            run: None,
            copies: CopyQueue::new(schedule, costs, rank),
            summed: HashSet::new(),
            first_update: to_update.front().copied(),
            to_update,
            updating: None,
            gone: 0,
            read: 0,
        }
    }

    /// The same, which has something to do until `free`.
    fn starting(self, free: u64) -> SimulatedRank<'a> {
        SimulatedRank { clock: free, zero3_free: free, replica_free: free, reduced: free, ..self }
    }

    /// Runs until the end, until a message is missing, or as far as others cannot change it.
    fn advance(&mut self, world: &mut SimulationState, now: u64) -> Option<Pause> {
        let horizon = world.horizon(now);
        while let Some(action) = self.program.get(self.spans.len()) {
            if self.clock > horizon {
                return Some(Pause::Until(self.clock));
            }
            let (start, end) = match *action {
                Action::Compute { .. } | Action::Overlap { .. } => {
                    match self.compute(world, action, horizon) {
                        Ok(times) => times,
                        Err(pause) => return Some(pause),
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
                Action::AllGather { stage } => self.gather(world, stage),
                Action::ReduceScatter { stage } => self.reduce(world, stage),
                Action::ReplicaReduce { stage } => self.sum(world, stage),
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
            if self.spans.len() == self.backwards_end {
                self.read_ahead(world);
            }
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
        horizon: u64,
    ) -> Result<(u64, u64), Pause> {
        let stages = world.schedule.stages();
        let mut start = self.clock;
        for Task { kind, stage, micro_batch } in action.computes() {
            if kind.needs_weights() {
                start = start.max(self.stages[stage].0);
            }
            if matches!(kind, Compute::W | Compute::BW) {
                start = start.max(self.gone);
            }
            start = start.max(self.copies.end((stage, micro_batch)));
            if let Some(of) = &world.head {
                let needs = of.head.needs(self.rank, kind, stage);
                start = start.max(world.arrived(needs, micro_batch).map_err(Pause::For)?);
            }
            let message = kind.needs(stage, stages);
            if let Some(slot) = message.and_then(|m| world.incoming(m, stage, micro_batch)) {
                match world.arrival[slot] {
                    NEVER => return Err(Pause::For(slot)),
                    at => start = start.max(at),
                }
            }
        }
        if start > horizon {
            return Err(Pause::Until(start));
        }
        if self.run.is_none()
            && let Some(run) = ir::LayerRun::at(self.program, self.spans.len())
            && (!run.backward || self.has_layers(world, run.stage))
        {
            self.run_layers(world, &run, start);
        }
        let next = self.run.as_mut().and_then(|run| Some((run.ends.pop_front()?, run.end)));
        let end = next.map_or_else(|| start + world.duration(self.rank, action), |next| next.0);
        self.clock = match &self.run {
            Some(run) if run.ends.is_empty() => run.end,
            _ => end,
        };
        world.busy[self.rank] = self.clock;
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

    /// Queues a gather. An F that waits for each layer as it comes to it is told as one that waits
    /// before it begins, for as long.
    fn gather(&mut self, world: &SimulationState, stage: usize) -> (u64, u64) {
        let entry = world.schedule.cost_entry(self.rank, stage, 0);
        let read = self.read_shard(world, world.costs.states.get(entry), stage);
        let takes = world.costs.stages[entry].all_gather_ns;
        let (start, end) = self.zero3(read, takes);
        let cell = world.schedule.cell(self.rank, stage);
        let has_layers = takes > 0 && self.has_layers(world, stage);
        let first = has_layers.then(|| ir::first_forward(self.program, self.spans.len()));
        self.stages[stage].0 = match first.flatten() {
            Some(micro_batch) => {
                let entry = world.schedule.cost_entry(self.rank, stage, micro_batch);
                start + world.costs.layers_ahead(cell, world.costs.stages[entry].f_ns, takes)
            }
            None => end,
        };
        (start, end)
    }

    /// Whether F and backwards of the stage may go layer by layer.
    fn has_layers(&self, world: &SimulationState, stage: usize) -> bool {
        let layers = world.costs.layers_of(world.schedule.cell(self.rank, stage));
        layers > 1 && world.head.is_none()
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
        world.arrive(slot, arrival);
        (start, arrival)
    }

    /// Queues a reduction, whose result is added to one that is out when the rank retires it, or,
    /// on a device, at once.
    fn reduce(&mut self, world: &SimulationState, stage: usize) -> (u64, u64) {
        if let Some(run) = &self.run {
            let times = run.reduce;
            self.clock = self.clock.max(run.before);
            self.run.take_if(|run| run.sum.is_none());
            return times;
        }
        self.clock = self.clock.max(self.reduced);
        let cell = world.schedule.cell(self.rank, stage);
        let layers = world.costs.layers_of(cell);
        self.layers = (stage, vec![0; layers]);
        let start = self.clock.max(self.zero3_free);
        for layer in (0..layers).rev() {
            self.reduce_layer(world, stage, layer);
        }
        self.reduced_whole(world, stage);
        (start, self.zero3_free)
    }

    /// Queues a layer's reduction.
    fn reduce_layer(&mut self, world: &SimulationState, stage: usize, layer: usize) {
        let entry = world.schedule.cost_entry(self.rank, stage, 0);
        let takes = world.costs.stages[entry].reduce_scatter_ns;
        let cell = world.schedule.cell(self.rank, stage);
        let takes = world.costs.reduction_of_layer(cell, layer, takes);
        self.layers.1[layer] = self.zero3(self.clock, takes).1;
    }

    /// The last layer's reduction of a stage is queued.
    fn reduced_whole(&mut self, world: &SimulationState, stage: usize) {
        let end = self.zero3_free;
        let beside = world.costs.copies_apart;
        self.reduced = if beside { self.add(world, stage, end) } else { end };
        self.stages[stage].1 = self.reduced;
    }

    /// Queues the sum of a layer over the replicas, which begins at `now` at the earliest.
    fn sum_layer(&mut self, world: &SimulationState, stage: usize, layer: usize, now: u64) -> u64 {
        let entry = world.schedule.cost_entry(self.rank, stage, 0);
        let takes = world.costs.stages[entry].replica_reduce_ns;
        let cell = world.schedule.cell(self.rank, stage);
        let start = self.replica_free.max(now);
        self.replica_free = start + world.costs.reduction_of_layer(cell, layer, takes);
        start
    }

    /// Queues the sum of a stage over the replicas, layer by layer as they are reduced.
    fn sum(&mut self, world: &SimulationState, stage: usize) -> (u64, u64) {
        if let Some(times) = self.run.take_if(|run| run.stage == stage).and_then(|run| run.sum) {
            return times;
        }
        let mut first = None;
        for layer in (0..world.costs.layers_of(world.schedule.cell(self.rank, stage))).rev() {
            let is_last = self.layers.0 == stage;
            let reduced = if is_last { self.layers.1[layer] } else { self.stages[stage].1 };
            let start = self.sum_layer(world, stage, layer, self.clock.max(reduced));
            first.get_or_insert(start);
        }
        (first.unwrap_or(self.clock), self.replica_free)
    }

    /// Runs computes layer by layer, the last layer first; a layer has of a backward what it has of
    /// its W. Where a sum over the replicas follows, that of a layer begins when it is reduced.
    fn run_layers(&mut self, world: &SimulationState, run: &ir::LayerRun, begin: u64) {
        let ir::LayerRun { stage, sums, .. } = *run;
        let before = self.reduced;
        self.clock = begin;
        let cell = world.schedule.cell(self.rank, stage);
        let tasks = run.computes(self.program, self.spans.len());
        let takes: Vec<u64> = tasks.map(|task| world.duration(self.rank, task)).collect();
        let layers = world.costs.layers_of(cell);
        self.layers = (stage, vec![0; layers]);
        for layer in (0..layers).rev() {
            let of_layer = |ns: &u64| world.costs.w_of_layer(cell, layer, *ns);
            self.clock += takes.iter().map(of_layer).sum::<u64>();
            self.reduce_layer(world, stage, layer);
            if sums {
                self.sum_layer(world, stage, layer, self.layers.1[layer]);
            }
        }
        let end = self.clock;
        self.reduced_whole(world, stage);
        // Layers may wait between: told is how long they take, up to the last one's end.
        let entry = world.schedule.cost_entry(self.rank, stage, 0);
        let StageCosts { reduce_scatter_ns, replica_reduce_ns, .. } = world.costs.stages[entry];
        let reduce = (self.zero3_free - reduce_scatter_ns, self.zero3_free);
        let sum = sums.then(|| (self.replica_free - replica_reduce_ns, self.replica_free));
        let ends = takes.iter().scan(begin, |at, ns| {
            *at += ns;
            Some(*at)
        });
        self.run = Some(LayerRun { stage, ends: ends.collect(), end, before, reduce, sum });
        self.clock = begin;
    }

    /// Reads a shard that is out, once it is updated: when it is here.
    fn read_shard(
        &mut self,
        world: &SimulationState,
        states: Option<&StateCopies>,
        stage: usize,
    ) -> u64 {
        let Some(StateCopies { read_ns, waits, .. }) = states.copied() else { return self.clock };
        let mut end = self.clock;
        if let Some((_, ready)) = self.updating.take_if(|(updating, _)| *updating == stage) {
            end = self.update(world.schedule, world.costs, stage, ready);
        }
        if read_ns > 0 {
            end = self.copies.pass(Way::In, end, read_ns).1;
        }
        if waits {
            self.clock = end;
        }
        end
    }

    /// The update of a stage that is gathered for the first time, of which what is kept is `ready`
    /// by then: when it is done. That of the next stage begins.
    fn update(&mut self, schedule: &Schedule, costs: &Costs, stage: usize, ready: u64) -> u64 {
        if !costs.copies_apart {
            self.update_next(schedule, costs, self.clock);
            return self.clock.max(ready);
        }
        // What comes in takes the memory of what has gone out, and this goes out once it is
        // updated.
        let start = self.clock.max(self.gone);
        self.update_next(schedule, costs, start);
        let end = start.max(ready);
        let takes = costs.states[schedule.cost_entry(self.rank, stage, 0)].update_ns;
        self.gone = self.copies.pass(Way::Out, end, takes).1;
        end
    }

    /// On a device copies what the first update of the next step takes, beside the last W.
    fn read_ahead(&mut self, world: &SimulationState) {
        if !world.costs.copies_apart {
            return;
        }
        self.to_update.clear();
        self.to_update.extend(self.first_update);
        self.update_next(world.schedule, world.costs, self.clock);
        self.read = self.updating.take().map_or(0, |(_, ready)| ready);
    }

    /// Begins at `now` to copy what the update of the next stage takes; a file's is copied out
    /// beside that, piece by piece.
    fn update_next(&mut self, schedule: &Schedule, costs: &Costs, now: u64) {
        let Some(stage) = self.to_update.pop_front() else { return };
        let takes = costs.states.get(schedule.cost_entry(self.rank, stage, 0));
        let takes = takes.map_or(0, |states| states.update_ns);
        let mut ready = now;
        if takes > 0 {
            ready = self.copies.pass(Way::In, now, takes).1;
            if !costs.copies_apart {
                ready = ready.max(self.copies.pass(Way::Out, now, takes).1);
            }
        }
        self.updating = Some((stage, ready));
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

    /// When the optimizer's step ends that begins `at_step`, and what the first update takes is
    /// there.
    fn step_end(&self, costs: &Costs, at_step: u64) -> u64 {
        self.read.max(at_step + costs.step_ns)
    }

    /// Fills in what was not known on the way; the optimizer's step begins `at_step`.
    fn finish(mut self, world: &SimulationState, at_step: u64) -> RankTimeline {
        let end = self.step_end(world.costs, at_step);
        for span in &mut self.spans {
            match span.action {
                Action::Recv { message, stage, micro_batch } => {
                    if let Some(slot) = world.incoming(message, stage, micro_batch) {
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
                    (span.start_ns, span.end_ns) = (at_step, end);
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
