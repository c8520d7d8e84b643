//! A worker without computation: the executor, the engine and the program are real, but F, B, W
//! and R only take the time that is given for them, and messages and collectives arrive when links
//! of the given latency and bandwidth would deliver them.
//!
//! Every operation between ranks really takes place, with a few numbers instead of weights: the
//! time at which each rank came to it. Its result counts as there once the given time has passed
//! since the last one came. The rules are those of [`simulate`](crate::simulate): what a measured
//! run takes longer than a simulated one is the runtime's own cost, and what the machine was late
//! for and could not make up ([`EmulatedClock`]).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Tensor};
use parking_lot::Mutex;
use zeropp_comm::groups::Groups;
use zeropp_comm::{AllBytes, CommResult, CommStats, Communicator, InFlight, Pending};
use zeropp_core::cpu_tensor;
use zeropp_failures::tag::{untag, untag_head};
use zeropp_zero3::StepOutcome;

use super::Worker;
use super::error::StepError;
use crate::head::HeadTree;
use crate::ir::{Compute, HeadMessage, Message, Schedule};
use crate::simulate::{CopyQueue, Costs, StageCosts};

/// Waits end with a spin of at most this long, because a sleeping thread wakes up late: the kernel
/// rounds timers by 50 µs. Short enough that many ranks on few cores do not get in each other's
/// way.
const SPIN_NS: u64 = 100_000;
/// Links of a rank that are distinguished.
const LINKS_MAX: usize = 1 << 12;
/// Numbers of one time stamp: 16 bits each, so that `f32` holds them exactly.
const STAMP: usize = 4;

/// Where one rank's time went since its clock was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// Waiting for given times: computation, transfers, and other ranks. What is left of the
    /// rank's time is the runtime's own.
    pub waited_ns: u64,
    /// Sum of how late the rank was after each wait.
    pub late_ns: u64,
    /// Waits.
    pub waits: u64,
}

/// The time of one emulated rank.
///
/// It runs like the real one, except in waits: a wait ends at the very moment it is for, though the
/// thread wakes up later. The rank is then behind the real time by that much, and catches up in its
/// next wait, as a device with work in its queue does not care when its host wakes up. So what the
/// runtime does costs its real time, and what other programs on the machine do costs none, as long
/// as waits are longer than ranks are late. The clock is never ahead of the real time.
pub struct EmulatedClock {
    epoch: Instant,
    state: Mutex<ClockState>,
}

#[derive(Default)]
struct ClockState {
    /// How far the rank is behind the real time.
    behind_ns: u64,
    /// Whether the rank looks for messages, and does nothing else until one is there.
    looks: bool,
    spent: Spent,
}

impl EmulatedClock {
    /// A clock whose times count from `epoch`.
    pub fn new(epoch: Instant) -> Arc<EmulatedClock> {
        Arc::new(EmulatedClock { epoch, state: Mutex::default() })
    }

    fn real(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    /// The rank's time in nanoseconds since the epoch.
    pub fn now(&self) -> u64 {
        self.real() - self.state.lock().behind_ns
    }

    /// Where the rank's time went so far.
    pub fn spent(&self) -> Spent {
        self.state.lock().spent
    }

    /// Returns once it is `until`; at once if that is past.
    pub fn wait_until(&self, until: u64) {
        let begin = self.now();
        if until <= begin {
            return;
        }
        let mut real = self.real();
        while real < until {
            match (until - real).checked_sub(SPIN_NS) {
                Some(rest) if rest > 0 => std::thread::sleep(Duration::from_nanos(rest)),
                _ => std::hint::spin_loop(),
            }
            real = self.real();
        }
        let mut state = self.state.lock();
        state.behind_ns = real - until;
        state.spent.waited_ns += until - begin;
        state.spent.late_ns += real - until;
        state.spent.waits += 1;
    }

    /// Lets real time pass in which the rank has nothing to do but to look for what others send.
    /// It takes none of the rank's time, as in [`blocked`](Self::blocked).
    fn look_again_after(&self, pause: Duration) {
        let begin = self.now();
        std::thread::sleep(pause);
        let mut state = self.state.lock();
        (state.behind_ns, state.looks) = (self.real() - begin, true);
    }

    /// The rank has found what it looked for.
    fn found(&self) {
        self.state.lock().looks = false;
    }

    /// Whether what is there at `time` is there for this rank: by its own time, or by the real one
    /// where it would let time pass until then.
    fn has_come(&self, time: u64) -> bool {
        let looks = self.state.lock().looks;
        time <= if looks { self.real() } else { self.now() }
    }

    /// Waits for what another rank has to do first. It takes none of the rank's time: what comes
    /// says when it is there, and that is waited for next.
    fn blocked<T>(&self, operation: Pending<T>) -> CommResult<T> {
        let begin = self.now();
        let result = operation.wait();
        self.state.lock().behind_ns = self.real() - begin;
        result
    }
}

fn encode(time: u64) -> [f32; STAMP] {
    std::array::from_fn(|i| ((time >> (16 * i)) & 0xffff) as f32)
}

/// The latest of the stamps in a buffer.
fn latest(buffer: Tensor<1>) -> u64 {
    let decode = |stamp: &[f32]| {
        let parts = stamp.iter().enumerate().map(|(i, part)| (*part as u64) << (16 * i));
        parts.sum()
    };
    cpu_tensor::into_vec(buffer).chunks(STAMP).map(decode).max().unwrap_or(0)
}

fn tensor(values: Vec<f32>) -> Tensor<1> {
    let len = values.len();
    cpu_tensor::from_vec(values, [len])
}

/// This rank's stamp in its own place of `copies` buffers with a place for every rank, so that the
/// ranks' sum has all stamps.
fn own_place(group: &dyn Communicator, copies: usize, time: u64) -> Tensor<1> {
    let width = STAMP * group.size();
    let mut values = vec![0.0; copies * width];
    for copy in values.chunks_mut(width) {
        copy[STAMP * group.rank()..][..STAMP].copy_from_slice(&encode(time));
    }
    tensor(values)
}

/// A collective that the ZeRO-3 group has under way; they run one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EmulatedCollective {
    Gather(usize),
    Reduce(usize),
}

/// Runs the stages of one rank in name only.
pub struct EmulatedWorker {
    costs: Arc<Costs>,
    clock: Arc<EmulatedClock>,
    groups: Groups,
    stages: usize,
    /// Slices of a sample, each with costs of its own.
    slices: usize,
    /// Sums of gradients that this rank makes of its slice of a split head; none where that is
    /// whole.
    own_sums: Option<usize>,
    /// Collectives of the ZeRO-3 group whose end is not known yet, in order.
    queue: VecDeque<(EmulatedCollective, Pending<Tensor<1>>)>,
    /// Ends of those that are known and not waited for yet.
    ends: HashMap<usize, u64>,
    zero3_free: u64,
    copies: CopyQueue,
    /// Reductions under way, and whether the replicas' sum follows.
    reducing: HashMap<usize, (Option<u64>, bool)>,
    replicas: Vec<(usize, Pending<Tensor<1>>)>,
    /// When each rank came to the update that is not validated.
    norm: Option<Pending<Tensor<1>>>,
}

impl EmulatedWorker {
    /// A worker of one rank that runs its part of `program` with these costs, which are those of
    /// every stage, and behind them of each rank's slice of a `head`, if it is split; where samples
    /// are cut, of every stage and slice.
    pub fn new(
        costs: Arc<Costs>,
        clock: Arc<EmulatedClock>,
        groups: Groups,
        program: &Schedule,
        head: Option<&HeadTree>,
    ) -> Self {
        let own_sums = head.map(|head| head.own_sums(groups.pipeline.rank()).len());
        let copies = CopyQueue::new(program, &costs, groups.pipeline.rank());
        Self {
            copies,
            costs,
            clock,
            groups,
            stages: program.stages(),
            slices: program.slices_per_sample(),
            own_sums,
            queue: VecDeque::new(),
            ends: HashMap::new(),
            zero3_free: 0,
            reducing: HashMap::new(),
            replicas: Vec::new(),
            norm: None,
        }
    }

    /// What a stage takes, or the rank's slice behind the stages.
    fn costs_of(&self, stage: usize) -> &StageCosts {
        &self.costs.stages[self.cell(stage)]
    }

    /// What a compute of the stage takes.
    fn compute(&self, kind: Compute, stage: usize, micro_batch: usize) {
        let costs = &self.costs.stages[self.cell(stage) + micro_batch % self.slices];
        self.take(costs.of(kind));
    }

    /// The place of a stage's costs, or of those of its first slice.
    fn cell(&self, stage: usize) -> usize {
        let is_stage = stage < self.stages;
        if is_stage { stage * self.slices } else { self.stages + self.groups.pipeline.rank() }
    }

    fn take(&self, ns: u64) {
        self.clock.wait_until(self.clock.now() + ns);
    }

    /// A message; [`EmulatedLinks`] writes its time of arrival into it.
    fn message(&self) -> Tensor<1> {
        tensor(vec![0.0; STAMP])
    }

    /// Works out the ends of the ZeRO-3 group's collectives up to `wanted`: one begins when the one
    /// before it is done and the last rank has come.
    fn resolve(&mut self, wanted: EmulatedCollective) -> CommResult<()> {
        while let Some((collective, pending)) = self.queue.pop_front() {
            let start = latest(self.clock.blocked(pending)?).max(self.zero3_free);
            match collective {
                EmulatedCollective::Gather(stage) => {
                    self.zero3_free = start + self.costs_of(stage).all_gather_ns;
                    self.ends.insert(stage, self.zero3_free);
                }
                EmulatedCollective::Reduce(stage) => {
                    self.zero3_free = start + self.costs_of(stage).reduce_scatter_ns;
                    if let Some((end, _)) = self.reducing.get_mut(&stage) {
                        *end = Some(self.zero3_free);
                    }
                }
            }
            if collective == wanted {
                break;
            }
        }
        Ok(())
    }

    /// Whether all ranks have begun a collective of the queue, so that its end is known.
    fn has_begun(&mut self, wanted: EmulatedCollective) -> bool {
        let Some(at) = self.queue.iter().position(|(c, _)| *c == wanted) else { return false };
        let have_begun = self.queue.iter_mut().take(at + 1).all(|(_, one)| one.is_done());
        // The first error is that of every wait which follows.
        have_begun && self.resolve(wanted).is_ok()
    }

    fn start_replicas(&mut self, stage: usize) {
        let group = &*self.groups.replica;
        let pending = group.all_reduce(own_place(group, 1, self.clock.now()));
        self.replicas.push((stage, pending));
    }
}

impl Worker for EmulatedWorker {
    fn begin_step(&mut self, _step: u64) {}

    fn message_shape(&self, _: usize) -> (usize, DType) {
        (STAMP, DType::F32)
    }

    fn forward(
        &mut self,
        stage: usize,
        micro_batch: usize,
        _: Option<Tensor<1>>,
    ) -> Result<Option<Tensor<1>>, StepError> {
        self.compute(Compute::F, stage, micro_batch);
        // A split head takes the last stage's output.
        let is_taken = stage + 1 < self.stages || self.own_sums.is_some();
        Ok(is_taken.then(|| self.message()))
    }

    fn recompute(&mut self, stage: usize, micro_batch: usize) -> Result<(), StepError> {
        self.compute(Compute::R, stage, micro_batch);
        Ok(())
    }

    fn backward(
        &mut self,
        stage: usize,
        micro_batch: usize,
        _: Option<Tensor<1>>,
    ) -> Result<Option<Tensor<1>>, StepError> {
        self.compute(Compute::B, stage, micro_batch);
        Ok((stage > 0).then(|| self.message()))
    }

    fn weight(&mut self, stage: usize, micro_batch: usize) {
        self.compute(Compute::W, stage, micro_batch);
    }

    /// As if a token had a number of a stamp: sums of blocks have nothing beside their targets'.
    fn head_tokens(&self) -> usize {
        STAMP
    }

    fn start_out(&mut self, stage: usize, micro_batch: usize) {
        self.copies.start((stage, micro_batch), self.clock.now());
    }

    fn finish_out(&mut self, stage: usize, micro_batch: usize) -> Result<(), StepError> {
        self.clock.wait_until(self.copies.end((stage, micro_batch)));
        Ok(())
    }

    fn start_in(&mut self, stage: usize, micro_batch: usize) {
        self.start_out(stage, micro_batch);
    }

    fn finish_in(&mut self, stage: usize, micro_batch: usize) -> Result<(), StepError> {
        self.finish_out(stage, micro_batch)
    }

    fn is_copied(&mut self, stage: usize, micro_batch: usize) -> bool {
        self.clock.has_come(self.copies.end((stage, micro_batch)))
    }

    fn head_message(&self, message: HeadMessage, tensors: usize) -> (usize, DType) {
        let stamps = if message == HeadMessage::Gradient { tensors } else { 1 };
        (stamps * STAMP, DType::F32)
    }

    fn slice_forward(&mut self, _: usize, _: Tensor<1>) -> Result<Tensor<1>, StepError> {
        self.take(self.costs_of(self.stages).f_ns);
        Ok(self.message())
    }

    fn head_totals(&mut self, _: usize, _: Tensor<1>) -> Result<Tensor<1>, StepError> {
        Ok(self.message())
    }

    fn slice_backward(&mut self, _: usize, _: Tensor<1>) -> Result<Vec<Tensor<1>>, StepError> {
        self.take(self.costs_of(self.stages).b_ns);
        Ok((0..self.own_sums.unwrap_or(0)).map(|_| self.message()).collect())
    }

    fn head_gradient(&self, _: Tensor<1>) -> Tensor<1> {
        self.message()
    }

    fn start_gather(&mut self, stage: usize) {
        let stamp = tensor(encode(self.clock.now()).to_vec());
        self.queue
            .push_back((EmulatedCollective::Gather(stage), self.groups.zero3.all_gather(stamp)));
    }

    fn finish_gather(&mut self, stage: usize) -> CommResult<()> {
        let gather = EmulatedCollective::Gather(stage);
        if self.queue.iter().any(|(c, _)| *c == gather) {
            self.resolve(gather)?;
        }
        if let Some(end) = self.ends.remove(&stage) {
            self.clock.wait_until(end);
        }
        Ok(())
    }

    /// When it is done depends on the times that all ranks started it: those that have said it.
    fn is_gathered(&mut self, stage: usize) -> bool {
        let gather = EmulatedCollective::Gather(stage);
        let is_queued = self.queue.iter().any(|(c, _)| *c == gather);
        let is_known = !is_queued || self.has_begun(gather);
        is_known && self.ends.get(&stage).is_none_or(|end| self.clock.has_come(*end))
    }

    fn look_again_after(&mut self, pause: Duration) {
        self.clock.look_again_after(pause);
    }

    fn found(&mut self) {
        self.clock.found();
    }

    fn free(&mut self, stage: usize) -> CommResult<()> {
        self.finish_gather(stage)
    }

    fn start_reduce(&mut self, stage: usize) {
        let group = &*self.groups.zero3;
        let full = own_place(group, group.size(), self.clock.now());
        self.queue.push_back((EmulatedCollective::Reduce(stage), group.reduce_scatter(full)));
        self.reducing.insert(stage, (None, false));
    }

    fn finish_reduce(&mut self, stage: usize) -> CommResult<()> {
        let Some((end, _)) = self.reducing.get(&stage) else { return Ok(()) };
        if end.is_none() {
            self.resolve(EmulatedCollective::Reduce(stage))?;
        }
        let (end, replicas) = self.reducing.remove(&stage).expect("it was there");
        self.clock.wait_until(end.expect("it has been resolved"));
        if replicas {
            self.start_replicas(stage);
        }
        Ok(())
    }

    fn is_reduced(&mut self, stage: usize) -> bool {
        let reduce = EmulatedCollective::Reduce(stage);
        let end = |this: &Self| this.reducing.get(&stage).and_then(|(end, _)| *end);
        let is_known = end(self).is_some() || self.has_begun(reduce);
        is_known && end(self).is_none_or(|end| self.clock.has_come(end))
    }

    fn request_replica_reduce(&mut self, stage: usize) {
        match self.reducing.get_mut(&stage) {
            Some((_, replicas)) => *replicas = true,
            None => self.start_replicas(stage),
        }
    }

    fn is_replica_reduced(&mut self, _: usize) -> bool {
        false
    }

    fn optimizer_step(&mut self, _step: u64, early: bool) -> CommResult<StepOutcome> {
        let mut free = 0;
        for (stage, pending) in std::mem::take(&mut self.replicas) {
            let start = latest(self.clock.blocked(pending)?).max(free);
            free = start + self.costs_of(stage).replica_reduce_ns;
        }
        self.clock.wait_until(free);
        let stamp = tensor(encode(self.clock.now()).to_vec());
        let norm = self.groups.world.all_gather(stamp);
        if early {
            self.norm = Some(norm);
            self.take(self.costs.step_ns);
        } else {
            let meet = latest(self.clock.blocked(norm)?);
            self.clock.wait_until(meet + self.costs.step_ns);
        }
        Ok(StepOutcome::default())
    }

    /// Always: nothing is computed that could be clipped.
    fn was_right(&mut self) -> CommResult<bool> {
        if let Some(norm) = self.norm.take() {
            let known = latest(self.clock.blocked(norm)?);
            self.clock.wait_until(known);
        }
        Ok(true)
    }

    fn drop_forwards(&mut self) -> CommResult<()> {
        Ok(())
    }

    fn settle(&mut self) -> CommResult<Option<StepOutcome>> {
        let validated = self.norm.is_some().then(StepOutcome::default);
        self.was_right()?;
        Ok(validated)
    }

    fn gather_bytes(&self, stage: usize) -> u64 {
        let size = self.groups.zero3.size() as u64;
        self.costs.memory[self.cell(stage)].weights / size * (size - 1)
    }

    fn reduce_bytes(&self, stage: usize) -> u64 {
        let size = self.groups.zero3.size() as u64;
        self.costs.memory[self.cell(stage)].gradient / size * (size - 1)
    }

    fn replica_bytes(&self, stage: usize) -> u64 {
        let shard = self.costs.memory[self.cell(stage)].gradient / self.groups.zero3.size() as u64;
        let size = self.groups.replica.size() as u64;
        2 * shard / size * (size - 1)
    }
}

/// The pipeline's communicator, with messages that take the time of a given link.
pub struct EmulatedLinks {
    inner: Arc<dyn Communicator>,
    costs: Arc<Costs>,
    clock: Arc<EmulatedClock>,
    head: Option<HeadTree>,
    /// Slices of a sample, each with messages of its own size.
    slices: usize,
    /// When each of this rank's links is free; empty without a limit.
    links: Mutex<Vec<u64>>,
}

impl EmulatedLinks {
    /// Wraps `inner`, whose messages are those of an executor with an [`EmulatedWorker`], and of a
    /// `head` that is split, or samples in so many `slices`.
    pub fn new(
        inner: Arc<dyn Communicator>,
        costs: Arc<Costs>,
        clock: Arc<EmulatedClock>,
        head: Option<HeadTree>,
        slices: usize,
    ) -> Self {
        // More links than messages that are ever under way at once make no difference.
        let links = vec![0; costs.link.parallel_max.map_or(0, |n| n.min(LINKS_MAX))];
        Self { inner, costs, clock, head, slices, links: Mutex::new(links) }
    }

    /// The bytes of a message to a rank.
    fn bytes(&self, to: usize, tag: u64) -> u64 {
        let memory = &self.costs.memory;
        if let Some((message, consumer, micro_batch)) = untag(tag) {
            // A gradient has the size of the activation that crosses the same boundary.
            let boundary = if message == Message::Activation { consumer - 1 } else { consumer };
            return memory[boundary * self.slices + micro_batch % self.slices].message;
        }
        let (head, me) = (self.head.as_ref().expect("a message of one"), self.inner.rank());
        let message = untag_head(tag).expect("of a stage or of a head");
        let edge = &head.edges[head.edge(message, me, to).expect("a message of its tree")];
        memory[head.stage + me].head.of(message).saturating_mul(edge.tensors)
    }

    /// When a message that is sent now is at its receiver.
    fn arrival(&self, to: usize, tag: u64) -> u64 {
        let link = &self.costs.link;
        let transfer = link.transfer_ns(self.bytes(to, tag)) as u64;
        let now = self.clock.now();
        let start = match self.links.lock().iter_mut().min() {
            Some(free) => {
                let start = now.max(*free);
                *free = start + transfer;
                start
            }
            None => now,
        };
        start + transfer + link.latency_ns
    }
}

impl Communicator for EmulatedLinks {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn size(&self) -> usize {
        self.inner.size()
    }
    fn all_gather(&self, shard: Tensor<1>) -> Pending<Tensor<1>> {
        self.inner.all_gather(shard)
    }
    fn reduce_scatter(&self, full: Tensor<1>) -> Pending<Tensor<1>> {
        self.inner.reduce_scatter(full)
    }
    fn all_reduce(&self, buffer: Tensor<1>) -> Pending<Tensor<1>> {
        self.inner.all_reduce(buffer)
    }
    fn broadcast(&self, root: usize, buffer: Tensor<1>) -> Pending<Tensor<1>> {
        self.inner.broadcast(root, buffer)
    }
    fn exchange(&self, bytes: Vec<u8>) -> Pending<AllBytes> {
        self.inner.exchange(bytes)
    }
    fn gather(&self, root: usize, bytes: Vec<u8>) -> Pending<AllBytes> {
        self.inner.gather(root, bytes)
    }
    /// Sends the time of arrival in place of `buffer`.
    fn send(&self, to: usize, tag: u64, buffer: Tensor<1>) -> Pending<()> {
        let stamps = buffer.dims()[0] / STAMP;
        self.inner.send(to, tag, tensor(encode(self.arrival(to, tag)).repeat(stamps)))
    }
    fn recv(&self, from: usize, tag: u64, len: usize, dtype: DType) -> Pending<Tensor<1>> {
        let message = self.inner.recv(from, tag, len, dtype);
        let message = Some(message);
        Pending::in_flight(Box::new(Travelling { message, sent: None, clock: self.clock.clone() }))
    }
    fn barrier(&self) -> CommResult<()> {
        self.inner.barrier()
    }
    fn split(&self, name: &str, color: usize, key: usize) -> CommResult<Arc<dyn Communicator>> {
        self.inner.split(name, color, key)
    }
    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
    fn stats(&self) -> CommStats {
        self.inner.stats()
    }
}

/// A message on an emulated link.
struct Travelling {
    /// Until it was sent.
    message: Option<Pending<Tensor<1>>>,
    sent: Option<CommResult<Tensor<1>>>,
    clock: Arc<EmulatedClock>,
}

impl InFlight<Tensor<1>> for Travelling {
    /// Whether it is there by the rank's time.
    fn is_done(&mut self) -> bool {
        if let Some(mut message) = self.message.take() {
            match message.is_done() {
                true => self.sent = Some(message.wait()),
                false => self.message = Some(message),
            }
        }
        match &self.sent {
            Some(Ok(message)) => self.clock.has_come(latest(message.clone())),
            Some(Err(_)) => true,
            None => false,
        }
    }

    fn wait(mut self: Box<Self>) -> CommResult<Tensor<1>> {
        let message = match (self.sent.take(), self.message.take()) {
            (Some(sent), _) => sent?,
            (None, Some(message)) => self.clock.blocked(message)?,
            (None, None) => unreachable!("a message is on its way or was sent"),
        };
        self.clock.wait_until(latest(message.clone()));
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_survive_f32_and_sums() {
        for time in [0, 1, 65_535, 65_536, 1_234_567_890_123, u64::MAX] {
            assert_eq!(latest(tensor(encode(time).to_vec())), time);
        }
        let two = [encode(5), encode(1 << 40)].concat();
        assert_eq!(latest(tensor(two)), 1 << 40);
    }

    #[test]
    fn a_wait_is_over_at_its_time_and_accounted_for() {
        let clock = EmulatedClock::new(Instant::now());
        clock.wait_until(0);
        assert_eq!(clock.spent(), Spent::default(), "what is past is not waited for");
        let until = clock.now() + 300_000;
        clock.wait_until(until);
        assert!(clock.now() >= until);
        let spent = clock.spent();
        assert_eq!(spent.waits, 1);
        assert!((1..=300_000).contains(&spent.waited_ns));
    }

    /// The rank's time stands still while it waits for others, and never runs ahead.
    #[test]
    fn a_late_rank_catches_up_in_its_next_wait() {
        let clock = EmulatedClock::new(Instant::now());
        clock.wait_until(100_000);
        let late = clock.now();
        std::thread::sleep(Duration::from_millis(2));
        clock.state.lock().behind_ns = clock.real() - late;
        assert!(clock.real() >= late + 2_000_000);
        clock.wait_until(late + 1_000_000);
        assert!(clock.now() < late + 2_000_000, "1 ms of its own time is over at once");
        let until = clock.now() + 4_000_000;
        clock.wait_until(until);
        assert!(clock.real() >= until);
    }
}
