//! What a ledger counts of gradients, their reductions and sums.

use super::{Ledger, StageBytes};

impl Ledger<'_> {
    /// The sum of a stage over the replicas begins: layer by layer, where it is being reduced, so
    /// that layers of the share are there before the gradient goes.
    pub(super) fn sum(&mut self, stage: usize) {
        let under_way = [self.reducing, self.running];
        let is_reducing = under_way.iter().flatten().any(|(reducing, ..)| *reducing == stage);
        if is_reducing && !std::mem::replace(&mut self.summed[stage], true) {
            self.now.gradient_shard += self.of_stage(stage).gradient_shard;
        }
        let reduced = self.of_stage(stage).replica_reduced;
        self.replica_reduced += reduced;
        self.now.communication += reduced;
    }

    /// The reduction of a stage's gradient begins.
    pub(super) fn reduce(&mut self, stage: usize) -> (usize, u64, u64) {
        let reduced = self.of_stage(stage).reduced;
        self.now.communication += reduced;
        (stage, self.taken[stage], reduced)
    }

    /// The part of the unit's gradient that the forward with gradients makes, if it is the first.
    pub(super) fn forward_gradient(&mut self, stage: usize, micro_batch: usize) {
        let Some(first) = self.unit_of(stage, micro_batch) else { return };
        let StageBytes { keeps_first_gradient, gradient_in_forward, .. } = self.of_stage(stage);
        let stays = keeps_first_gradient && !self.begun[stage];
        let taken = if stays { 0 } else { gradient_in_forward };
        if self.ahead[first].is_none() {
            self.ahead[first] = Some(taken);
            self.begun[stage] = true;
            self.now.gradient += taken;
            if stays {
                self.summed[stage] = true;
                self.now.gradient_shard += gradient_in_forward;
            }
        }
    }

    /// The place in `ahead` of the unit that a micro-batch of a stage is in, where F makes a part
    /// of its gradient.
    fn unit_of(&self, stage: usize, micro_batch: usize) -> Option<usize> {
        let unit = (*self.units.get(self.places.of(stage, micro_batch))?)?;
        Some(self.places.of(stage, unit))
    }

    /// The first W of a unit: all of the gradient.
    pub(super) fn open(&mut self, stage: usize, micro_batch: usize) {
        self.updated();
        if self.open[stage] {
            return;
        }
        let bytes = self.of_stage(stage);
        self.open[stage] = true;
        let ahead = self.unit_of(stage, micro_batch).and_then(|unit| self.ahead[unit]);
        let stays = match ahead {
            Some(taken) => taken == 0 && bytes.keeps_first_gradient,
            None => bytes.keeps_first_gradient && !self.begun[stage],
        };
        self.taken[stage] = if stays { 0 } else { bytes.gradient };
        self.begun[stage] = true;
        self.now.gradient += self.taken[stage] - ahead.unwrap_or(0);
        if stays {
            self.summed[stage] = true;
            let made = if ahead.is_some() { bytes.gradient_in_forward } else { 0 };
            self.now.gradient_shard += bytes.gradient - made;
        }
    }

    /// The reduction under way, if there is one, is done.
    pub(super) fn retire(&mut self) {
        let Some((stage, gradient, reduced)) = self.reducing.take() else { return };
        self.now.gradient -= gradient;
        // What comes out is copied, or added: the engine keeps its buffer.
        if !std::mem::replace(&mut self.summed[stage], true) {
            self.now.gradient_shard += self.of_stage(stage).gradient_shard;
            self.mark();
        }
        self.now.communication -= reduced;
    }
}
