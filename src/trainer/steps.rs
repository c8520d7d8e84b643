//! A run under way: its steps one by one, and its end.

use std::sync::Arc;
use std::time::Instant;

use tracing::{Span, error, info_span, warn};
use zeropp_checkpoint::under_way::Completing;
use zeropp_comm::Communicator;
use zeropp_core::data::DataError;
use zeropp_core::device::Devices;
use zeropp_core::meter::MemoryBytes;
use zeropp_core::metrics::{Evaluation, RunHeader, StepMetrics, Summary};
use zeropp_failures::EndKind;
use zeropp_zero3::checkpoint::StoreLock;

use crate::Error;
use crate::checkpoint::Saver;
use crate::checkpoint::copies;
use crate::checkpoint::resume::{Loader, Resumed};
use crate::config::OnLoss;
use crate::events;
use crate::plan::blueprint::Blueprint;
use crate::plan::fits;
use crate::recorder;
use crate::run::failed::MEANWHILE;
use crate::run::figures::StageTimes;
use crate::run::measured;
use crate::run::request::StepAnswer;
use crate::run::results::{RankEnd, RankEvent, RankResult, Ready};
use crate::run::shared::Export;
use crate::run::stop::StopRequest;
use crate::run::totals::Totals;
use crate::run::trace;
use crate::telemetry::{Prometheus, Telemetry, header};
use crate::trainer::Trainer;
use crate::trainer::costs;
use crate::trainer::epoch::{Epoch, EpochInputs};
use crate::trainer::health::Health;
use crate::trainer::recovery::{Recoveries, RecoveryAnswer};
use crate::trainer::timeline::timeline;

/// A run under way: an iterator over its steps. The ranks begin a step when it is asked for, and
/// end when this is dropped, after the step that was last seen, which is saved if the run saves.
///
/// With `optimizer-sync = late` up to three more steps follow the one that was last seen; they are
/// run and given before the end.
///
/// In a process without rank 0 the ranks do not wait to be asked, and dropping this ends the whole
/// run after one of the next steps.
pub struct Steps<'a> {
    trainer: &'a Trainer,
    /// Of the replicas that are left, where some were lost, and of the stages that the run has now.
    changed: Option<Trainer>,
    /// What was predicted of those before it.
    predicted_before: (MemoryBytes, u64),
    lost_replicas: u64,
    pub(super) epoch: Epoch,
    pub(super) recoveries: Recoveries,
    /// Whether the step that was reported last waits for what is to follow.
    pub(super) awaiting_reply: bool,
    /// The step that was reported last, where all ranks wait after it.
    pub(super) waits_after: Option<u64>,
    /// The wish after that step, where another one is asked for.
    pub(super) stop_request: StopRequest,
    /// The program wants no more steps.
    pub(super) stops: bool,
    lock: Option<StoreLock>,
    /// That of the copies.
    copy_lock: Option<StoreLock>,
    resumed: Option<Resumed>,
    no_lower: Option<u64>,
    begin: Instant,
    /// When the first step began: seconds since 1970.
    began_at: f64,
    telemetry: Telemetry,
    totals: Totals,
    times: StageTimes,
    /// The devices, on which the ranks of a recovery compute, too.
    devices: Devices,
    /// Why the run ends, where that is found out before all of it has.
    failed: Option<Error>,
    outcome: Option<Summary>,
    pub(super) over: bool,
    health: Health,
    pub(super) span: Span,
    export: Export,
}

impl<'a> Steps<'a> {
    /// Starts the ranks over a given world, or over one with the engine of the settings, and
    /// returns once their state is ready for the first step.
    pub(crate) fn start(
        trainer: &'a Trainer,
        given: Option<Vec<Arc<dyn Communicator>>>,
        export: Export,
    ) -> Result<Steps<'a>, Error> {
        let (bp, found) = (&trainer.blueprint, &trainer.found);
        let devices = match &given {
            Some(_) => bp.config.devices()?,
            None => trainer.devices()?,
        };
        fits::check(bp)?;
        if bp.config.on_loss == OnLoss::Shrink {
            // Known before it is needed.
            trainer.with_fewer_replicas()?;
        }
        let span = info_span!("run", schedule = %bp.schedule().kind, mesh = %bp.mesh);
        let entered = span.clone().entered();
        // Before any rank starts: a file may be of another kind, the port may be taken.
        let prometheus = match is_watched(export) && bp.config.has_rank_0()? {
            true => {
                let resumed = found.resumed.as_ref().map(|resumed| resumed.step);
                Telemetry::check(&bp.config, resumed)?;
                Prometheus::start(&bp.config)?
            }
            false => None,
        };
        let data = &trainer.data.0;
        let (saver, lock) = begun(export, || Saver::start(bp, data, found.newest))?;
        let (copier, copy_lock) = begun(export, || Saver::of_copies(bp, data, found.place))?;
        if lock.is_some() {
            found.passed_over.iter().for_each(|text| warn!("{text}"));
        }
        let recoveries = Recoveries::new(bp, export, given.is_some());
        let loader = Loader::new(bp, &trainer.data.0, found);
        let begin = EpochInputs { given, export, peak: None, saver, copier, loader };
        let epoch = Epoch::start(trainer, &devices, begin, &span)?;
        let mut steps = Steps {
            trainer,
            changed: None,
            predicted_before: Default::default(),
            lost_replicas: 0,
            epoch,
            devices,
            recoveries,
            awaiting_reply: false,
            waits_after: None,
            stop_request: StopRequest::GoOn,
            stops: false,
            lock,
            copy_lock,
            resumed: None,
            no_lower: None,
            begin: Instant::now(),
            began_at: 0.0,
            telemetry: Telemetry::default(),
            totals: Totals::default(),
            times: StageTimes::default(),
            failed: None,
            outcome: None,
            over: false,
            health: Health::new((!bp.own.masks_nothing).then_some(bp.model.vocabulary)),
            span,
            export,
        };
        steps.await_ready(prometheus)?;
        drop(entered);
        Ok(steps)
    }

    /// Waits for the state of the first step, and opens what is written of steps where it says.
    fn await_ready(&mut self, prometheus: Option<Prometheus>) -> Result<(), Error> {
        match self.epoch.ranks.next_news() {
            Some(RankEvent::Ready(Ready { at, resumed, no_lower })) => {
                self.began_at = at;
                self.no_lower = no_lower;
                self.recoveries.begin(resumed.as_ref().map_or(0, |resumed| resumed.step));
                self.resumed = resumed;
                if self.has_rank_0() && is_watched(self.export) {
                    let config = &self.trainer.blueprint.config;
                    match Telemetry::open(config, &self.header(), prometheus) {
                        Ok(telemetry) => self.telemetry = telemetry,
                        Err(error) => return Err(self.end_before_begin(error)),
                    }
                }
                self.begin = Instant::now();
                if self.has_rank_0() {
                    let bp = &self.trainer.blueprint;
                    let done = self.resumed.as_ref().map(|resumed| resumed.step);
                    events::begin(&bp.config, &bp.plan, done);
                }
                self.epoch.let_begin();
                Ok(())
            }
            Some(_) => unreachable!("a rank is ready before its first step"),
            None => Err(self.conclude().err().expect("a rank that is not ready has failed")),
        }
    }

    /// Ends ranks that wait for their first step: nothing is trained, and nothing saved.
    fn end_before_begin(&mut self, why: Error) -> Error {
        self.over = true;
        if let Some(recorder) = &self.epoch.ranks.context.recorder {
            // That they are ended is no failure of theirs.
            recorder.withdraw();
        }
        self.epoch.answers = None;
        while self.epoch.ranks.next_news().is_some() {}
        self.close_savers();
        self.trainer.stopper.end();
        why
    }

    /// Ends what failed ranks may have left behind of a save.
    fn close_savers(&self) {
        if let (Some(saver), Some(_)) = (&self.epoch.saver, &self.lock) {
            saver.close();
        }
        if let (Some(copier), Some(_)) = (&self.epoch.copier, &self.copy_lock) {
            copier.close();
        }
    }

    /// The trainer that is run: with the replicas that are left, and the stages that there are now.
    pub(super) fn trainer(&self) -> &Trainer {
        self.changed.as_ref().unwrap_or(self.trainer)
    }

    pub(crate) fn blueprint(&self) -> &Arc<Blueprint> {
        &self.trainer().blueprint
    }

    /// The checkpoint that the run has gone on from, if it did.
    pub fn resumed(&self) -> Option<&Resumed> {
        self.resumed.as_ref()
    }

    /// How many validation losses in a row were no lower in the checkpoint that the run has gone on
    /// from, where the settings wait for no more (`patience`): then there are no steps.
    pub fn no_lower(&self) -> Option<u64> {
        self.no_lower
    }

    /// The run's facts, as the first line of its metrics has them.
    pub fn header(&self) -> RunHeader {
        let bp = &self.trainer.blueprint;
        header(&bp.config, &bp.plan, self.began_at, self.resumed().map(|resumed| resumed.step))
    }

    /// Whether this process has rank 0.
    pub(crate) fn has_rank_0(&self) -> bool {
        self.epoch.ranks.context.here[0] == 0
    }

    /// Ends the run after the step that was last seen, saved if the run saves. The iterator then
    /// has no more steps.
    pub fn stop(&mut self) {
        match self.epoch.answers.is_some() && self.awaiting_reply {
            true => {
                self.stops = true;
                self.answer(StopRequest::Stop(0));
            }
            false => self.trainer.stopper.stop(),
        }
    }

    /// Ends the run, if it has not ended, and says what came of it.
    ///
    /// # Errors
    /// As [`Trainer::train`]; a failure that the iterator has given already is not reported in full
    /// again.
    pub fn finish(mut self) -> Result<Summary, Error> {
        if !self.over {
            self.stop();
            while self.next_step().is_some() {}
            return self.conclude().map(|(summary, _)| summary);
        }
        self.outcome.take().ok_or(Error::FailedBefore)
    }

    /// The evaluation that the ranks were started for.
    pub(crate) fn evaluation(mut self) -> Result<Evaluation, Error> {
        let evaluation = match self.epoch.ranks.next_news() {
            Some(RankEvent::Evaluated(evaluation)) => Some(evaluation),
            _ => None,
        };
        while self.epoch.ranks.next_news().is_some() {}
        self.conclude()?;
        Ok(evaluation.expect("ranks that end well have told it"))
    }

    pub(super) fn answer(&mut self, stop_request: StopRequest) {
        if std::mem::take(&mut self.awaiting_reply)
            && let Some(answers) = &self.epoch.answers
        {
            // Where rank 0 has failed, no more is asked.
            let _ = answers.send(StepAnswer::Follows(stop_request));
        }
    }

    /// The next step, or none once all ranks of this process have ended. What a recovery does again
    /// is no new step.
    pub(crate) fn next_step(&mut self) -> Option<StepMetrics> {
        let _in_run = self.span.clone().entered();
        self.waits_after = None;
        let stop_request = std::mem::take(&mut self.stop_request);
        self.answer(stop_request);
        loop {
            match self.epoch.ranks.next_news() {
                Some(RankEvent::Step(metrics, ..)) if self.recoveries.is_redone(&metrics) => {
                    self.awaiting_reply = true;
                    let stops = self.stops && self.recoveries.is_caught_up();
                    self.answer(if stops { StopRequest::Stop(0) } else { StopRequest::GoOn });
                }
                Some(RankEvent::Step(metrics, times, met)) => {
                    self.waits_after = met.then_some(metrics.step);
                    self.see(&metrics, &times);
                    if self.stops {
                        // The ranks have failed since, and did not hear of it.
                        self.answer(StopRequest::Stop(0));
                    }
                    return Some(metrics);
                }
                // The ranks of another epoch are there.
                Some(RankEvent::Ready(_)) => self.epoch.let_begin(),
                Some(RankEvent::Recut(blueprint)) => self.take_cut(blueprint),
                // Asked for in rank 0's process alone.
                Some(RankEvent::Evaluated(_) | RankEvent::Weights(_)) => {}
                None if self.recovers() => {}
                None => return None,
            }
        }
    }

    /// The run has other stages from now on, whose times are others.
    pub(super) fn take_cut(&mut self, blueprint: Arc<Blueprint>) {
        self.change(self.trainer().with(blueprint));
        self.times = StageTimes::default();
    }

    /// Goes on with another trainer. What was held before counts as well in the end.
    fn change(&mut self, trainer: Trainer) {
        let (peaks, at_once) = self.trainer().predicted();
        let (peaks_before, at_once_before) = self.predicted_before;
        self.predicted_before = (peaks.max(&peaks_before), at_once.max(at_once_before));
        self.changed = Some(trainer);
    }

    fn see(&mut self, metrics: &StepMetrics, times: &StageTimes) {
        self.awaiting_reply = true;
        // The first step warms caches and pools up; it counts only where it is alone.
        if self.totals.steps() == 1 {
            self.times = StageTimes::default();
        }
        self.times.merge(times);
        self.telemetry.write(metrics);
        if self.has_rank_0() {
            if self.totals.steps() == 0
                && let Some(text) = costs::remark(self.blueprint(), metrics)
            {
                warn!("{text}");
            }
            let config = &self.trainer.blueprint.config;
            events::step(metrics, config.steps);
            // A test of rates is there to go too far.
            if config.find_lr == 0 {
                self.health.see(metrics);
            }
        }
        let bp = self.blueprint();
        let units = bp.programs.units() * bp.mesh.pp * bp.mesh.zero3;
        self.totals.add(metrics, units);
    }

    /// Where ranks have failed and may be brought together again, does so.
    pub(super) fn recovers(&mut self) -> bool {
        let ranks = &mut self.epoch.ranks;
        let Some(at) = ranks.failed_at().filter(|_| self.failed.is_none()) else { return false };
        let error = ranks.end().err().expect("a rank has failed");
        let error = self.recorded(error);
        if let RecoveryAnswer::End(text) = self.recoveries.remedy(&error, at) {
            self.failed = Some(text.into_iter().fold(error, |e, text| e.with_advice(&text)));
            return false;
        }
        let lost = if let Error::Rank { rank, .. } = &error { Some(*rank) } else { None };
        let without = lost.and_then(|rank| self.leave_out(rank));
        std::thread::sleep(self.recoveries.pause());
        match self.meet_again(&error, without.as_deref()) {
            Ok(()) => true,
            Err(error) => {
                self.failed = Some(error);
                false
            }
        }
    }

    /// Where the settings say so, leaves out the replica of `rank`, and says who that is; nothing
    /// where all are started again.
    fn leave_out(&mut self, rank: usize) -> Option<String> {
        let bp = self.blueprint().clone();
        if bp.config.on_loss != OnLoss::Shrink {
            return None;
        }
        let fewer = match self.trainer().with_fewer_replicas() {
            Ok(fewer) => fewer?,
            Err(why) => {
                warn!("{why}; so all replicas are started again");
                return None;
            }
        };
        let replica = bp.mesh.coords(rank).dp;
        let size = bp.mesh.pp * bp.mesh.zero3;
        let ranks = replica * size..(replica + 1) * size;
        self.devices = self.devices.without(ranks, bp.mesh.world());
        self.recoveries.change_shape();
        let left = fewer.blueprint.mesh.dp;
        self.change(fewer);
        self.lost_replicas += 1;
        let others = if left == 1 { "the other one takes" } else { "the others take" };
        Some(format!("replica {replica} of {}, whose samples {others}", bp.mesh.dp))
    }

    /// Starts the ranks again after `error`, from the newest checkpoint, or from where the run
    /// began; `without` a replica that is left out.
    fn meet_again(&mut self, error: &Error, without: Option<&str>) -> Result<(), Error> {
        let (bp, data) = (&self.blueprint().clone(), &self.trainer().data.clone());
        let data = &data.0;
        let again = |before: &Arc<Saver>| {
            before.under_way.await_completion(Completing::InRecovery);
            before.close();
            Arc::new(Saver::new(bp, data, before))
        };
        let [saver, copier] =
            [&self.epoch.saver, &self.epoch.copier].map(|before| before.as_ref().map(&again));
        let newest = match copies::places(&bp.config).filter(|_| saver.is_some()) {
            Some(places) => places.newest()?,
            None => None,
        };
        self.recoveries.tell(error, newest, without);
        self.recoveries.go_back(newest.map_or(0, |place| place.step));
        let loader = newest.and_then(|place| Loader::again(bp, data, place));
        let (export, peak) = (self.export, Some(self.epoch.peak));
        let begin = EpochInputs { given: None, export, peak, saver, copier, loader };
        self.epoch = Epoch::start(self.trainer(), &self.devices, begin, &self.span)?;
        self.awaiting_reply = false;
        Ok(())
    }

    /// Once all ranks have ended: the summary and their results, or what went wrong.
    pub(crate) fn conclude(&mut self) -> Result<(Summary, Vec<RankResult>), Error> {
        (self.over, self.waits_after) = (true, None);
        let _in_run = self.span.clone().entered();
        let concluded = self.outcome_of_ranks();
        // Until now a signal is a wish to stop, which is under way: records are being written.
        self.trainer.stopper.end();
        concluded
    }

    fn outcome_of_ranks(&mut self) -> Result<(Summary, Vec<RankResult>), Error> {
        let config = &self.trainer.blueprint.config;
        let ended = match (self.failed.take(), self.epoch.ranks.end()) {
            (Some(error), _) => Err(error),
            (None, ended) => ended.map_err(|error| self.recorded(error)),
        };
        let ends = match ended {
            Ok(ends) => ends.into_iter().reduce(RankEnd::and).unwrap_or_default(),
            Err(error) => {
                self.close_savers();
                return Err(error);
            }
        };
        if let Some(recorder) = &self.epoch.ranks.context.recorder {
            recorder.withdraw();
        }
        let resumed = self.resumed.as_ref().map(|resumed| resumed.step);
        let path = |step| self.epoch.saver.as_ref().map(|saver| saver.path(step));
        if let Some(diverged) = ends.diverged {
            let newest = ends.saved.or(resumed).and_then(path).filter(|path| path.exists());
            return Err(diverged.into_error(config.max_skipped, newest));
        }
        if self.totals.scored_nothing() {
            let (origin, why) = (self.trainer.data.0.origin().to_owned(), NOTHING_SCORED);
            return Err(DataError::NothingScored { origin, why }.into());
        }
        let results = ends.results;
        let total_s = self.begin.elapsed().as_secs_f64();
        let totals = |saver: &Option<Arc<Saver>>| {
            saver.as_ref().map(|saver| saver.totals()).unwrap_or_default()
        };
        let (saves, copied) = (totals(&self.epoch.saver), totals(&self.epoch.copier));
        if let Some(places) = copies::places(config).filter(|_| self.copy_lock.is_some()) {
            // No run goes on from them: this one has ended well, and is saved.
            places.drop_copies_after(None);
        }
        let summary = Summary {
            stopped: ends.stopped,
            checkpoint: ends.saved.and_then(path),
            saves: saves.saves,
            save_cpu_s: saves.cpu_s,
            copies: copied.saves,
            copy_bytes: copied.bytes,
            copy_cpu_s: copied.cpu_s,
            recoveries: self.recoveries.made(),
            steps_redone: self.recoveries.redone,
            recovery_s: self.recoveries.seconds,
            lost_replicas: self.lost_replicas,
            ..self.predicted_summary(total_s)
        };
        if let Some(path) = config.trace.as_ref().filter(|_| self.has_rank_0()) {
            trace::write(path, &timeline(self.blueprint(), &results))?;
        }
        if let Some(path) = config.save_costs.as_ref().filter(|_| self.has_rank_0()) {
            let (done, steps) = (resumed.unwrap_or(0), self.totals.steps());
            let nothing = match traced_stages(self.trainer(), &results) {
                Some(bp) => measured::write(path, bp, &timeline(bp, &results), done, steps)?,
                None => Some("stages were cut anew in the steps that are traced".into()),
            };
            if let Some(why) = nothing {
                warn!("save-costs: nothing is written, as {why}");
            }
        }
        std::mem::take(&mut self.telemetry).close(&summary)?;
        if self.has_rank_0() {
            events::end(&summary);
        }
        self.outcome = Some(summary.clone());
        Ok((summary, results))
    }

    /// What the ranks' trainer says in the end, and what was predicted of those before.
    fn predicted_summary(&self, total_s: f64) -> Summary {
        let mut summary = self.trainer().summary(&self.totals, &self.times, total_s);
        let (peaks, at_once) = self.predicted_before;
        summary.predicted_bytes = summary.predicted_bytes.max(&peaks);
        summary.predicted_at_once_bytes = summary.predicted_at_once_bytes.max(at_once);
        summary
    }

    /// `error` with how to read what the ranks wrote; those here that live on write now.
    fn recorded(&self, error: Error) -> Error {
        let error = error.with_first_step(&self.blueprint().config);
        match &self.epoch.ranks.context.recorder {
            Some(recorder) if !error.is_bad_input() => {
                let found = recorder.write_all(EndKind::AtWork, MEANWHILE);
                // A rank of another process that is stuck writes a moment later, if it may live on.
                recorder.await_neighbours(Instant::now() + recorder::LINGER);
                found.into_iter().fold(error, |error, found| error.with_advice(&found))
            }
            _ => error,
        }
    }
}

/// The blueprint with the stages that ranks had in the steps that are traced; none where these had
/// several.
fn traced_stages<'a>(trainer: &'a Trainer, results: &'a [RankResult]) -> Option<&'a Blueprint> {
    let programs = results.iter().flat_map(|result| &result.programs);
    let cuts: Vec<_> = programs.filter_map(|(_, program)| program.cut.as_deref()).collect();
    let first = cuts.first().copied().unwrap_or(&trainer.blueprint);
    cuts.iter().all(|cut| cut.stages == first.stages).then_some(first)
}

/// Help where no step of a run had a token that was scored.
const NOTHING_SCORED: &str = "no step of the run had one; use data with more tokens that the \
    settings document-mask and loss-mask leave, or a larger global-batch";

/// Whether it is a run whose steps are written, and not a question to a model.
fn is_watched(export: Export) -> bool {
    !matches!(export, Export::Gradients | Export::Evaluation)
}

/// A saver, and in rank 0's process the lock that goes with it.
type Locked = (Saver, Option<StoreLock>);

/// The value of `begin` for all ranks here; nothing where the run is a question to a model.
fn begun(
    export: Export,
    begin: impl FnOnce() -> Result<Option<Locked>, Error>,
) -> Result<(Option<Arc<Saver>>, Option<StoreLock>), Error> {
    let saver = if is_watched(export) { begin()? } else { None };
    let (saver, lock) = saver.map(|(saver, lock)| (Arc::new(saver), lock)).unzip();
    Ok((saver, lock.flatten()))
}

impl Iterator for Steps<'_> {
    type Item = Result<StepMetrics, Error>;

    fn next(&mut self) -> Option<Result<StepMetrics, Error>> {
        if self.over {
            return None;
        }
        match self.next_step() {
            Some(metrics) => Some(Ok(metrics)),
            None => self.conclude().err().map(Err),
        }
    }
}

impl Drop for Steps<'_> {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        self.stop();
        while self.next_step().is_some() {}
        if let Err(error) = self.conclude() {
            error!("{error}");
        }
    }
}
