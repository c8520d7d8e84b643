//! The worker's actions, as the executor calls them.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use zeropp_comm::CommResult;
use zeropp_core::device;
use zeropp_core::split::Saved;
use zeropp_core::split::ops::input_gradient;
use zeropp_zero3::{ShardedStage, StepOutcome};

use super::{ModelWorker, flat};
use crate::executor::Worker;
use crate::executor::error::StepError;
use crate::executor::waits::LayerWaits;
use crate::ir::HeadMessage;

impl Worker for ModelWorker {
    fn begin_step(&mut self, step: u64) {
        self.step = step;
    }

    fn message_shape(&self, micro_batch: usize) -> (usize, DType) {
        (self.dims(micro_batch).iter().product(), self.options.compute)
    }

    fn forward(
        &mut self,
        stage: usize,
        micro_batch: usize,
        x: Option<Tensor<1>>,
    ) -> Result<Option<Tensor<1>>, StepError> {
        let dims = self.dims(micro_batch);
        self.begin_forward(stage, micro_batch);
        let input = x.map(|x| device::on(&self.options.device, x).reshape(dims));
        let (at, whole) = ((stage, micro_batch), 0..self.stages[&stage].parts.len());
        if self.evaluated.is_none() {
            self.begin_vault(at);
        }
        let input = input.map(|x| self.keep(at, x));
        let output = if self.evaluated.is_some() {
            let (x, op) = (input.as_ref().map(Saved::get), self.untracked(stage, micro_batch)?);
            self.run_layers(stage, micro_batch, whole, x, &op, true)?
        } else if self.options.redone.contains(&at) {
            self.forward_in_pieces(at, input)?
        } else {
            self.build(stage, micro_batch, whole, input, true)?
        };
        self.end_forward(stage, micro_batch);
        if self.waits.is_some() {
            self.shard(stage).finish_gather()?;
        }
        Ok(self.deliver(stage, micro_batch, output))
    }

    fn recompute(&mut self, stage: usize, micro_batch: usize) -> Result<(), StepError> {
        let redone = self.redo((stage, micro_batch))?;
        assert!(redone, "R follows a forward that kept its inputs");
        Ok(())
    }

    fn backward_by_layer(
        &mut self,
        stage: usize,
        micro_batch: usize,
        dy: Option<Tensor<1>>,
        passed: &mut dyn FnMut(&mut Self, usize),
    ) -> Result<Option<Tensor<1>>, StepError> {
        let at = (stage, micro_batch);
        let dims = self.dims(micro_batch);
        let mut dy = dy.map(|dy| device::on(&self.options.device, dy).reshape(dims));
        self.begin_backward(stage, micro_batch);
        loop {
            let graph = self.graphs.remove(&at).expect("B follows its F");
            let (device, scale) = (self.options.device.clone(), self.options.loss_scale);
            let loss_gradient = || Tensor::full([1], scale, (&device, DType::F32));
            dy = graph.backward(dy, loss_gradient, |layer| passed(self, layer));
            if !self.redo(at)? {
                self.end_backward(stage, micro_batch);
                return Ok(dy.map(flat));
            }
        }
    }

    fn weight(&mut self, stage: usize, micro_batch: usize) {
        self.optimizer.let_go();
        let queue = self.queues.remove(&(stage, micro_batch)).expect("W follows its B");
        let grads = self.grads(stage, micro_batch);
        let mut grads = grads.lock();
        grads.open();
        queue.run(&mut grads);
        self.look_for_not_finite(stage, micro_batch, &grads);
    }

    fn layers(&self, stage: usize) -> usize {
        self.stages[&stage].parts.len()
    }

    fn weight_of_layer(&mut self, stage: usize, micro_batch: usize, layer: usize) {
        let at = (stage, micro_batch);
        self.optimizer.let_go();
        let queue = self.queues.get(&at).expect("W follows its B").clone();
        let grads = self.grads(stage, micro_batch);
        let mut grads = grads.lock();
        queue.run_layer(layer, &mut grads);
        if layer == 0 {
            self.queues.remove(&at);
        }
        self.look_for_not_finite(stage, micro_batch, &grads);
    }

    fn start_out(&mut self, stage: usize, micro_batch: usize) -> Result<(), StepError> {
        self.copy_out((stage, micro_batch))
    }

    fn finish_out(&mut self, stage: usize, micro_batch: usize) -> Result<(), StepError> {
        self.drop_copied((stage, micro_batch))
    }

    fn start_in(&mut self, stage: usize, micro_batch: usize) {
        self.copy_in((stage, micro_batch));
    }

    fn finish_in(&mut self, stage: usize, micro_batch: usize) -> Result<(), StepError> {
        self.have_copied((stage, micro_batch))
    }

    fn is_copied(&mut self, stage: usize, micro_batch: usize) -> bool {
        self.away((stage, micro_batch)).is_copied()
    }

    fn head_tokens(&self, micro_batch: usize) -> usize {
        let [samples, seq, _] = self.dims(micro_batch);
        samples * seq
    }

    fn head_message(
        &self,
        message: HeadMessage,
        micro_batch: usize,
        tensors: usize,
    ) -> (usize, DType) {
        self.message_of_head(message, micro_batch, tensors)
    }

    fn arrived(&self, message: Tensor<1>) -> Tensor<1> {
        device::on(&self.options.device, message)
    }

    fn slice_forward(&mut self, micro_batch: usize, x: Tensor<1>) -> Result<Tensor<1>, StepError> {
        self.forward_of_slice(micro_batch, x)
    }

    fn head_totals(&mut self, micro_batch: usize, sums: Tensor<1>) -> Result<Tensor<1>, StepError> {
        self.loss_of_head(micro_batch, &sums)
    }

    fn slice_backward(
        &mut self,
        micro_batch: usize,
        totals: Tensor<1>,
    ) -> Result<Vec<Tensor<1>>, StepError> {
        self.backward_of_slice(micro_batch, &totals)
    }

    fn head_gradient(&self, sum: Tensor<1>) -> Tensor<1> {
        input_gradient(sum, self.options.compute)
    }

    fn start_gather(&mut self, stage: usize) {
        self.shard(stage).start_gather();
    }

    fn finish_gather(&mut self, stage: usize) -> CommResult<()> {
        self.shard(stage).finish_gather()
    }

    fn wait_by_layer(&mut self, waits: LayerWaits) {
        self.waits = Some(waits);
    }

    fn take_waits(&mut self) -> Option<LayerWaits> {
        self.waits.take()
    }

    fn is_gathered(&mut self, stage: usize) -> bool {
        self.shard(stage).is_gathered()
    }

    fn free(&mut self, stage: usize) -> CommResult<()> {
        self.shard(stage).free()
    }

    fn start_reduce(&mut self, stage: usize) {
        let this = self.stages.get_mut(&stage).expect("a stage of this rank");
        let (_, grads) = this.grads.pop_first().expect("a unit's W precede its reduction");
        let grads = Arc::into_inner(grads).expect("graphs of the unit are gone");
        self.shard(stage).start_reduce(grads.into_inner());
    }

    fn begin_reduce(&mut self, stage: usize, micro_batch: usize) {
        self.grads(stage, micro_batch).lock().open();
        self.shard(stage).begin_reduce();
    }

    fn start_reduce_layer(&mut self, stage: usize, layer: usize) {
        let this = self.stages.get_mut(&stage).expect("a stage of this rank");
        let unit = this.grads.first_entry().expect("a unit's W precede its reduction");
        let (gradient, hold) = unit.get().lock().take_flat(layer);
        if layer == 0 {
            unit.remove();
        }
        self.shard(stage).reduce_layer(layer, gradient, hold);
    }

    fn finish_reduce(&mut self, stage: usize) -> CommResult<()> {
        self.shard(stage).finish_reduce()
    }

    fn is_reduced(&mut self, stage: usize) -> bool {
        self.shard(stage).is_reduced()
    }

    fn request_replica_reduce(&mut self, stage: usize) {
        self.shard(stage).request_replica_reduce();
    }

    fn is_replica_reduced(&mut self, stage: usize) -> bool {
        self.shard(stage).is_replica_reduced()
    }

    fn read_ahead(&mut self) {
        self.optimizer.read_ahead(&self.sharded);
    }

    fn optimizer_step(&mut self, step: u64, early: bool) -> CommResult<StepOutcome> {
        match early {
            true => self.optimizer.step_early(&mut self.sharded, step),
            false => self.optimizer.step(&mut self.sharded, step),
        }
    }

    fn was_right(&mut self) -> CommResult<bool> {
        self.optimizer.was_right()
    }

    fn drop_forwards(&mut self) -> CommResult<()> {
        self.forget_copies();
        self.inputs.clear();
        self.graphs.clear();
        self.queues.clear();
        self.contexts.clear();
        self.slices.clear();
        self.losses.clear();
        self.loss_of_sample = 0.0;
        // A head's forwards have begun gradients.
        self.stages.values_mut().for_each(|stage| stage.grads.clear());
        self.sharded.iter_mut().try_for_each(ShardedStage::free)
    }

    fn settle(&mut self) -> CommResult<Option<StepOutcome>> {
        self.optimizer.settle(&mut self.sharded)
    }

    fn gather_bytes(&self, stage: usize) -> u64 {
        self.sharded[self.stages[&stage].shards].gather_bytes()
    }

    fn reduce_bytes(&self, stage: usize) -> u64 {
        self.sharded[self.stages[&stage].shards].reduce_bytes()
    }

    fn replica_bytes(&self, stage: usize) -> u64 {
        self.sharded[self.stages[&stage].shards].replica_bytes()
    }
}
