//! The worker that the executor drives: the compute and the state of one rank's stages.

use std::time::Duration;

use burn::tensor::{DType, Tensor};
use zeropp_comm::CommResult;
use zeropp_zero3::StepOutcome;

use super::error::StepError;
use super::waits::LayerWaits;
use crate::ir::HeadMessage;

/// The stages of one rank. The executor calls it in the order of the program; every message is a
/// flat tensor of [`message_shape`](Worker::message_shape).
pub trait Worker {
    /// A new step begins.
    fn begin_step(&mut self, step: u64);
    /// Elements and type of an activation or gradient message of a micro-batch.
    fn message_shape(&self, micro_batch: usize) -> (usize, DType);
    /// Waits between two looks at what others have sent, while there is nothing else to do.
    fn look_again_after(&mut self, pause: Duration) {
        std::thread::sleep(pause);
    }
    /// What was looked for is there.
    fn found(&mut self) {}

    /// F: the output for the next stage, or `None` where the stage ends in the loss.
    ///
    /// # Errors
    /// Tokens that the model cannot be given; a layer that gives another shape than the next one is
    /// promised.
    fn forward(
        &mut self,
        stage: usize,
        micro_batch: usize,
        x: Option<Tensor<1>>,
    ) -> Result<Option<Tensor<1>>, StepError>;
    /// R: redoes the F, now keeping what B needs; of a stage of several layers the last one's, as B
    /// goes back from layer to layer.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    fn recompute(&mut self, stage: usize, micro_batch: usize) -> Result<(), StepError>;
    /// B: the gradient for the stage before, or `None` at stage 0.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), where it redoes layers.
    fn backward(
        &mut self,
        stage: usize,
        micro_batch: usize,
        dy: Option<Tensor<1>>,
    ) -> Result<Option<Tensor<1>>, StepError> {
        self.backward_by_layer(stage, micro_batch, dy, &mut |_, _| ())
    }
    /// The same, which says of each layer, from the last to the first, when it has come past it:
    /// its W may run then.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    fn backward_by_layer(
        &mut self,
        stage: usize,
        micro_batch: usize,
        dy: Option<Tensor<1>>,
        passed: &mut dyn FnMut(&mut Self, usize),
    ) -> Result<Option<Tensor<1>>, StepError>;
    /// W: adds the queued weight gradients to the stage's buffer.
    fn weight(&mut self, stage: usize, micro_batch: usize);
    /// Layers of the stage, the grain of what follows.
    fn layers(&self, stage: usize) -> usize;
    /// The part of a W that is of one layer. Those of all layers are a W, from the last to the
    /// first.
    fn weight_of_layer(&mut self, stage: usize, micro_batch: usize, layer: usize);

    /// OUT: starts copying what the F of a micro-batch has kept out of memory.
    ///
    /// # Errors
    /// What the system says.
    fn start_out(&mut self, stage: usize, micro_batch: usize) -> Result<(), StepError>;
    /// GONE: waits for that, here or on the device, and gives its memory back.
    ///
    /// # Errors
    /// What the system says, such as that the disk is full.
    fn finish_out(&mut self, stage: usize, micro_batch: usize) -> Result<(), StepError>;
    /// IN: takes memory for it and starts copying it back.
    fn start_in(&mut self, stage: usize, micro_batch: usize);
    /// Waits for that: R or B finds what F has kept.
    ///
    /// # Errors
    /// What the system says.
    fn finish_in(&mut self, stage: usize, micro_batch: usize) -> Result<(), StepError>;
    /// Whether the copy under way would be finished at once, also as the device waits for it.
    fn is_copied(&mut self, stage: usize, micro_batch: usize) -> bool;

    /// Tokens of a micro-batch, where the head is split.
    fn head_tokens(&self, micro_batch: usize) -> usize;
    /// Elements and type of a split head's message of so many tensors.
    fn head_message(
        &self,
        message: HeadMessage,
        micro_batch: usize,
        tensors: usize,
    ) -> (usize, DType);
    /// What another rank has sent, where this rank computes.
    fn arrived(&self, message: Tensor<1>) -> Tensor<1> {
        message
    }
    /// F of this rank's slice of a split head: the sums of its blocks.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    fn slice_forward(&mut self, micro_batch: usize, x: Tensor<1>) -> Result<Tensor<1>, StepError>;
    /// Takes the loss of a micro-batch, one after the other, from the sums of all blocks of a split
    /// head; the totals over them.
    ///
    /// # Errors
    /// Tokens that the model cannot be given.
    fn head_totals(&mut self, micro_batch: usize, sums: Tensor<1>) -> Result<Tensor<1>, StepError>;
    /// B of this rank's slice of a split head: the sums of gradients over the blocks that its rank
    /// sums ([`HeadTree::own_sums`](crate::head::HeadTree::own_sums)), in fp32.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    fn slice_backward(
        &mut self,
        micro_batch: usize,
        totals: Tensor<1>,
    ) -> Result<Vec<Tensor<1>>, StepError>;
    /// The gradient for the last stage from its sum over all blocks of a split head.
    fn head_gradient(&self, sum: Tensor<1>) -> Tensor<1>;

    /// AG: starts gathering.
    fn start_gather(&mut self, stage: usize);
    /// Waits for the gather under way, if any.
    ///
    /// # Errors
    /// The collective's error.
    fn finish_gather(&mut self, stage: usize) -> CommResult<()>;
    /// The next F waits for each layer of its stage as it comes to it, and not before it begins.
    fn wait_by_layer(&mut self, waits: LayerWaits);
    /// What it has waited.
    fn take_waits(&mut self) -> Option<LayerWaits>;
    /// Whether the gather under way would be finished at once; false where that is not known.
    fn is_gathered(&mut self, stage: usize) -> bool;
    /// Drops the gathered weights.
    ///
    /// # Errors
    /// That of a gather still under way.
    fn free(&mut self, stage: usize) -> CommResult<()>;
    /// RS: starts reducing the unit's gradients into the shard.
    fn start_reduce(&mut self, stage: usize);
    /// Makes room for the reduction of the unit that has this micro-batch, whose layers are started
    /// by themselves, from the last to the first.
    fn begin_reduce(&mut self, stage: usize, micro_batch: usize);
    /// Starts reducing a layer.
    fn start_reduce_layer(&mut self, stage: usize, layer: usize);
    /// Waits for the reduction and adds it to the shard.
    ///
    /// # Errors
    /// The collective's error.
    fn finish_reduce(&mut self, stage: usize) -> CommResult<()>;
    /// Whether the reduction under way, so far, would be finished at once; false where that is not
    /// known. Begins the sums over the replicas of layers that are reduced.
    fn is_reduced(&mut self, stage: usize) -> bool;
    /// AR: sums the shard over the replicas once its reduction is finished.
    fn request_replica_reduce(&mut self, stage: usize);
    /// Whether the sum over the replicas is done; false where that is not known.
    fn is_replica_reduced(&mut self, stage: usize) -> bool;
    /// The step's last backward is done: starts reading what the update takes first, where a device
    /// has that on its host.
    fn read_ahead(&mut self) {}
    /// Finishes all reductions and updates the shards; `early` without waiting for the norm, so
    /// that the update may prove wrong.
    ///
    /// # Errors
    /// A collective's error.
    fn optimizer_step(&mut self, step: u64, early: bool) -> CommResult<StepOutcome>;
    /// Waits for the norm of an early update and says whether that was right; it is where there is
    /// none.
    ///
    /// # Errors
    /// A collective's error.
    fn was_right(&mut self) -> CommResult<bool>;
    /// Drops what the forwards of this step have made, and all gathered weights: the update before
    /// them was wrong.
    ///
    /// # Errors
    /// That of a gather still under way.
    fn drop_forwards(&mut self) -> CommResult<()>;
    /// Makes an early update right: leaves it, or goes back and does another or none. What the
    /// step did, where there was such an update.
    ///
    /// # Errors
    /// A collective's error.
    fn settle(&mut self) -> CommResult<Option<StepOutcome>>;

    /// Bytes this rank sends in one gather of the stage.
    fn gather_bytes(&self, stage: usize) -> u64;
    /// Bytes this rank sends in one reduction of the stage.
    fn reduce_bytes(&self, stage: usize) -> u64;
    /// Bytes this rank sends to sum the stage's shard over the replicas.
    fn replica_bytes(&self, stage: usize) -> u64;
}
