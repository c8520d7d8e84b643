//! A rank's part of saving behind the steps (ADR 34), on disk or as a copy in memory (ADR 50): when
//! a save begins, what of it a rank waits for, and how it ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use tracing::{Span, debug, info_span, warn};
use zeropp_checkpoint::pace::{NextSave, SaveDecision};
use zeropp_checkpoint::step_end::{MetStep, StepEnds};
use zeropp_checkpoint::under_way::{Completing, Save, SaveOutcome, WriterReport};
use zeropp_comm::Communicator;
use zeropp_comm::patience::Deadline;
use zeropp_core::threads::BackgroundThread;
use zeropp_pipeline::executor::ModelWorker;
use zeropp_pipeline::timeline::SaveSpan;
use zeropp_zero3::checkpoint::{CheckpointError, StateToWrite};

use crate::checkpoint::writer::{RankSave, Writing};
use crate::checkpoint::{Saver, copies, no_thread};
use crate::error::RankError;
use crate::events;

/// A rank's part of the saves of a [`Saver`]: when each begins and ends, and what the rank waits
/// for.
pub(crate) struct Saving {
    saver: Arc<Saver>,
    world: Arc<dyn Communicator>,
    /// Whether rank 0 is in this process.
    is_here: bool,
    /// The rank's: a save belongs to it, and not to the step in which it ends.
    span: Span,
    writing: Option<Writing>,
    writer: BackgroundThread,
    /// Nanoseconds that saving has kept the rank from its work since it was asked last.
    blocked_ns: Arc<AtomicU64>,
    /// Step of the newest checkpoint of this run that is complete; known to rank 0, and in the end
    /// to all.
    pub(crate) saved: Option<u64>,
    // Rank 0 alone:
    /// The save that waits for the one before.
    last: Option<Save>,
    /// A save that has ended and has not been reported yet.
    ended: Option<SaveOutcome>,
    /// A copy could not be made, so none are any more.
    given_up: bool,
    /// The saves that a trace shows.
    log: Vec<Arc<RankSave>>,
}

impl Saving {
    /// # Errors
    /// The system grants no thread that writes.
    pub(crate) fn new(
        saver: &Arc<Saver>,
        world: &Arc<dyn Communicator>,
        is_here: bool,
    ) -> Result<Saving, CheckpointError> {
        let name = format!("saver {}", world.rank());
        let writer = BackgroundThread::start(&name).map_err(|e| no_thread(saver.folder(), &e))?;
        Ok(Saving {
            saver: saver.clone(),
            world: world.clone(),
            is_here,
            span: Span::current(),
            writing: None,
            writer,
            blocked_ns: Arc::default(),
            saved: None,
            last: None,
            ended: None,
            given_up: false,
            log: Vec::new(),
        })
    }

    /// Nanoseconds that saving has kept the rank from its work since this was asked last.
    pub(crate) fn take_blocked_ns(&self) -> u64 {
        self.blocked_ns.swap(0, Ordering::Relaxed)
    }

    /// The report of this rank's writer for rank 0, once it is done.
    pub(crate) fn take_report(&mut self) -> Option<WriterReport> {
        let report = self.writing.as_ref()?.report()?;
        self.writing = None;
        report
    }

    /// On rank 0: notes the `reports` of other processes and looks whether a save has ended.
    ///
    /// # Errors
    /// It has failed, and there is no older checkpoint.
    pub(crate) fn look(&mut self, reports: Vec<WriterReport>) -> Result<(), RankError> {
        reports.into_iter().for_each(|report| self.saver.note(report));
        let ended = self.ended.take().into_iter().chain(self.saver.under_way.take());
        ended.into_iter().try_for_each(|outcome| self.conclude(outcome, false))
    }

    /// On rank 0: whether a save has not ended yet.
    pub(crate) fn is_under_way(&self) -> bool {
        self.last.is_some() || self.saver.under_way.step().is_some()
    }

    /// On rank 0: whether a save begins after a step, where one is `wanted`, as `ends` decides.
    pub(crate) fn decide(
        &mut self,
        wanted: NextSave,
        met: &MetStep,
        updates: u64,
        ends: &mut StepEnds,
    ) -> SaveDecision {
        let (step, is_copy) = (met.step, self.saver.is_copier);
        if wanted == NextSave::Nothing || self.given_up {
            return SaveDecision::No;
        }
        let save = self.saver.save_of(step, updates, !met.skipped);
        if wanted == NextSave::UnlessUnderWay {
            // While the program looked at the step, the save before may have ended, or is about to.
            let begin = Instant::now();
            self.saver.under_way.await_completion(Completing::AtStepEnd);
            self.blocked_ns.fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
            self.ended = self.ended.take().or_else(|| self.saver.under_way.take());
        }
        let before = self.saver.under_way.step();
        let (begin, tells) = ends.begins(wanted, is_copy, before.is_some());
        match begin {
            SaveDecision::Now => self.saver.under_way.begin(save),
            SaveDecision::AfterTheOneBefore => self.last = Some(save),
            SaveDecision::No if tells => warn_left_out(is_copy, step, before.unwrap_or_default()),
            SaveDecision::No => {}
        }
        begin
    }

    /// The spans of this rank's saves for a trace, in its times.
    pub(crate) fn spans(&self) -> impl Iterator<Item = SaveSpan> {
        self.log.iter().map(|log| log.span())
    }

    /// Hands the state after `step` to this rank's writer. All ranks call it after the same step.
    /// With a `zero` of times it stands in the trace.
    pub(crate) fn begin(&mut self, step: u64, worker: &mut ModelWorker, zero: Option<Instant>) {
        let begin = Instant::now();
        let (rank, is_copy) = (self.world.rank(), self.saver.is_copier);
        let save = Arc::new(RankSave::begin(rank, step, is_copy, zero.unwrap_or(begin)));
        self.log.extend(zero.map(|_| save.clone()));
        let state = StateToWrite::of(worker.sharded(), worker.optimizer());
        let (writing, released) =
            Writing::start(&self.writer, &self.saver, self.is_here, &save, state);
        self.writing = Some(writing);
        let (world, patience) = (self.world.clone(), self.saver.patience);
        let blocked = self.blocked_ns.clone();
        let block = move |since: Instant| {
            let ns = since.elapsed().as_nanos() as u64;
            save.block(ns);
            blocked.fetch_add(ns, Ordering::Relaxed);
        };
        block(begin);
        worker.hold_update_back(move || {
            let begin = Instant::now();
            // Ranks that have nothing to wait for meet the others meanwhile: the disk is slow, and
            // no rank is dead.
            patience.meet_until_done(&*world, "writing the checkpoint", &released)?;
            block(begin);
            Ok(())
        });
    }

    /// Waits until the save under way, if any, has ended; `must` says that the run ends with it.
    /// The run's last save may begin then. All ranks call it.
    ///
    /// # Errors
    /// A save that failed and is the last, or leaves the run without a checkpoint; the world's
    /// first error.
    pub(crate) fn settle(&mut self, must: bool) -> Result<(), RankError> {
        let (world, patience) = (self.world.clone(), self.saver.patience);
        let mine = self.writing.take();
        let all = patience.exchange(&*world, "writing the checkpoint", || {
            let report = mine.and_then(Writing::wait);
            Ok(serde_json::to_vec(&report).expect("plain data"))
        })?;
        let all = patience.exchange(&*world, "completing the checkpoint", || {
            if world.rank() == 0 {
                let read = |bytes: &Vec<u8>| serde_json::from_slice::<Option<WriterReport>>(bytes);
                let reports = all.iter().filter_map(|bytes| read(bytes).expect("of a rank"));
                reports.for_each(|report| self.saver.note(report));
                if let Some(outcome) = self.ended.take() {
                    self.conclude(outcome, false)?;
                }
                let (limit, under_way) = (Deadline::after(patience.limit), &self.saver.under_way);
                let ended = limit.until(|slice| match under_way.step() {
                    None => Some(None),
                    Some(_) => under_way.wait(slice).map(Some),
                });
                if let Some(outcome) = ended.flatten() {
                    self.conclude(outcome, must)?;
                }
                self.check_ended()?;
                self.last.take().into_iter().for_each(|save| self.saver.under_way.begin(save));
            }
            Ok(serde_json::to_vec(&self.saved).expect("a number"))
        })?;
        self.saved = serde_json::from_slice(&all[0]).expect("written by rank 0");
        Ok(())
    }

    /// No save is under way any more: a run that was waiting for its last one does not end well
    /// without it. A copy in memory that takes too long is given up.
    fn check_ended<E: From<CheckpointError>>(&mut self) -> Result<(), E> {
        let Some(step) = self.saver.under_way.step() else { return Ok(()) };
        let limit_s = self.saver.patience.limit.as_secs_f64();
        let problem = format!("it takes longer than timeout-s:save = {limit_s}");
        let error = CheckpointError::NotWritten { step, problem };
        if self.saver.is_copier {
            (self.given_up, self.last) = (true, None);
            copies::without(&error.to_string());
            return Ok(());
        }
        Err(error.into())
    }

    /// Reports how a save ended. One that failed is no reason to end a run that has another.
    fn conclude<E: From<CheckpointError>>(
        &mut self,
        outcome: SaveOutcome,
        must: bool,
    ) -> Result<(), E> {
        let is_copy = self.saver.is_copier;
        let is_fatal = !is_copy && outcome.is_fatal(must, || self.saver.has_any());
        let SaveOutcome { step, result, left } = outcome;
        match result {
            Ok(()) if is_copy => debug!("step {step} is copied in memory"),
            Err(error) if is_copy => {
                self.given_up = true;
                copies::without(&error.to_string());
            }
            Ok(()) => {
                self.saved = Some(step);
                let saved = || events::saved(step, &self.saver.path(step));
                info_span!(parent: &self.span, "checkpoint", step).in_scope(saved);
            }
            Err(error) if is_fatal => return Err(error.into()),
            Err(error) => warn!("{error}; the run goes on, and the checkpoint before it stays"),
        }
        self.saver.tell(left);
        Ok(())
    }
}

/// Reports that a save after `step` is left out for the one of step `before`.
fn warn_left_out(is_copy: bool, step: u64, before: u64) {
    match is_copy {
        true => warn!(
            "copies:every: no copy after step {step}, as that of step {before} is still being \
             written; use a larger one. This is reported once"
        ),
        false => warn!(
            "save-every: no checkpoint after step {step}, as that of step {before} is still being \
             written; use a faster folder or a larger save-every. This is reported once"
        ),
    }
}
