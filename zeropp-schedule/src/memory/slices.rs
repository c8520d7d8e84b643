//! What a ledger counts of slices of samples.

use super::{Ledger, StageBytes};

impl Ledger<'_> {
    /// What there is of a stage for a micro-batch, or a slice.
    pub(super) fn bytes(&self, stage: usize, micro_batch: usize) -> StageBytes {
        self.stages[stage * self.slices + micro_batch % self.slices]
    }

    /// What there is of a stage whatever the micro-batch.
    pub(super) fn of_stage(&self, stage: usize) -> StageBytes {
        self.bytes(stage, 0)
    }

    /// The sum over the first slices of a sample.
    pub(super) fn sum_to(&self, stage: usize, slices: usize, of: fn(&StageBytes) -> u64) -> u64 {
        self.stages[stage * self.slices..][..slices].iter().map(of).sum()
    }

    /// At a sample's first backward, that of its last slice: the gradients of the keys and values
    /// of all slices before it.
    pub(super) fn context_gradients(&mut self, stage: usize, micro_batch: usize) {
        let before = micro_batch % self.slices;
        if before + 1 == self.slices {
            self.now.activation += self.sum_to(stage, before, |s| s.context_gradient);
        }
    }
}
