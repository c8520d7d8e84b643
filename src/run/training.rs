//! The steps of one rank: each is run, reported, agreed on with the others and saved where due.

use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use tracing::debug_span;
use zeropp_checkpoint::pace::{Begin, StepEnd};
use zeropp_comm::groups::Groups;
use zeropp_core::meter::Meter;
use zeropp_core::metrics::{Evaluation, StepMetrics, Stopped};
use zeropp_pipeline::executor::{Executor, ModelWorker};
use zeropp_pipeline::timeline::Span;
use zeropp_zero3::ShardedStage;

use crate::checkpoint::Saver;
use crate::checkpoint::patience::Patience;
use crate::checkpoint::resume::Resumed;
use crate::error::RankError;
use crate::plan::peak::Best;
use crate::run::collect;
use crate::run::diagnose::{Skipped, diagnose};
use crate::run::evaluation::Evaluator;
use crate::run::layers;
use crate::run::rank::{
    Export, News, RankEnd, RankResult, RankStep, Shared, step_metrics, summarise,
};
use crate::run::saving::Saving;
use crate::run::stop::Wish;
use crate::world::clocks::Clock;
use crate::world::hello::Roster;

/// A rank's steps.
pub(crate) struct Training<'a, R> {
    shared: &'a Shared,
    groups: &'a Groups,
    meter: &'a Meter,
    executor: Executor<ModelWorker>,
    evaluator: Option<Evaluator>,
    /// What the steps' rates are held against.
    best: Best,
    /// This process's beside rank 0's.
    clock: Clock,
    report: R,
    /// Steps that a checkpoint had behind it.
    done: u64,
    skipped: Skipped,
    /// Where the run saves.
    saving: Option<Saving>,
    /// Where it makes copies in memory.
    copying: Option<Saving>,
    spans: Vec<Span>,
    end: RankEnd,
}

/// What all ranks do after a step.
struct Told {
    wish: Wish,
    /// Whether a save begins.
    saves: Begin,
    /// Whether a copy does.
    copies: Begin,
}

impl<'a, R: FnMut(News)> Training<'a, R> {
    pub(crate) fn new(
        shared: &'a Shared,
        (groups, meter): (&'a Groups, &'a Meter),
        executor: Executor<ModelWorker>,
        evaluator: Option<Evaluator>,
        roster: &Roster,
        report: R,
    ) -> Self {
        let is_here = shared.here[0] == 0;
        let saving = |saver: &Option<Arc<Saver>>| {
            saver.as_ref().map(|saver| Saving::new(saver, &groups.world, is_here))
        };
        Self {
            saving: saving(&shared.saver),
            copying: saving(&shared.copier),
            shared,
            groups,
            meter,
            executor,
            evaluator,
            best: Best::new(roster.peak_flops()),
            clock: roster.clock(),
            report,
            done: 0,
            skipped: Skipped::default(),
            spans: Vec::new(),
            end: RankEnd::default(),
        }
    }

    fn tell(&mut self, news: News) {
        if self.groups.world.rank() == self.shared.here[0] {
            (self.report)(news);
        }
    }

    /// Runs all steps, or those until a stop, after where the rank was `resumed`.
    pub(crate) fn run(&mut self, resumed: Option<Resumed>) -> Result<(), RankError> {
        self.done = resumed.as_ref().map_or(0, |resumed| resumed.step);
        self.tell(News::Ready(resumed));
        let (shared, config) = (self.shared, &self.shared.blueprint.config);
        if shared.export == Export::Evaluation {
            let evaluator = self.evaluator.as_mut().expect("asked for where there is one");
            let evaluation = evaluator.run(self.groups, &mut self.executor, self.done)?;
            self.tell(News::Evaluated(evaluation));
            return Ok(());
        }
        let last = match shared.export {
            Export::Gradients => self.done + 1,
            _ => config.steps,
        };
        shared.stopper.begin();
        let mut step_start = Instant::now();
        for step in self.done + 1..=last {
            let told = debug_span!("step", step).in_scope(|| self.step(step, last, step_start))?;
            let Told { wish, saves, copies } = told;
            if let Some(first) = self.skipped.beyond(config.max_skipped) {
                let at = (first, self.skipped.in_a_row);
                self.end.diverged = Some(diagnose(&mut self.executor, self.groups, at)?);
                break;
            }
            let stops = matches!(wish, Wish::Stop(_)) && step < last;
            let log = shared.traces(step, self.done).then_some(shared.epoch);
            if let Some(saving) = self.saving.as_mut().filter(|_| saves != Begin::No) {
                if saves == Begin::AfterTheOneBefore {
                    saving.settle(false)?;
                }
                saving.begin(step, &mut self.executor.worker, log);
            }
            if let Some(copying) = self.copying.as_mut().filter(|_| copies != Begin::No) {
                copying.begin(step, &mut self.executor.worker, log);
            }
            if stops {
                let no_lower = self.out_of_patience().filter(|_| wish.signal().is_none());
                self.end.stopped = Some(Stopped { step, signal: wish.signal(), no_lower });
                break;
            }
            // What the program does between two steps is no part of one.
            step_start = Instant::now();
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

    /// The validation loss after `step`, where it is due.
    fn evaluate(&mut self, step: u64) -> Result<Option<Evaluation>, RankError> {
        let config = &self.shared.blueprint.config;
        let due = step == config.steps || step.is_multiple_of(config.eval_every.max(1));
        let Some(evaluator) = self.evaluator.as_mut().filter(|_| due) else { return Ok(None) };
        if self.shared.export == Export::Gradients {
            return Ok(None);
        }
        let evaluation = evaluator.run(self.groups, &mut self.executor, step)?;
        for saver in self.shared.saver.iter().chain(&self.shared.copier) {
            saver.evaluated(step, &evaluation, evaluator.plateau());
        }
        Ok(Some(evaluation))
    }

    /// How many validation losses in a row were no lower than the lowest, where that is more than
    /// the settings wait for.
    fn out_of_patience(&self) -> Option<u64> {
        let patience = self.shared.blueprint.config.patience;
        let since = self.evaluator.as_ref()?.plateau()?.since;
        (patience > 0 && since >= patience).then_some(since)
    }

    /// Runs a step, tells of it and returns what all ranks are to do after it.
    fn step(&mut self, step: u64, last: u64, start: Instant) -> Result<Told, RankError> {
        let (shared, groups) = (self.shared, self.groups);
        self.meter.reset_peak();
        if shared.blueprint.config.looks_at_layers(step) {
            self.executor.worker.watch_layers();
        }
        let record = self.executor.run_step(step).map_err(RankError::Step)?;
        let losses = self.executor.worker.take_losses();
        let mut mine = summarise(&record, losses, groups, self.meter);
        mine.layers = layers::watched(&shared.blueprint, self.executor.worker.take_watched());
        mine.computed.start_ns = self.clock.shift(mine.computed.start_ns);
        mine.computed.end_ns = self.clock.shift(mine.computed.end_ns);
        if let Some(saving) = &mut self.saving {
            mine.save_blocked_ns = saving.take_blocked_ns();
            mine.save = saving.take_report();
        }
        if let Some(copying) = &mut self.copying {
            mine.save_blocked_ns += copying.take_blocked_ns();
            mine.copy = copying.take_report();
        }
        // Rank 0 alone reads all records: what everyone needs of them is in its answer.
        let all = collect::figures(&*groups.world, &(shared.stopper.hear(), mine))?;
        let (wishes, mut records): (Vec<Wish>, Vec<RankStep>) = all.into_iter().unzip();
        let (mut wish, mut news) = (wishes.into_iter().max().unwrap_or_default(), None);
        if groups.world.rank() == 0 {
            if let Some(saving) = &mut self.saving {
                saving.look(records.iter_mut().filter_map(|r| r.save.take()).collect())?;
            }
            if let Some(copying) = &mut self.copying {
                copying.look(records.iter_mut().filter_map(|r| r.copy.take()).collect())?;
            }
            let seconds = start.elapsed().as_secs_f64();
            let best = &mut self.best;
            news = Some(step_metrics(&shared.blueprint, step, seconds, best, &record, &records));
        }
        // What it takes is no part of the step.
        let eval = self.evaluate(step)?;
        if eval.is_some() && self.out_of_patience().is_some() {
            wish = wish.max(Wish::Stop(0));
        }
        let is_best = shared.blueprint.config.keep_best && eval.is_some_and(|eval| eval.best);
        let mut told = Vec::new();
        if let Some((metrics, times)) = news {
            let metrics = StepMetrics { eval, ..metrics };
            if shared.here.len() < groups.world.size() {
                // JSON is read back to a neighbouring number at times; these are exact.
                let exact = [metrics.loss.to_bits(), metrics.grad_norm.to_bits()];
                told = serde_json::to_vec(&(&metrics, &times, exact)).expect("plain numbers");
            }
            (self.report)(News::Step(metrics, times));
        }
        let outcome = record.outcome.expect("every program ends with the optimizer step");
        self.skipped.see(step, outcome.skipped);
        if shared.traces(step, self.done) {
            self.spans.extend(record.spans);
        }
        let updates = self.executor.worker.optimizer().updates();
        let (is_good, ends) = (!outcome.skipped, step == last);
        let end = StepEnd { step, updates, is_good, asked: false, is_best, ends };
        self.agree(end, wish, &told, eval)
    }

    /// What all ranks do after a step that ended like this: what they `wished`, and the trainer of
    /// rank 0's process; all get the same. The other processes hear what rank 0's was `told`; every
    /// rank has measured `eval`.
    fn agree(
        &mut self,
        end: StepEnd,
        wished: Wish,
        told: &[u8],
        eval: Option<Evaluation>,
    ) -> Result<Told, RankError> {
        let (shared, world) = (self.shared, &*self.groups.world);
        let patience = Patience::new(&shared.blueprint.config);
        let diverged = self.skipped.beyond(shared.blueprint.config.max_skipped).is_some();
        let savings = [&mut self.saving, &mut self.copying];
        let mut savings = savings.map(|saving| saving.as_mut().filter(|_| !diverged));
        let mut message = |wish: Wish| {
            let ends = end.ends || matches!(wish, Wish::Stop(_));
            let end = StepEnd { asked: wish == Wish::Save, ends, ..end };
            let begins = savings.each_mut().map(|saving| match saving {
                Some(saving) => saving.decide(end) as u8,
                None => Begin::No as u8,
            });
            [&wish.to_bytes()[..], &begins, told].concat()
        };
        let answer = |wait: Duration| {
            let answers = shared.answers.as_ref().expect("rank 0's process has them");
            match answers.lock().recv_timeout(wait) {
                // Since the exchange more may have been wished here.
                Ok(answer) => Some(message(answer.max(wished).max(shared.stopper.hear()))),
                Err(RecvTimeoutError::Timeout) => None,
                // The trainer is gone: nobody wants more.
                Err(RecvTimeoutError::Disconnected) => Some(message(wished.max(Wish::Stop(0)))),
            }
        };
        let answer = patience.follow_rank_0(world, answer)?;
        let (head, told) = answer.split_at(4);
        if world.rank() > 0 && world.rank() == shared.here[0] {
            let read = serde_json::from_slice(told).expect("written by rank 0");
            let (mut metrics, times, exact): (StepMetrics, _, [u64; 2]) = read;
            [metrics.loss, metrics.grad_norm] = exact.map(f64::from_bits);
            metrics.eval = eval;
            (self.report)(News::Step(metrics, times));
        }
        let wish = Wish::from_bytes([head[0], head[1]]);
        let [saves, copies] = [head[2], head[3]].map(Begin::from_byte);
        Ok(Told { wish, saves, copies })
    }

    /// What the rank leaves behind; those of other processes come to rank 0.
    pub(crate) fn finish(mut self) -> Result<RankEnd, RankError> {
        let (shared, c) = (self.shared, self.groups.coords);
        if self.end.diverged.is_some() {
            return Ok(self.end);
        }
        let worker = &self.executor.worker;
        let exported = match shared.export {
            Export::Weights if c.dp == 0 => {
                worker.sharded().iter().flat_map(ShardedStage::export).collect()
            }
            // Without ZeRO-1 the replicas hold the same pieces.
            Export::Gradients => worker.captured().to_vec(),
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
        let result = RankResult { spans, saves, clock_error_ns: clock.error_ns, exported };
        self.end.results = match shared.here.len() == self.groups.world.size() {
            true => vec![result],
            false => collect::to_rank_0(&*self.groups.world, result)?,
        };
        Ok(self.end)
    }
}
