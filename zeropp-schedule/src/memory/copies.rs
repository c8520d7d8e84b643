//! What a ledger counts of activations that are out of the rank's memory.

use super::{Ledger, StageBytes};

impl StageBytes {
    /// What a micro-batch's F keeps until its R, where it is `recomputed`, or until its backward:
    /// all of that is copied out.
    pub fn kept(&self, recomputed: bool) -> u64 {
        match (recomputed, self.layerwise) {
            (false, _) => self.activation,
            (true, Some(layers)) => layers.inputs,
            (true, None) => self.input,
        }
    }
}

impl Ledger<'_> {
    pub(super) fn kept(&self, stage: usize, micro_batch: usize) -> u64 {
        let recomputed = self.recomputed[self.places.of(stage, micro_batch)];
        self.bytes(stage, micro_batch).kept(recomputed)
    }

    pub(super) fn copy_out(&mut self, stage: usize, micro_batch: usize) {
        let place = self.places.of(stage, micro_batch);
        self.out[place] = true;
        self.now.host_activation += self.kept(stage, micro_batch);
    }

    /// Its R or its backward begins: what was out has come in.
    pub(super) fn copied_in(&mut self, stage: usize, micro_batch: usize) {
        let place = self.places.of(stage, micro_batch);
        if std::mem::take(&mut self.out[place]) {
            self.now.host_activation -= self.kept(stage, micro_batch);
        }
    }
}
