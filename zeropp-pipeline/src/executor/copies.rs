//! Copies of activations out of memory and in again, as the program says.

use super::flight::{Flight, RunningOperation};
use super::{Executor, StepError, Worker};
use crate::ir::Action;

impl<W: Worker> Executor<W> {
    /// OUT, GONE or IN; whether its span ends here.
    pub(super) fn copy(
        &mut self,
        f: &mut Flight,
        action: Action,
        span: usize,
    ) -> Result<bool, StepError> {
        match action {
            Action::Out { stage, micro_batch } => {
                self.worker.start_out(stage, micro_batch)?;
                self.copy_begun(f, (stage, micro_batch), span);
                Ok(false)
            }
            Action::Gone { stage, micro_batch } => {
                let at = (stage, micro_batch);
                self.pass_on_until(f, |this, _| this.worker.is_copied(stage, micro_batch))?;
                self.worker.finish_out(stage, micro_batch)?;
                self.copy_ended(f, at);
                Ok(true)
            }
            Action::In { stage, micro_batch } => {
                self.worker.start_in(stage, micro_batch);
                self.copy_begun(f, (stage, micro_batch), span);
                Ok(false)
            }
            _ => unreachable!("no copy"),
        }
    }

    /// R or a backward begins: waits for the copy that it needs, if there is one.
    pub(super) fn copied_in(
        &mut self,
        f: &mut Flight,
        stage: usize,
        micro_batch: usize,
    ) -> Result<(), StepError> {
        if !f.copies.contains_key(&(stage, micro_batch)) {
            return Ok(());
        }
        self.pass_on_until(f, |this, _| this.worker.is_copied(stage, micro_batch))?;
        self.worker.finish_in(stage, micro_batch)?;
        self.copy_ended(f, (stage, micro_batch));
        Ok(())
    }

    fn copy_begun(&self, f: &mut Flight, at: (usize, usize), span: usize) {
        f.copies.insert(at, span);
        f.running.push((RunningOperation::Copy(at.0, at.1), span));
    }

    fn copy_ended(&self, f: &mut Flight, at: (usize, usize)) {
        if let Some(span) = f.copies.remove(&at) {
            f.end_running(span, self.now());
        }
    }
}
