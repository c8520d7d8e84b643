//! The steps of one rank: each is run, reported, agreed on with the others and saved where due.

use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use tracing::{debug_span, info_span};
use zeropp_comm::groups::Groups;
use zeropp_core::meter::Meter;
use zeropp_core::metrics::{Evaluation, StepMetrics, Stopped};
use zeropp_pipeline::executor::{Executor, ModelWorker};
use zeropp_pipeline::timeline::Span;
use zeropp_zero3::ShardedStage;

use crate::checkpoint::patience::Patience;
use crate::checkpoint::resume::Resumed;
use crate::error::RankError;
use crate::plan::peak::Best;
use crate::run::collect;
use crate::run::diagnose::{Skipped, diagnose};
use crate::run::evaluation::Evaluator;
use crate::run::rank::{
    Export, News, RankEnd, RankResult, RankStep, Shared, step_metrics, summarise,
};
use crate::run::stop::Wish;

/// A rank's steps.
pub(crate) struct Training<'a, R> {
    shared: &'a Shared,
    groups: &'a Groups,
    meter: &'a Meter,
    executor: Executor<ModelWorker>,
    evaluator: Option<Evaluator>,
    /// What the steps' rates are held against.
    best: Best,
    report: R,
    /// Steps that a checkpoint had behind it.
    done: u64,
    skipped: Skipped,
    /// A checkpoint was due in a row of skipped steps.
    owed: bool,
    spans: Vec<Span>,
    end: RankEnd,
}

impl<'a, R: FnMut(News)> Training<'a, R> {
    pub(crate) fn new(
        shared: &'a Shared,
        (groups, meter): (&'a Groups, &'a Meter),
        executor: Executor<ModelWorker>,
        evaluator: Option<Evaluator>,
        peak_flops: f64,
        report: R,
    ) -> Self {
        Self {
            shared,
            groups,
            meter,
            executor,
            evaluator,
            best: Best::new(peak_flops),
            report,
            done: 0,
            skipped: Skipped::default(),
            owed: false,
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
            let (wish, best) =
                debug_span!("step", step).in_scope(|| self.step(step, step_start))?;
            if let Some(first) = self.skipped.beyond(config.max_skipped) {
                let at = (first, self.skipped.in_a_row);
                self.end.diverged = Some(diagnose(&mut self.executor, self.groups, at)?);
                break;
            }
            let stops = matches!(wish, Wish::Stop(_)) && step < last;
            self.save(step, stops || best || wish == Wish::Save)?;
            if stops {
                self.end.stopped = Some(Stopped { step, signal: wish.signal() });
                break;
            }
            // What a checkpoint takes is no part of a step, nor what the program does between two.
            step_start = Instant::now();
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
        if let Some(saver) = &self.shared.saver {
            saver.evaluated(step, &evaluation);
        }
        Ok(Some(evaluation))
    }

    /// Runs a step, tells of it and returns what all ranks are to do after it, and whether it is
    /// to be kept as the best.
    fn step(&mut self, step: u64, start: Instant) -> Result<(Wish, bool), RankError> {
        let (shared, groups) = (self.shared, self.groups);
        self.meter.reset_peak();
        let record = self.executor.run_step(step).map_err(RankError::Step)?;
        let losses = self.executor.worker.take_losses();
        let mut mine = summarise(&record, losses, groups, self.meter);
        let clock = shared.clock.get().copied().unwrap_or_default();
        mine.computed.start_ns = clock.shift(mine.computed.start_ns);
        mine.computed.end_ns = clock.shift(mine.computed.end_ns);
        let mut bytes = shared.stopper.hear().to_bytes().to_vec();
        serde_json::to_writer(&mut bytes, &mine).expect("plain numbers");
        // Rank 0 alone reads all records: what everyone needs of them is in its answer.
        let all = groups.world.gather(0, bytes).wait()?;
        let (mut wished, mut news) = (Wish::GoOn, None);
        if groups.world.rank() == 0 {
            let wishes = all.iter().map(|bytes| Wish::from_bytes([bytes[0], bytes[1]]));
            wished = wishes.max().unwrap_or_default();
            let read = |bytes: &Vec<u8>| {
                serde_json::from_slice(&bytes[2..]).expect("written by every rank")
            };
            let records: Vec<RankStep> = all.iter().map(read).collect();
            let at = (step, start.elapsed().as_secs_f64(), &mut self.best);
            news = Some(step_metrics(&shared.blueprint, at, &record, &records));
        }
        drop(all);
        // What it takes is no part of the step.
        let eval = self.evaluate(step)?;
        let best = shared.blueprint.config.keep_best && eval.is_some_and(|eval| eval.best);
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
        Ok((self.agree(wished, (&told, eval))?, best))
    }

    /// What the ranks `wished`, and the trainer of rank 0's process; all ranks get the same. The
    /// other processes hear what rank 0's was `told`.
    fn agree(
        &mut self,
        wished: Wish,
        (told, eval): (&[u8], Option<Evaluation>),
    ) -> Result<Wish, RankError> {
        let (shared, world) = (self.shared, &*self.groups.world);
        let patience = Patience::new(&shared.blueprint.config);
        let message = |wish: Wish| [&wish.to_bytes(), told].concat();
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
        let (wish, told) = answer.split_at(2);
        if world.rank() > 0 && world.rank() == shared.here[0] {
            let read = serde_json::from_slice(told).expect("written by rank 0");
            let (mut metrics, times, exact): (StepMetrics, _, [u64; 2]) = read;
            [metrics.loss, metrics.grad_norm] = exact.map(f64::from_bits);
            // Every rank has measured the same.
            metrics.eval = eval;
            (self.report)(News::Step(metrics, times));
        }
        Ok(Wish::from_bytes([wish[0], wish[1]]))
    }

    /// Saves after `step`, if it is due, `wanted` or owed. In a row of skipped steps the state is
    /// that of the last good one, so what is due waits for the next good one; where it cannot wait,
    /// no older checkpoint goes for it.
    fn save(&mut self, step: u64, wanted: bool) -> Result<(), RankError> {
        let shared = self.shared;
        let Some(saver) = &shared.saver else { return Ok(()) };
        let good = self.skipped.in_a_row == 0;
        let due = saver.is_due(step) || self.owed;
        self.owed = due && !good;
        if !(wanted || saver.is_last(step) || (due && good)) {
            return Ok(());
        }
        let _saving = info_span!("checkpoint", step).entered();
        let worker = &self.executor.worker;
        let at = (step, good);
        saver.save(at, &shared.blueprint, self.groups, worker.sharded(), worker.optimizer())?;
        self.end.saved = Some(step);
        Ok(())
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
        let name = format!("pp {} · zero3 {} · dp {}", c.pp, c.zero3, c.dp);
        let clock = shared.clock.get().copied().unwrap_or_default();
        for span in &mut self.spans {
            (span.start_ns, span.end_ns) = (clock.shift(span.start_ns), clock.shift(span.end_ns));
        }
        let spans = self.spans;
        let result = RankResult { spans, clock_error_ns: clock.error_ns, name, exported };
        self.end.results = match shared.here.len() == self.groups.world.size() {
            true => vec![result],
            false => collect::to_rank_0(&*self.groups.world, result)?,
        };
        Ok(self.end)
    }
}
