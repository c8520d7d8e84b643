//! Micro-batches that are slices of samples, and the contexts of the samples under way.

use std::sync::Arc;

use zeropp_core::split::{SampleContext, SliceCx};

use super::ModelWorker;

impl ModelWorker {
    fn slices(&self) -> usize {
        self.options.sample_slices.len().max(1)
    }

    /// The sample of a micro-batch, and which of its slices it is.
    pub(super) fn sample(&self, micro_batch: usize) -> (usize, usize) {
        (micro_batch / self.slices(), micro_batch % self.slices())
    }

    /// Samples, tokens of each and hidden size of a micro-batch: `[b, s, h]`.
    pub(super) fn dims(&self, micro_batch: usize) -> [usize; 3] {
        let [b, s, h] = self.options.dims;
        let (_, slice) = self.sample(micro_batch);
        [b, self.options.sample_slices.get(slice).copied().unwrap_or(s), h]
    }

    /// Whether samples are whole, or it is the last slice of its own; with the sample's number.
    pub(super) fn ends_sample(&self, micro_batch: usize) -> Option<usize> {
        let (sample, slice) = self.sample(micro_batch);
        (slice + 1 == self.slices()).then_some(sample)
    }

    /// What operations know of the slice, where samples are cut.
    pub(super) fn slice_cx(&self, stage: usize, micro_batch: usize) -> Option<SliceCx> {
        let (sample, slice) = self.sample(micro_batch);
        let context = self.contexts.get(&(stage, sample))?;
        Some(SliceCx::new(context, slice))
    }

    /// Before the F of a micro-batch: that of a sample's first slice begins its context.
    pub(super) fn begin_forward(&mut self, stage: usize, micro_batch: usize) {
        let (sample, slice) = self.sample(micro_batch);
        let slices = &self.options.sample_slices;
        if slice == 0 && !slices.is_empty() {
            let context = SampleContext::new(Arc::clone(slices));
            self.contexts.insert((stage, sample), context);
        }
    }

    /// After it: where no backward follows, the last slice's ends the context.
    pub(super) fn end_forward(&mut self, stage: usize, micro_batch: usize) {
        if self.evaluated.is_some()
            && let Some(sample) = self.ends_sample(micro_batch)
        {
            self.contexts.remove(&(stage, sample));
        }
    }

    /// Before the B of a micro-batch: that of a sample's last slice begins the sums that are handed
    /// on.
    pub(super) fn begin_backward(&mut self, stage: usize, micro_batch: usize) {
        if let Some(sample) = self.ends_sample(micro_batch)
            && let Some(context) = self.contexts.get(&(stage, sample))
        {
            context.begin_backward(&self.meter);
        }
    }

    /// After it: that of the first slice ends the context.
    pub(super) fn end_backward(&mut self, stage: usize, micro_batch: usize) {
        let (sample, slice) = self.sample(micro_batch);
        let Some(context) = self.contexts.get(&(stage, sample)) else { return };
        match slice {
            0 => drop(self.contexts.remove(&(stage, sample))),
            _ => context.end_backward(slice),
        }
    }
}
