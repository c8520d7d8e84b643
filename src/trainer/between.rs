//! Requests of a program to a run between two of its steps.

use zeropp_core::metrics::Evaluation;

use crate::Error;
use crate::config::ConfigError;
use crate::run::request::{StepAnswer, StepRequest};
use crate::run::results::RankEvent;
use crate::run::stop::StopRequest;
use crate::trainer::NamedWeights;
use crate::trainer::steps::Steps;
use crate::trainer::train::assemble;

impl Steps<'_> {
    /// The weights as the step that was last seen has left them, the run's last one too, whole, for
    /// models that fit in one memory. The ranks wait meanwhile, and no bit of the training changes.
    /// Of several processes rank 0's has them, and the others get none; all of them ask after the
    /// same step.
    ///
    /// # Errors
    /// No step was seen, or the run has been asked to stop, or has ended; a rank that failed; with
    /// `optimizer-sync = late`, steps that the ranks did not wait after.
    pub fn weights(&mut self) -> Result<NamedWeights, Error> {
        let results = self.ask(StepRequest::Weights, |news| match news {
            RankEvent::Weights(results) => Some(results),
            _ => None,
        })?;
        let bp = self.blueprint();
        Ok(assemble(bp, results, bp.mesh.zero3))
    }

    /// The validation loss of the weights as the step that was last seen has left them. It is none
    /// of those that `patience` and `keep-best` look at, and no bit of the training changes. Of
    /// several processes all ask after the same step, and all have it.
    ///
    /// # Errors
    /// As [`weights`](Self::weights); settings, and a builder, that name no validation data.
    pub fn evaluate(&mut self) -> Result<Evaluation, Error> {
        self.trainer().check_evaluates()?;
        self.ask(StepRequest::Evaluation, |news| match news {
            RankEvent::Evaluated(evaluation) => Some(evaluation),
            _ => None,
        })
    }

    /// Saves the step that was last seen: its checkpoint is begun as the next step is, is written
    /// behind the steps, and is whole at the run's end at the latest. A later step is saved in its
    /// place where this one was skipped, or the save before is still being written.
    ///
    /// # Errors
    /// As [`weights`](Self::weights); settings without a folder to save in.
    pub fn save(&mut self) -> Result<(), Error> {
        if !self.trainer().saves() {
            let help = "name a folder for checkpoints with save";
            return Err(ConfigError::value("save", "", "the run saves nowhere", help).into());
        }
        self.step_between()?;
        self.stop_request = StopRequest::Save;
        Ok(())
    }

    /// The step that ranks wait after.
    fn step_between(&self) -> Result<u64, Error> {
        let problem = match self.waits_after {
            Some(step) if !self.stops => return Ok(step),
            Some(_) => "the run was told to stop",
            None if self.over => "the run has ended",
            None if self.blueprint().schedule().validates_late() => {
                "with optimizer-sync = late the ranks did not wait after this step"
            }
            None => "no step was seen yet",
        };
        Err(Error::Program(format!("nothing can be asked of the run here: {problem}")))
    }

    /// Asks all ranks for something, and waits for what rank 0's process, or this one, gets.
    fn ask<T>(
        &mut self,
        request: StepRequest,
        mut taken: impl FnMut(RankEvent) -> Option<T>,
    ) -> Result<T, Error> {
        let step = self.step_between()?;
        let _in_run = self.span.clone().entered();
        self.send(StepAnswer::First(request));
        loop {
            match self.epoch.ranks.next_news() {
                // Steps that a recovery does again, up to where the program is.
                Some(RankEvent::Step(metrics, ..)) if self.recoveries.is_redone(&metrics) => {
                    self.awaiting_reply = true;
                    match metrics.step == step {
                        true => self.send(StepAnswer::First(request)),
                        false => self.answer(StopRequest::GoOn),
                    }
                }
                Some(RankEvent::Step(..)) => {
                    let problem = "rank 0's process has not asked for the same after this step";
                    return Err(Error::Program(format!("step {step}: {problem}")));
                }
                Some(RankEvent::Ready(_)) => self.epoch.let_begin(),
                Some(RankEvent::Recut(blueprint)) => self.take_cut(blueprint),
                Some(news) => {
                    if let Some(got) = taken(news) {
                        return Ok(got);
                    }
                }
                None if self.recovers() => {}
                None => {
                    let gone = || Error::Program(format!("the run ended after step {step}"));
                    return Err(self.conclude().err().unwrap_or_else(gone));
                }
            }
        }
    }

    fn send(&self, answer: StepAnswer) {
        if let Some(answers) = &self.epoch.answers {
            // Where rank 0 has failed, its failure comes next.
            let _ = answers.send(answer);
        }
    }
}
