//! The steps of one rank: each is run, reported, agreed on with the others and saved where due.

mod answers;
mod exchanges;

use std::sync::Arc;
use std::sync::mpsc::TryRecvError;
use std::time::Instant;

use tracing::{debug_span, warn};
use zeropp_checkpoint::pace::{Pace, SaveDecision};
use zeropp_checkpoint::step_end::{Decision, Ending, MetStep, Rules, StepEnds};
use zeropp_comm::groups::Groups;
use zeropp_core::data::Sampler;
use zeropp_core::meter::Meter;
use zeropp_core::metrics::{Evaluation, StepMetrics, Stopped, wall_time};
use zeropp_pipeline::executor::{Executor, ModelWorker, StepRecord};
use zeropp_pipeline::ir::Schedule;
use zeropp_pipeline::timeline::Span;
use zeropp_zero3::StepOutcome;

use crate::checkpoint::Saver;
use crate::checkpoint::resume::Resumed;
use crate::error::RankError;
use crate::plan::blueprint::Blueprint;
use crate::plan::peak::BestRate;
use crate::plan::reschedule::Exchangeable;
use crate::run::behind::{Behind, Note, ReportedSteps};
use crate::run::build::{Bench, Built};
use crate::run::collect;
use crate::run::diagnose::diagnose;
use crate::run::evaluation::{EvaluationRequests, Evaluator};
use crate::run::experts;
use crate::run::figures::{RankStep, StageTimes, step_metrics, summarise};
use crate::run::layers;
use crate::run::request::StepAnswer;
use crate::run::reschedule::{NumberedProgram, Orders, Rescheduling};
use crate::run::results::{RankEnd, RankEvent, RankResult, Ready};
use crate::run::saving::Saving;
use crate::run::shared::{Export, RunShared};
use crate::run::stop::StopRequest;
use crate::world::clocks::ClockOffset;
use crate::world::hello::Roster;

/// A rank's steps.
pub(crate) struct Training<'a, R> {
    shared: Arc<RunShared>,
    bench: &'a Bench,
    groups: &'a Groups,
    meter: &'a Meter,
    sampler: Sampler,
    executor: Executor<ModelWorker>,
    evaluator: Option<Evaluator>,
    /// The best rates of this machine, with which those of the steps are compared.
    best: BestRate,
    /// This process's beside rank 0's.
    clock: ClockOffset,
    report: R,
    /// Steps that a checkpoint had behind it.
    done: u64,
    /// What follows each step.
    ends: StepEnds,
    /// The step before, where ranks did not meet at its end.
    before: Option<Unmet>,
    /// On rank 0: when the step under way began.
    began: Instant,
    /// Whether all ranks are known to have their first step behind them.
    warm: bool,
    /// On rank 0: steps that were reported to its trainer and not yet sent to other processes.
    reported: ReportedSteps,
    /// On rank 0: steps that were reported to its trainer and that it has not answered.
    awaiting_reply: usize,
    /// Where the run saves.
    saving: Option<Saving>,
    /// Where it makes copies in memory.
    copying: Option<Saving>,
    /// Where programs are exchanged.
    rescheduling: Option<Rescheduling>,
    /// The stages that the run is cut into anew before the next step, and their program.
    recut: Option<(Arc<Blueprint>, Arc<Schedule>)>,
    /// On rank 0: what it orders of that after the step under way.
    orders: Orders,
    /// On rank 0: the programs of the steps in `spans`, each with the first one's number.
    programs: Vec<(u64, NumberedProgram)>,
    spans: Vec<Span>,
    end: RankEnd,
}

/// A step at whose end ranks did not meet.
struct Unmet {
    step: u64,
    seconds: f64,
    record: StepRecord,
    behind: Behind<RankStep>,
}

/// What is due after which steps.
fn rules(shared: &RunShared, measures: bool) -> Rules {
    let config = &shared.blueprint.config;
    let pace =
        |saver: &Option<Arc<Saver>>| saver.as_ref().map(|saver| Pace::new(saver.every, saver.last));
    Rules {
        late: shared.blueprint.schedule().validates_late(),
        saves: pace(&shared.saver),
        copies: pace(&shared.copier),
        eval_every: if measures { config.eval_every } else { 0 },
        steps: config.steps,
        read_every: config.sample_every,
        look_every: config.log_layers,
        max_skipped: config.max_skipped,
        patience: config.patience,
    }
}

impl<'a, R: FnMut(RankEvent)> Training<'a, R> {
    pub(crate) fn new(
        shared: Arc<RunShared>,
        bench: &'a Bench,
        built: Built,
        evaluator: Option<Evaluator>,
        roster: &Roster,
        report: R,
    ) -> Result<Self, RankError> {
        let is_here = shared.here[0] == 0;
        let groups = &bench.groups;
        let saving = |saver: &Option<Arc<Saver>>| {
            saver.as_ref().map(|saver| Saving::new(saver, &groups.world, is_here)).transpose()
        };
        Ok(Self {
            saving: saving(&shared.saver)?,
            copying: saving(&shared.copier)?,
            ends: StepEnds::new(rules(&shared, evaluator.is_some())),
            before: None,
            began: Instant::now(),
            warm: false,
            reported: ReportedSteps::default(),
            awaiting_reply: 0,
            bench,
            groups,
            meter: &bench.meter,
            sampler: built.sampler,
            executor: built.executor,
            evaluator,
            best: BestRate::new(roster.peak_flops()),
            clock: roster.clock(),
            report,
            done: 0,
            rescheduling: Rescheduling::new(
                Exchangeable::of(&shared.blueprint),
                &shared.offered,
                groups.world.rank(),
                &shared.here,
                roster.beside_rank_0(),
            ),
            recut: None,
            orders: Orders::default(),
            programs: Vec::new(),
            spans: Vec::new(),
            end: RankEnd::default(),
            shared,
        })
    }

    fn tell(&mut self, news: RankEvent) {
        if self.groups.world.rank() == self.shared.here[0] {
            (self.report)(news);
        }
    }

    /// On rank 0, without which no step comes to its end: waits until its trainer wants the first.
    fn await_begin(&self) -> Result<(), RankError> {
        match &self.shared.answers {
            Some(answers) if self.groups.world.rank() == 0 => {
                answers.lock().recv().map(drop).map_err(|_| RankError::NotBegun)
            }
            _ => Ok(()),
        }
    }

    /// Runs all steps, or those until a stop, after where the rank was `resumed`.
    pub(crate) fn run(&mut self, resumed: Option<Resumed>) -> Result<(), RankError> {
        let shared = self.shared.clone();
        let config = &shared.blueprint.config;
        self.done = resumed.as_ref().map_or(0, |resumed| resumed.step);
        // The losses before were the last ones then; to train on until another one comes would undo
        // with each start what patience is for.
        let is_over = resumed.is_some() && shared.export != Export::Gradients;
        let no_lower = self.ends.rules().out_of_patience(self.since());
        let no_lower = no_lower.filter(|_| is_over && self.done < config.steps);
        self.take_up(resumed.as_ref())?;
        self.tell(RankEvent::Ready(Ready { at: wall_time(), resumed, no_lower }));
        self.await_begin()?;
        if shared.export == Export::Evaluation {
            let evaluator = self.evaluator.as_mut().expect("asked for where there is one");
            let mut asked = EvaluationRequests::of(None, StopRequest::GoOn);
            let evaluation =
                evaluator.measure(self.groups, &mut self.executor, self.done, &mut asked)?;
            self.tell(RankEvent::Evaluated(evaluation.expect("nothing is asked of it")));
            return Ok(());
        }
        let last = match shared.export {
            Export::Gradients => self.done + 1,
            _ if no_lower.is_some() => self.done,
            _ => config.steps,
        };
        self.ends.run_until(last);
        self.end.stopped = no_lower.map(|_| Stopped { step: self.done, signal: None, no_lower });
        shared.stopper.begin();
        self.began = Instant::now();
        for step in self.done + 1..=last {
            let met = debug_span!("step", step).in_scope(|| self.step(step))?;
            let Some((met, decision)) = met else { continue };
            let ending = self.ends.follow(&met, &decision);
            if let Some(Ending::Diverged { first, in_a_row }) = ending {
                let found = diagnose(&mut self.executor, self.groups, first, in_a_row)?;
                self.end.diverged = Some(found);
                break;
            }
            let Decision { saves, copies, .. } = decision;
            let log = shared.traces(step, self.done).then_some(shared.epoch);
            if let Some(saving) = self.saving.as_mut().filter(|_| saves != SaveDecision::No) {
                if saves == SaveDecision::AfterTheOneBefore {
                    saving.settle(false)?;
                }
                saving.begin(step, &mut self.executor.worker, log);
            }
            if let Some(copying) = self.copying.as_mut().filter(|_| copies != SaveDecision::No) {
                copying.begin(step, &mut self.executor.worker, log);
            }
            let (signal, no_lower) = match ending {
                Some(Ending::Asked { signal }) => (signal, None),
                Some(Ending::NoLower { since }) => (None, Some(since)),
                None => {
                    self.recut(step)?;
                    continue;
                }
                Some(Ending::Diverged { .. }) => continue,
            };
            self.end.stopped = Some(Stopped { step, signal, no_lower });
            break;
        }
        if let Some(copying) = &mut self.copying {
            copying.settle(false)?;
        }
        if let Some(saving) = &mut self.saving {
            saving.settle(true)?;
            self.end.saved = saving.saved;
        }
        Ok(())
    }

    /// The validation loss after `step`, where it is due and comes to its end before a request to
    /// the run; `stop_request` is the request that this rank knows of, and is raised by those of
    /// others.
    fn evaluate(
        &mut self,
        step: u64,
        stop_request: &mut StopRequest,
    ) -> Result<Option<Evaluation>, RankError> {
        let due = self.ends.rules().evaluates(step);
        let Some(evaluator) = self.evaluator.as_mut().filter(|_| due) else { return Ok(None) };
        if self.shared.export == Export::Gradients {
            return Ok(None);
        }
        let mut asked = EvaluationRequests::of(Some(&self.shared.stopper), *stop_request);
        let evaluation = evaluator.run(self.groups, &mut self.executor, step, &mut asked)?;
        *stop_request = (*stop_request).max(asked.stop_request);
        let Some(evaluation) = evaluation else {
            if self.groups.world.rank() == 0 {
                let what = if asked.stop_request == StopRequest::Save { "save" } else { "end" };
                warn!("the validation after step {step} was left, as the run was asked to {what}");
            }
            return Ok(None);
        };
        for saver in self.shared.saver.iter().chain(&self.shared.copier) {
            saver.evaluated(step, &evaluation, evaluator.plateau());
        }
        Ok(Some(evaluation))
    }

    /// How many validation losses in a row were no lower than the lowest, where there was any.
    fn since(&self) -> Option<u64> {
        Some(self.evaluator.as_ref()?.plateau()?.since)
    }

    /// Runs a step, reports it and returns what all ranks are to do after it; nothing where they go
    /// on without having met.
    fn step(&mut self, step: u64) -> Result<Option<(MetStep, Decision)>, RankError> {
        self.meter.reset_peak();
        let looks = self.looks_at_layers(step);
        if looks {
            self.executor.worker.watch_layers();
        }
        let mut record = self.executor.run_step(step).map_err(RankError::Step)?;
        let mut mine = self.figures(&record);
        mine.scored = self.bench.scored.of(step);
        if self.shared.traces(step, self.done) {
            self.spans.append(&mut record.spans);
            self.note_program(step);
        }
        self.read_step_before(record.validated)?;
        if !self.ends.meets(step) {
            self.leave(step, record, &mine);
            return Ok(None);
        }
        if self.ends.rules().late {
            record.outcome = self.executor.settle(step).map_err(RankError::Step)?;
        }
        if looks {
            let seen = self.executor.worker.take_watched();
            mine.layers = layers::watched(&self.shared.blueprint, seen);
        }
        self.meet(step, &record, mine).map(Some)
    }

    /// Whether the layers of `step` are looked at.
    fn looks_at_layers(&self, step: u64) -> bool {
        self.shared.blueprint.config.looks_at_layers(step)
    }

    /// This rank's figures of a step.
    fn figures(&mut self, record: &StepRecord) -> RankStep {
        let losses = self.executor.worker.take_losses();
        let mut mine = summarise(record, losses, self.groups, self.meter);
        let routers = self.executor.worker.take_routers();
        mine.routers = layers::routers(&self.shared.blueprint, routers);
        mine.computed.start_ns = self.clock.shift(mine.computed.start_ns);
        mine.computed.end_ns = self.clock.shift(mine.computed.end_ns);
        let (clock, rescheduling) = (self.clock, &self.rescheduling);
        mine.reschedule =
            rescheduling.as_ref().map(|r| r.note(&record.spans, |ns| clock.shift(ns)));
        if let Some(saving) = &mut self.saving {
            mine.save_blocked_ns = saving.take_blocked_ns();
            mine.save = saving.take_report();
        }
        if let Some(copying) = &mut self.copying {
            mine.save_blocked_ns += copying.take_blocked_ns();
            mine.copy = copying.take_report();
        }
        mine
    }

    /// On rank 0: a step's metrics, from all ranks' `records`, of which saving takes its reports.
    fn metrics(
        &mut self,
        step: u64,
        seconds: f64,
        record: &StepRecord,
        mut records: Vec<RankStep>,
    ) -> Result<(StepMetrics, StageTimes), RankError> {
        if let Some(saving) = &mut self.saving {
            saving.look(records.iter_mut().filter_map(|r| r.save.take()).collect())?;
        }
        if let Some(copying) = &mut self.copying {
            copying.look(records.iter_mut().filter_map(|r| r.copy.take()).collect())?;
        }
        let bp = &self.shared.blueprint;
        let (mut metrics, times) =
            step_metrics(bp, step, seconds, &mut self.best, record, &records);
        metrics.program = self.rescheduling.as_ref().map_or(0, |r| r.running().number);
        if let (Some(recorder), Some(of)) = (&self.shared.recorder, &metrics.experts) {
            recorder.spread(self.groups.world.rank(), experts::load(bp, step, of, &times));
        }
        Ok((metrics, times))
    }

    /// On rank 0: tells its process's trainer of a step, at whose end ranks may have `met`, and the
    /// others' with the next words to them.
    fn report_step(&mut self, metrics: StepMetrics, times: StageTimes, met: bool) {
        if self.shared.here.len() < self.groups.world.size() {
            self.reported.add(&metrics, &times);
        }
        self.awaiting_reply += 1;
        (self.report)(RankEvent::Step(metrics, times, met));
    }

    /// In another process than rank 0's: reports to its trainer what rank 0's got; ranks have `met`
    /// after that step, with this validation loss.
    fn receive(&mut self, reported: &[u8], met: Option<(u64, Option<Evaluation>)>) {
        let world = &self.groups.world;
        if world.rank() == 0 || world.rank() != self.shared.here[0] {
            return;
        }
        for (mut metrics, times) in ReportedSteps::read(reported) {
            // It was measured here as well, to the same bits.
            let met = met.filter(|(step, _)| *step == metrics.step);
            metrics.eval = met.and_then(|(_, eval)| eval);
            (self.report)(RankEvent::Step(metrics, times, met.is_some()));
        }
    }

    /// Where ranks went on from the step before without having met, reads what they said of it; it
    /// was `validated` meanwhile.
    fn read_step_before(&mut self, validated: Option<StepOutcome>) -> Result<(), RankError> {
        let Some(Unmet { step, seconds, mut record, behind }) = self.before.take() else {
            return Ok(());
        };
        let outcome = validated.expect("the step before is validated in this one");
        record.outcome = Some(outcome);
        let (records, note) = behind.wait()?;
        self.past_first_step();
        self.receive(&note.reported, None);
        self.ends.left(step, outcome.skipped, note.stop_request, note.meet);
        if self.groups.world.rank() == 0 {
            let (metrics, times) = self.metrics(step, seconds, &record, records)?;
            self.report_step(metrics, times, false);
        }
        Ok(())
    }

    /// Goes on after a step: what there is to say of it travels meanwhile.
    fn leave(&mut self, step: u64, record: StepRecord, mine: &RankStep) {
        let mut stop_request = self.shared.stopper.receive();
        if let Some(answers) = self.shared.answers.as_ref().filter(|_| self.awaiting_reply > 0)
            && self.groups.world.rank() == 0
        {
            let answers = answers.lock();
            while self.awaiting_reply > 0 {
                match answers.try_recv() {
                    Ok(StepAnswer::Follows(answer)) => {
                        stop_request = stop_request.max(answer);
                        self.awaiting_reply -= 1;
                    }
                    Ok(StepAnswer::First(_)) => unreachable!("asked for where ranks have met"),
                    Err(TryRecvError::Empty) => break,
                    // The trainer is gone: no more steps are wanted.
                    Err(TryRecvError::Disconnected) => {
                        stop_request = stop_request.max(StopRequest::Stop(0));
                        break;
                    }
                }
            }
        }
        // The program is shown steps before more than a few follow them.
        let note =
            Note { stop_request, meet: self.awaiting_reply > 1, reported: self.reported.take() };
        let behind = Behind::send(&*self.groups.world, mine, &note);
        let ended = Instant::now();
        let seconds = (ended - std::mem::replace(&mut self.began, ended)).as_secs_f64();
        self.before = Some(Unmet { step, seconds, record, behind });
    }

    /// All ranks have said something of a step: none compiles its first any more.
    fn past_first_step(&mut self) {
        if !std::mem::replace(&mut self.warm, true) {
            self.groups.world.past_first_step();
        }
    }

    /// Meets all ranks after a step whose outcome is known, and returns what all do.
    fn meet(
        &mut self,
        step: u64,
        record: &StepRecord,
        mine: RankStep,
    ) -> Result<(MetStep, Decision), RankError> {
        let (shared, groups) = (self.shared.clone(), self.groups);
        // Rank 0 alone reads all records: what everyone needs of them is in its answer.
        let all = collect::figures(&*groups.world, &(shared.stopper.receive(), mine))?;
        self.past_first_step();
        let (requests, mut records): (Vec<StopRequest>, Vec<RankStep>) = all.into_iter().unzip();
        let mut asked = requests.into_iter().max().unwrap_or_default().max(self.ends.asked());
        let mut news = None;
        if groups.world.rank() == 0 {
            let seconds = self.began.elapsed().as_secs_f64();
            let notes = records.iter_mut().filter_map(|r| r.reschedule.take()).collect();
            let (metrics, times) = self.metrics(step, seconds, record, records)?;
            self.order(&metrics, notes);
            news = Some((metrics, times));
        }
        // What it takes is no part of the step.
        let eval = self.evaluate(step, &mut asked)?;
        let is_best = shared.blueprint.config.keep_best && eval.is_some_and(|eval| eval.best);
        if let Some((metrics, times)) = news {
            self.report_step(StepMetrics { eval, ..metrics }, times, true);
        }
        let outcome = record.outcome.expect("every program ends with the optimizer step");
        let met = MetStep { step, skipped: outcome.skipped, is_best, since: self.since() };
        let asked = self.ends.met(&met, asked);
        let decision = self.agree(&met, asked, eval)?;
        Ok((met, decision))
    }

    /// The rank's results; those of other processes come to rank 0.
    pub(crate) fn finish(mut self) -> Result<RankEnd, RankError> {
        let shared = self.shared.clone();
        if self.end.diverged.is_some() {
            return Ok(self.end);
        }
        let exported = match shared.export {
            Export::Weights => self.weights()?,
            // Without ZeRO-1 the replicas hold the same pieces.
            Export::Gradients => self.executor.worker.captured().to_vec(),
            _ => Vec::new(),
        };
        let clock = self.clock;
        for span in &mut self.spans {
            (span.start_ns, span.end_ns) = (clock.shift(span.start_ns), clock.shift(span.end_ns));
        }
        let savings = self.saving.iter().chain(&self.copying);
        let mut saves: Vec<_> = savings.flat_map(|saving| saving.spans()).collect();
        for save in &mut saves {
            (save.start_ns, save.end_ns) = (clock.shift(save.start_ns), clock.shift(save.end_ns));
        }
        saves.sort_by_key(|save| save.start_ns);
        let spans = self.spans;
        let (programs, clock_error_ns) = (self.programs, clock.error_ns);
        let result = RankResult { spans, saves, clock_error_ns, exported, programs };
        self.end.results = match shared.here.len() == self.groups.world.size() {
            true => vec![result],
            false => collect::to_rank_0(&*self.groups.world, result)?,
        };
        Ok(self.end)
    }
}
