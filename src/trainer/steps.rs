//! A run under way: its steps one by one, and its end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::{Span, error, info_span, warn};
use zeropp_comm::Communicator;
use zeropp_core::metrics::{Evaluation, StepMetrics, Stopped, Summary};
use zeropp_pipeline::executor::StatusBoard;
use zeropp_pipeline::flight::EndKind;
use zeropp_zero3::checkpoint::StoreLock;

use crate::Error;
use crate::checkpoint::Saver;
use crate::checkpoint::resume::{Loader, Resumed};
use crate::events;
use crate::plan::memory;
use crate::plan::peak::Peak;
use crate::recorder::{self, FlightRecorder};
use crate::run::diagnose::Diverged;
use crate::run::measured;
use crate::run::metrics_file::MetricsFile;
use crate::run::rank::{Export, News, RankEnd, RankResult, Shared, StageTimes};
use crate::run::spawn::{Failure, Message, culprit, spawn_rank};
use crate::run::stop::Wish;
use crate::run::totals::Totals;
use crate::run::trace;
use crate::trainer::Trainer;
use crate::trainer::health::Health;
use crate::world::World;

/// After one rank has failed, how long the others get to stop before they are left behind.
const GRACE: Duration = Duration::from_secs(3);

/// A run under way: an iterator over its steps. The ranks begin a step when it is asked for, and
/// end when this is dropped, after the step that was last seen, which is saved if the run saves.
///
/// In a process without rank 0 the ranks do not wait to be asked, and dropping this ends the whole
/// run after one of the next steps.
pub struct Steps<'a> {
    trainer: &'a Trainer,
    messages: Receiver<Message>,
    /// In rank 0's process: what is to follow the step that was last told of.
    answers: Option<Sender<Wish>>,
    unanswered: bool,
    here: Arc<[usize]>,
    status: Arc<StatusBoard>,
    saver: Option<Arc<Saver>>,
    lock: Option<StoreLock>,
    recorder: Option<Arc<FlightRecorder>>,
    resumed: Option<Resumed>,
    begin: Instant,
    metrics_file: Option<MetricsFile>,
    totals: Totals,
    times: StageTimes,
    ends: Ends,
    outcome: Option<Summary>,
    over: bool,
    health: Health,
    span: Span,
    /// Ends the engine, after the ranks.
    _world: World,
}

/// How the ranks of this process ended.
#[derive(Default)]
struct Ends {
    left: usize,
    results: BTreeMap<usize, Vec<RankResult>>,
    failures: Vec<(usize, Failure)>,
    stopped: Option<Stopped>,
    diverged: Option<Diverged>,
    saved: Option<u64>,
    /// Until when the others may take after a failure.
    deadline: Option<Instant>,
}

impl Ends {
    fn note(&mut self, rank: usize, end: Result<RankEnd, Failure>) {
        self.left -= 1;
        match end {
            Ok(RankEnd { results, stopped, diverged, saved }) => {
                self.results.insert(rank, results);
                self.stopped = stopped.or(self.stopped);
                self.diverged = diverged.or(self.diverged.take());
                self.saved = saved.or(self.saved);
            }
            Err(failure) => {
                self.failures.push((rank, failure));
                self.deadline.get_or_insert_with(|| Instant::now() + GRACE);
            }
        }
    }
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
        memory::check(bp)?;
        let span = info_span!("run", schedule = %bp.schedule.kind, mesh = %bp.mesh);
        let entered = span.clone().entered();
        let (saver, lock) = saver(trainer, export)?;
        if lock.is_some() {
            found.passed_over.iter().for_each(|text| warn!("{text}"));
        }
        let status = Arc::new(StatusBoard::new(bp.mesh.world()));
        let (mut world, peak) = meet(trainer, given, &status)?;
        let here: Arc<[usize]> = world.ranks.iter().map(|local| local.rank).collect();
        let (answers, asked) = (here[0] == 0).then(channel).unzip();
        let recorder = FlightRecorder::start(bp, &status, here.iter().copied());
        let shared = Shared {
            blueprint: bp.clone(),
            data: trainer.data.clone(),
            status: status.clone(),
            epoch: Instant::now(),
            clock: Arc::default(),
            peak,
            here: here.clone(),
            host: world.host.clone(),
            export,
            loader: Loader::new(bp, &trainer.data.0, found).map(Arc::new),
            initial: trainer.initial.clone(),
            evaluation: trainer.evaluation.clone(),
            saver: saver.clone(),
            stopper: trainer.stopper.clone(),
            answers: asked.map(|asked| Arc::new(Mutex::new(asked))),
            recorder: recorder.clone(),
            span: span.clone(),
            digests: Arc::default(),
            agreed: Arc::default(),
        };
        let messages = spawn_all(&mut world, &shared);
        let mut steps = Steps {
            trainer,
            messages,
            answers,
            unanswered: false,
            ends: Ends { left: here.len(), ..Ends::default() },
            here,
            status,
            saver,
            lock,
            recorder,
            resumed: None,
            begin: Instant::now(),
            metrics_file: None,
            totals: Totals::default(),
            times: StageTimes::default(),
            outcome: None,
            over: false,
            health: Health::default(),
            span,
            _world: world,
        };
        steps.await_ready(export)?;
        drop(entered);
        Ok(steps)
    }

    /// Waits for the state of the first step, and opens the metrics file where it says.
    fn await_ready(&mut self, export: Export) -> Result<(), Error> {
        match self.next_news() {
            Some(News::Ready(resumed)) => {
                self.resumed = resumed;
                if self.has_rank_0() && !matches!(export, Export::Gradients | Export::Evaluation) {
                    let done = self.resumed().map(|resumed| resumed.step);
                    self.metrics_file = MetricsFile::open(&self.trainer.blueprint.config, done)?;
                }
                self.begin = Instant::now();
                if self.has_rank_0() {
                    let bp = &self.trainer.blueprint;
                    let done = self.resumed.as_ref().map(|resumed| resumed.step);
                    events::begin(&bp.config, &bp.plan, done);
                }
                Ok(())
            }
            Some(_) => unreachable!("a rank is ready before its first step"),
            None => Err(self.conclude().err().expect("a rank that is not ready has failed")),
        }
    }

    /// The checkpoint that the run has gone on from, if it did.
    pub fn resumed(&self) -> Option<&Resumed> {
        self.resumed.as_ref()
    }

    /// Whether this process has rank 0.
    pub(crate) fn has_rank_0(&self) -> bool {
        self.here[0] == 0
    }

    /// Ends the run after the step that was last seen, saved if the run saves. The iterator then
    /// has no more steps.
    pub fn stop(&mut self) {
        match self.answers.is_some() && self.unanswered {
            true => self.answer(Wish::Stop(0)),
            false => self.trainer.stopper.stop(),
        }
    }

    /// Ends the run, if it has not ended, and says what came of it.
    ///
    /// # Errors
    /// As [`Trainer::train`]; a failure that the iterator has given already is not told in full
    /// again.
    pub fn finish(mut self) -> Result<Summary, Error> {
        if !self.over {
            self.stop();
            while self.next_step().is_some() {}
            return self.conclude().map(|(summary, _)| summary);
        }
        let failed = || Error::Rank { rank: self.here[0], message: "the run has failed".into() };
        self.outcome.take().ok_or_else(failed)
    }

    /// The evaluation that the ranks were started for.
    pub(crate) fn evaluation(mut self) -> Result<Evaluation, Error> {
        let evaluation = match self.next_news() {
            Some(News::Evaluated(evaluation)) => Some(evaluation),
            _ => None,
        };
        while self.next_news().is_some() {}
        self.conclude()?;
        Ok(evaluation.expect("ranks that end well have told it"))
    }

    fn answer(&mut self, wish: Wish) {
        if std::mem::take(&mut self.unanswered)
            && let Some(answers) = &self.answers
        {
            // Where rank 0 has failed, nobody asks any more.
            let _ = answers.send(wish);
        }
    }

    /// The next step, or none once all ranks of this process have ended.
    pub(crate) fn next_step(&mut self) -> Option<StepMetrics> {
        let _in_run = self.span.clone().entered();
        self.answer(Wish::GoOn);
        match self.next_news()? {
            News::Step(metrics, times) => {
                self.unanswered = true;
                // The first step warms caches and pools up; it counts only where it is alone.
                if self.totals.steps() == 1 {
                    self.times = StageTimes::default();
                }
                self.times.merge(&times);
                if let Some(file) = &mut self.metrics_file {
                    file.write(&metrics);
                }
                if self.has_rank_0() {
                    events::step(&metrics, self.trainer.blueprint.config.steps);
                    self.health.see(&metrics);
                }
                self.totals.add(&metrics);
                Some(metrics)
            }
            News::Ready(_) | News::Evaluated(_) => unreachable!("told once, and not of steps"),
        }
    }

    /// What the first rank here tells next. After a failure the others have [`GRACE`] to stop.
    fn next_news(&mut self) -> Option<News> {
        while self.ends.left > 0 {
            let message = match self.ends.deadline {
                None => self.messages.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(at) => {
                    self.messages.recv_timeout(at.saturating_duration_since(Instant::now()))
                }
            };
            match message {
                Ok(Message::News(news)) => return Some(news),
                Ok(Message::Done(rank, end)) => self.ends.note(rank, end),
                Err(_) => break,
            }
        }
        None
    }

    /// Once all ranks have ended: the summary and their results, or what went wrong.
    pub(crate) fn conclude(&mut self) -> Result<(Summary, Vec<RankResult>), Error> {
        self.over = true;
        let _in_run = self.span.clone().entered();
        let concluded = self.outcome_of_ranks();
        // Until now a signal is a wish to stop, which is under way: records are being written.
        self.trainer.stopper.end();
        concluded
    }

    fn outcome_of_ranks(&mut self) -> Result<(Summary, Vec<RankResult>), Error> {
        let config = &self.trainer.blueprint.config;
        let ends = std::mem::take(&mut self.ends);
        if let Some(error) = culprit(ends.failures, &self.here, &self.status) {
            if let (Some(saver), Some(_)) = (&self.saver, &self.lock) {
                saver.clean();
            }
            return Err(self.recorded(error));
        }
        if let Some(recorder) = &self.recorder {
            recorder.withdraw();
        }
        let resumed = self.resumed.as_ref().map(|resumed| resumed.step);
        let path = |step| self.saver.as_ref().map(|saver| saver.path(step));
        if let Some(diverged) = ends.diverged {
            let newest = ends.saved.or(resumed).and_then(path);
            return Err(diverged.into_error(config.max_skipped, newest));
        }
        let results: Vec<_> = ends.results.into_values().flatten().collect();
        let total_s = self.begin.elapsed().as_secs_f64();
        let summary = Summary {
            stopped: ends.stopped,
            checkpoint: ends.saved.and_then(path),
            ..self.trainer.summary(&self.totals, &self.times, total_s)
        };
        if let Some(path) = config.trace.as_ref().filter(|_| self.has_rank_0()) {
            trace::write(path, &self.trainer.timeline(&results))?;
        }
        if let Some(path) = config.save_costs.as_ref().filter(|_| self.has_rank_0()) {
            let timeline = self.trainer.timeline(&results);
            let steps = (resumed.unwrap_or(0), self.totals.steps());
            let nothing = measured::write(path, &self.trainer.blueprint, &timeline, steps)?;
            if let Some(why) = nothing {
                warn!("save-costs: nothing is written, as {why}");
            }
        }
        if let Some(file) = self.metrics_file.take() {
            file.close(&summary)?;
        }
        if self.has_rank_0() {
            events::end(&summary);
        }
        self.outcome = Some(summary.clone());
        Ok((summary, results))
    }

    /// `error` with how to read what the ranks wrote; those here that live on write now.
    fn recorded(&self, error: Error) -> Error {
        match &self.recorder {
            Some(recorder) if !error.is_bad_input() => {
                let found = recorder.write_all(EndKind::AtWork, "the run failed meanwhile");
                // A rank of another process that is stuck writes a moment later, if it may live on.
                recorder.await_neighbours(Instant::now() + recorder::LINGER);
                error.with_advice(&found)
            }
            _ => error,
        }
    }
}

/// The run's saver and the lock that goes with it, if it saves.
fn saver(
    trainer: &Trainer,
    export: Export,
) -> Result<(Option<Arc<Saver>>, Option<StoreLock>), Error> {
    if matches!(export, Export::Gradients | Export::Evaluation) {
        return Ok((None, None));
    }
    let saver = Saver::start(&trainer.blueprint, &trainer.data.0, trainer.found.newest)?;
    let (saver, lock) = saver.map(|(saver, lock)| (Arc::new(saver), lock)).unzip();
    Ok((saver, lock.flatten()))
}

/// The ranks of this process, with an engine or over what is `given`, and what they compute with.
fn meet(
    trainer: &Trainer,
    given: Option<Vec<Arc<dyn Communicator>>>,
    status: &Arc<StatusBoard>,
) -> Result<(World, Peak), Error> {
    let bp = &trainer.blueprint;
    let devices = match &given {
        Some(_) => bp.config.devices()?,
        None => trainer.devices()?,
    };
    let peak = Peak::measure(&bp.config, &devices, bp.compute);
    let world = match given {
        Some(communicators) => World::of(communicators, &devices),
        None => World::start(&bp.config, &devices, status)?,
    };
    Ok((world, peak))
}

/// Starts the ranks of this process; each tells how it goes on.
fn spawn_all(world: &mut World, shared: &Shared) -> Receiver<Message> {
    let (tx, messages) = channel();
    for mut local in world.ranks.drain(..) {
        if let Some(recorder) = &shared.recorder {
            local.communicator = recorder.wrap(local.rank, local.communicator);
        }
        spawn_rank(local, shared.clone(), shared.here.clone(), tx.clone());
    }
    messages
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
