//! Updates that are done before the norm is known, and validated later (ADR 58).

use std::collections::HashMap;

use zeropp_comm::CommResult;

use crate::layer_sums::LayerSums;
use crate::optimizer::{Early, Optimizer, StepOutcome, norm_of};
use crate::returning::Returning;
use crate::rollback::LayerBefore;
use crate::rule::StepScale;
use crate::stage::ShardedStage;
use crate::tied;

impl Optimizer {
    /// As [`step`](Self::step), but without waiting for the norm, as if nothing was to be clipped
    /// and all was finite: [`settle`](Self::settle) makes it right, and is called before the next
    /// step. The outcome has a norm that is not a number until then. Takes as much memory again as
    /// what is updated, its state and its gradient.
    ///
    /// # Errors
    /// A collective's error.
    pub fn step_early(
        &mut self,
        stages: &mut [ShardedStage],
        step: u64,
    ) -> CommResult<StepOutcome> {
        assert!(self.early.is_none(), "the update before is validated first");
        assert!(self.file.is_none(), "what was before an update is kept in memory");
        stages.iter_mut().try_for_each(ShardedStage::finish_replica_reduce)?;
        let sent_bytes = self.sum_gradients(stages)?;
        self.watch_gradients(stages);
        self.wait_for_readers()?;
        let norm = self.start_norm(stages)?;
        self.updates += 1;
        let lr = (self.options.lr)(step);
        let grad_norm = f64::NAN;
        let mut outcome = StepOutcome { grad_norm, lr, sent_bytes, ..StepOutcome::default() };
        let scale = StepScale { lr, update: self.updates, gradient: 1.0 };
        let mut before = Vec::new();
        self.update(stages, &scale, &mut outcome, Some(&mut before))?;
        stages.iter_mut().for_each(ShardedStage::clear_grads);
        let (norm, update) = (Some(norm), self.updates);
        self.early = Some(Early { norm, outcome, update, before, summed_bytes: sent_bytes });
        Ok(outcome)
    }

    /// Waits for the norm of the update that is not validated, if there is one, and says whether
    /// that update was right; the same on all ranks. It is right where there is none.
    ///
    /// # Errors
    /// A collective's error.
    pub fn was_right(&mut self) -> CommResult<bool> {
        let Some(mut early) = self.early.take() else { return Ok(true) };
        if let Some(norm) = early.norm.take() {
            let grad_norm = norm_of(norm)?;
            (early.outcome.grad_norm, early.outcome.skipped) = (grad_norm, !grad_norm.is_finite());
        }
        let StepOutcome { grad_norm, skipped, .. } = early.outcome;
        self.early = Some(early);
        Ok(!skipped && self.factor(grad_norm) == 1.0)
    }

    /// Makes the update that is not validated right, if there is one: where it was wrong, goes back
    /// to the weights and the state before it and does the right one, or none. Nothing of `stages`
    /// is gathered or reduced meanwhile. Returns what the step did.
    ///
    /// # Errors
    /// A collective's error.
    pub fn settle(&mut self, stages: &mut [ShardedStage]) -> CommResult<Option<StepOutcome>> {
        let right = self.was_right()?;
        let Some(Early { mut outcome, update, before, summed_bytes, .. }) = self.early.take()
        else {
            return Ok(None);
        };
        if !right {
            let (lr, gradient) = (outcome.lr, self.factor(outcome.grad_norm));
            self.updates = if outcome.skipped { update - 1 } else { update };
            let scale = StepScale { lr, update, gradient };
            let scale = (!outcome.skipped).then_some(&scale);
            (outcome.gathers, outcome.sent_bytes) = (0, summed_bytes);
            outcome.rolled_back = true;
            let watched = self.watched.iter_mut().flat_map(HashMap::values_mut);
            watched.for_each(LayerSums::forget_update);
            self.update_again(stages, before, scale, &mut outcome)?;
            stages.iter_mut().for_each(ShardedStage::clear_grads);
        }
        Ok(Some(outcome))
    }

    /// Goes back to what was `before` and updates again; not without a `scale`.
    fn update_again(
        &mut self,
        stages: &mut [ShardedStage],
        mut before: Vec<LayerBefore>,
        scale: Option<&StepScale>,
        outcome: &mut StepOutcome,
    ) -> CommResult<()> {
        before.iter_mut().for_each(LayerBefore::release);
        let moving = self.move_state();
        let mut all = std::mem::take(&mut self.state);
        tied::release(stages, self.options.tie);
        let mut returning = Returning::default();
        for LayerBefore { at: (s, i), input, state: kept, .. } in before {
            let (stage, state) = (&mut stages[s], &mut all[s][i]);
            kept.restore(state);
            let place = self.place(stage, i);
            drop(stage.layers[i].take_param());
            let param = self.update_layer(stage, &place, input, state, scale, outcome)?;
            returning.next(stages, &self.meter, (s, i), param)?;
        }
        returning.finish(stages, &self.meter)?;
        self.state = all;
        self.return_parameters(stages, outcome)?;
        drop(moving);
        self.hold_state();
        Ok(())
    }
}
