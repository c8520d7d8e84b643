//! This rank's slice of a split head, and the loss where the rank is the root of its messages.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use zeropp_core::layer::Part;
use zeropp_core::meter::MemoryKind;
use zeropp_core::split::ops::{HeadSlice, SplitHead, sums_len};
use zeropp_core::split::{OpCx, SampleContext, Saved, SliceCx, Weight, is_finite};

use super::super::error::StepError;
use super::super::not_finite::Value;
use super::super::worker::Worker;
use super::ModelWorker;
use crate::ir::HeadMessage;

impl ModelWorker {
    fn split_head(&self) -> &(SplitHead, usize) {
        self.options.head.as_ref().expect("the program splits the head")
    }

    /// This rank's slice, its rows and the context of its operations.
    fn slice(
        &mut self,
        micro_batch: usize,
    ) -> Result<(Arc<HeadSlice>, Weight<2>, OpCx), StepError> {
        let stage = self.split_head().1;
        let queue = self.queues.entry((stage, micro_batch)).or_default().clone();
        let token = Tensor::<1>::zeros([1], self.gradients_on());
        let op = self.op_cx(stage, micro_batch, queue, None, token)?;
        // Of other slices it needs to know how long the sample is.
        let context = || SampleContext::new(Arc::clone(&self.options.sample_slices));
        let is_cut = !self.options.sample_slices.is_empty();
        let cut = is_cut.then(|| SliceCx::new(&context(), self.sample(micro_batch).1));
        let op = OpCx { slice: cut, ..op };
        let this = &self.stages[&stage];
        let [Part::Slice(slice)] = &this.parts[..] else {
            unreachable!("the stage of a split head has a slice")
        };
        let w = this.weights[0].weight(&slice.parameters()[0].name);
        Ok((slice.clone(), w, op))
    }

    pub(super) fn message_of_head(
        &self,
        message: HeadMessage,
        micro_batch: usize,
        tensors: usize,
    ) -> (usize, DType) {
        let ([_, _, hidden], n) = (self.options.dims, self.head_tokens(micro_batch));
        match message {
            HeadMessage::Input => (n * hidden, self.options.compute),
            HeadMessage::Sums => (sums_len(n, tensors), DType::F32),
            HeadMessage::Lse => (2 * n, DType::F32),
            HeadMessage::Gradient => (tensors * n * hidden, DType::F32),
        }
    }

    pub(super) fn forward_of_slice(
        &mut self,
        micro_batch: usize,
        x: Tensor<1>,
    ) -> Result<Tensor<1>, StepError> {
        let x = x.reshape(self.dims(micro_batch));
        let x = Saved::new(x, MemoryKind::Activation, &self.meter);
        let (source, step) = self.source();
        let (_, targets) = (source.tokens)(step, micro_batch)?;
        let (slice, w, cx) = self.slice(micro_batch)?;
        let (sums, kept) = slice.forward(x, targets.inner(), &w, &cx);
        if self.evaluated.is_none() {
            self.slices.insert(micro_batch, kept);
        }
        Ok(sums)
    }

    pub(super) fn backward_of_slice(
        &mut self,
        micro_batch: usize,
        totals: &Tensor<1>,
    ) -> Result<Vec<Tensor<1>>, StepError> {
        let kept = self.slices.remove(&micro_batch).expect("B follows its F");
        let (slice, w, cx) = self.slice(micro_batch)?;
        Ok(slice.backward(kept, totals, self.options.loss_scale, &w, &cx))
    }

    pub(super) fn loss_of_head(
        &mut self,
        micro_batch: usize,
        sums: &Tensor<1>,
    ) -> Result<Tensor<1>, StepError> {
        let (source, step) = self.source();
        let (_, targets) = (source.tokens)(step, micro_batch)?;
        let masks = source.masks(step, micro_batch, true)?;
        let (head, stage) = self.split_head();
        let (name, stage) = (head.name.clone(), *stage);
        let mut sum = self.loss_of_sample;
        let [b, s, _] = self.options.dims;
        let (totals, loss) = head.loss(sums, targets.inner(), &masks, b * s, &mut sum);
        let ended = self.ends_sample(micro_batch);
        self.loss_of_sample = if ended.is_some() { 0.0 } else { sum };
        if let Some(search) = &mut self.search
            && !is_finite(&loss)
        {
            search.note(Value::Output, micro_batch, stage, 0, name);
        }
        self.losses.extend(ended.map(|sample| (sample, loss)));
        Ok(totals)
    }
}
