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
use std::time::Duration;

use burn::tensor::{DType, Tensor};
use zeropp_comm::groups::Groups;
use zeropp_comm::{CommResult, Pending};
use zeropp_zero3::StepOutcome;

use self::stamps::{STAMP, encode, latest, own_place, tensor};
use super::Worker;
use super::error::StepError;
use super::waits::LayerWaits;
use crate::head::HeadTree;
use crate::ir::{Compute, HeadMessage, Schedule};
use crate::simulate::{CopyQueue, Costs, StageCosts};

mod clock;
mod links;
mod stamps;

pub use clock::{EmulatedClock, Spent};
pub use links::EmulatedLinks;

/// A collective that the ZeRO-3 group has under way; they run one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EmulatedCollective {
    /// Of a stage and a layer of it.
    Gather(usize, usize),
    /// Of a stage and a layer of it.
    Reduce(usize, usize),
}

/// A reduction under way.
struct EmulatedReduction {
    /// By layer: when it ends, where that is known and its sum over the replicas has not begun.
    ends: Vec<Option<u64>>,
    /// When all that is known of is reduced.
    end: u64,
    /// Whether the replicas' sum follows, and the layers that have not begun it.
    sums: bool,
    left: usize,
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
    /// Ends of gathers that are known and not waited for yet, by stage and layer.
    ends: HashMap<(usize, usize), u64>,
    /// Set while an F waits for each layer as it comes to it.
    waits: Option<LayerWaits>,
    zero3_free: u64,
    copies: CopyQueue,
    reducing: HashMap<usize, EmulatedReduction>,
    /// Sums over the replicas, of stages and layers.
    replicas: Vec<((usize, usize), Pending<Tensor<1>>)>,
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
            waits: None,
            zero3_free: 0,
            reducing: HashMap::new(),
            replicas: Vec::new(),
            norm: None,
        }
    }

    /// Takes these times from now on, of as many stages.
    pub fn set_costs(&mut self, costs: Arc<Costs>) {
        self.costs = costs;
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
        let cell = if is_stage { stage } else { self.stages + self.groups.pipeline.rank() };
        cell * self.slices
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
                EmulatedCollective::Gather(stage, layer) => {
                    let takes = self.costs_of(stage).all_gather_ns;
                    let takes = self.costs.gather_of_layer(self.layers_at(stage), layer, takes);
                    self.zero3_free = start + takes;
                    self.ends.insert((stage, layer), self.zero3_free);
                }
                EmulatedCollective::Reduce(stage, layer) => {
                    let takes = self.costs_of(stage).reduce_scatter_ns;
                    let takes = self.costs.reduction_of_layer(self.layers_at(stage), layer, takes);
                    self.zero3_free = start + takes;
                    if let Some(reduction) = self.reducing.get_mut(&stage) {
                        reduction.ends[layer] = Some(self.zero3_free);
                        reduction.end = self.zero3_free;
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

    /// Waits for a layer of the gather under way, if any.
    fn gather_layer(&mut self, stage: usize, layer: usize) -> CommResult<()> {
        let gather = EmulatedCollective::Gather(stage, layer);
        if self.queue.iter().any(|(c, _)| *c == gather) {
            self.resolve(gather)?;
        }
        if let Some(end) = self.ends.remove(&(stage, layer)) {
            self.clock.wait_until(end);
        }
        Ok(())
    }

    /// An F that waits for each layer as it comes to it.
    fn forward_by_layer(
        &mut self,
        stage: usize,
        micro_batch: usize,
        waits: &mut LayerWaits,
    ) -> CommResult<()> {
        let whole = self.costs.stages[self.cell(stage) + micro_batch % self.slices].f_ns;
        for layer in 0..self.layers(stage) {
            waits.wait(|| self.gather_layer(stage, layer))?;
            self.take(self.costs.f_of_layer(self.layers_at(stage), layer, whole));
        }
        Ok(())
    }

    /// The place of the shares of a stage's layers.
    fn layers_at(&self, stage: usize) -> usize {
        self.cell(stage) / self.slices
    }

    fn start_replicas(&mut self, stage: usize, layer: usize) {
        let group = &*self.groups.replica;
        let pending = group.all_reduce(own_place(group, 1, self.clock.now()));
        self.replicas.push(((stage, layer), pending));
    }

    /// Begins the sums over the replicas of layers whose reductions are over, in their order.
    fn start_sums(&mut self, stage: usize) {
        loop {
            let Some(reduction) = self.reducing.get(&stage).filter(|r| r.sums) else { return };
            let Some(layer) = reduction.left.checked_sub(1) else { return };
            let Some(end) = reduction.ends[layer] else { return };
            if !self.clock.has_come(end) {
                return;
            }
            self.start_replicas(stage, layer);
            self.reducing.get_mut(&stage).expect("it was there").left -= 1;
        }
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
        match self.waits.take() {
            Some(mut waits) => {
                self.forward_by_layer(stage, micro_batch, &mut waits)?;
                self.waits = Some(waits);
            }
            None => self.compute(Compute::F, stage, micro_batch),
        }
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

    fn backward_by_layer(
        &mut self,
        stage: usize,
        micro_batch: usize,
        _: Option<Tensor<1>>,
        passed: &mut dyn FnMut(&mut Self, usize),
    ) -> Result<Option<Tensor<1>>, StepError> {
        let whole = self.costs.stages[self.cell(stage) + micro_batch % self.slices].b_ns;
        for layer in (0..self.layers(stage)).rev() {
            self.take(self.costs.w_of_layer(self.layers_at(stage), layer, whole));
            passed(self, layer);
        }
        Ok((stage > 0).then(|| self.message()))
    }

    fn weight(&mut self, stage: usize, micro_batch: usize) {
        self.compute(Compute::W, stage, micro_batch);
    }

    fn layers(&self, stage: usize) -> usize {
        self.costs.layers_of(self.layers_at(stage))
    }

    fn weight_of_layer(&mut self, stage: usize, micro_batch: usize, layer: usize) {
        let whole = self.costs.stages[self.cell(stage) + micro_batch % self.slices].w_ns;
        self.take(self.costs.w_of_layer(self.layers_at(stage), layer, whole));
    }

    /// As if a token had a number of a stamp: sums of blocks have nothing beside their targets'.
    fn head_tokens(&self, _: usize) -> usize {
        STAMP
    }

    fn start_out(&mut self, stage: usize, micro_batch: usize) -> Result<(), StepError> {
        self.start_in(stage, micro_batch);
        Ok(())
    }

    fn finish_out(&mut self, stage: usize, micro_batch: usize) -> Result<(), StepError> {
        self.clock.wait_until(self.copies.end((stage, micro_batch)));
        Ok(())
    }

    fn start_in(&mut self, stage: usize, micro_batch: usize) {
        self.copies.start((stage, micro_batch), self.clock.now());
    }

    fn finish_in(&mut self, stage: usize, micro_batch: usize) -> Result<(), StepError> {
        self.finish_out(stage, micro_batch)
    }

    fn is_copied(&mut self, stage: usize, micro_batch: usize) -> bool {
        self.clock.has_come(self.copies.end((stage, micro_batch)))
    }

    fn head_message(&self, message: HeadMessage, _: usize, tensors: usize) -> (usize, DType) {
        let stamps = if message == HeadMessage::Gradient { tensors } else { 1 };
        (stamps * STAMP, DType::F32)
    }

    fn slice_forward(&mut self, micro_batch: usize, _: Tensor<1>) -> Result<Tensor<1>, StepError> {
        self.compute(Compute::F, self.stages, micro_batch);
        Ok(self.message())
    }

    fn head_totals(&mut self, _: usize, _: Tensor<1>) -> Result<Tensor<1>, StepError> {
        Ok(self.message())
    }

    fn slice_backward(
        &mut self,
        micro_batch: usize,
        _: Tensor<1>,
    ) -> Result<Vec<Tensor<1>>, StepError> {
        self.compute(Compute::B, self.stages, micro_batch);
        Ok((0..self.own_sums.unwrap_or(0)).map(|_| self.message()).collect())
    }

    fn head_gradient(&self, _: Tensor<1>) -> Tensor<1> {
        self.message()
    }

    fn start_gather(&mut self, stage: usize) {
        for layer in 0..self.layers(stage) {
            let stamp = tensor(encode(self.clock.now()).to_vec());
            let gather = EmulatedCollective::Gather(stage, layer);
            self.queue.push_back((gather, self.groups.zero3.all_gather(stamp)));
        }
    }

    fn finish_gather(&mut self, stage: usize) -> CommResult<()> {
        (0..self.layers(stage)).try_for_each(|layer| self.gather_layer(stage, layer))
    }

    fn wait_by_layer(&mut self, waits: LayerWaits) {
        self.waits = Some(waits);
    }

    fn take_waits(&mut self) -> Option<LayerWaits> {
        self.waits.take()
    }

    /// When it is done depends on the times that all ranks started it: those that have said it.
    fn is_gathered(&mut self, stage: usize) -> bool {
        let last = self.layers(stage) - 1;
        let gather = EmulatedCollective::Gather(stage, last);
        let is_queued = self.queue.iter().any(|(c, _)| *c == gather);
        let is_known = !is_queued || self.has_begun(gather);
        is_known && self.ends.get(&(stage, last)).is_none_or(|end| self.clock.has_come(*end))
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
        self.begin_reduce(stage, 0);
        (0..self.layers(stage)).rev().for_each(|layer| self.start_reduce_layer(stage, layer));
    }

    fn begin_reduce(&mut self, stage: usize, _: usize) {
        let layers = self.layers(stage);
        let reduction =
            EmulatedReduction { ends: vec![None; layers], end: 0, sums: false, left: layers };
        self.reducing.insert(stage, reduction);
    }

    fn start_reduce_layer(&mut self, stage: usize, layer: usize) {
        let group = &*self.groups.zero3;
        let full = own_place(group, group.size(), self.clock.now());
        let reduce = EmulatedCollective::Reduce(stage, layer);
        self.queue.push_back((reduce, group.reduce_scatter(full)));
    }

    fn finish_reduce(&mut self, stage: usize) -> CommResult<()> {
        let Some(left) = self.reducing.get(&stage).map(|reduction| reduction.left) else {
            return Ok(());
        };
        for layer in (0..left).rev() {
            if self.reducing[&stage].ends[layer].is_none() {
                self.resolve(EmulatedCollective::Reduce(stage, layer))?;
            }
            self.clock.wait_until(self.reducing[&stage].ends[layer].expect("it was resolved"));
            self.start_sums(stage);
        }
        self.reducing.remove(&stage);
        Ok(())
    }

    fn is_reduced(&mut self, stage: usize) -> bool {
        let Some(ends) = self.reducing.get(&stage).map(|reduction| reduction.ends.clone()) else {
            return true;
        };
        let is_known = (0..ends.len()).rev().all(|layer| {
            ends[layer].is_some() || self.has_begun(EmulatedCollective::Reduce(stage, layer))
        });
        self.start_sums(stage);
        is_known && self.clock.has_come(self.reducing[&stage].end)
    }

    fn request_replica_reduce(&mut self, stage: usize) {
        match self.reducing.get_mut(&stage) {
            Some(reduction) => reduction.sums = true,
            None => {
                let layers = (0..self.layers(stage)).rev();
                layers.for_each(|layer| self.start_replicas(stage, layer));
            }
        }
    }

    fn is_replica_reduced(&mut self, _: usize) -> bool {
        false
    }

    fn optimizer_step(&mut self, _step: u64, early: bool) -> CommResult<StepOutcome> {
        let mut free = 0;
        for ((stage, layer), pending) in std::mem::take(&mut self.replicas) {
            let start = latest(self.clock.blocked(pending)?).max(free);
            let takes = self.costs_of(stage).replica_reduce_ns;
            free = start + self.costs.reduction_of_layer(self.layers_at(stage), layer, takes);
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
