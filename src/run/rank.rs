//! One rank: builds its stages, runs the steps, reports each of them.

use std::sync::mpsc::Receiver;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use burn::tensor::Device;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use zeropp_checkpoint::under_way::WriterReport;
use zeropp_comm::Communicator;
use zeropp_comm::groups::Groups;
use zeropp_core::data::{Dataset, Sampler};
use zeropp_core::meter::{MemoryBytes, Meter};
use zeropp_core::metrics::{Evaluation, StepMetrics, Stopped, wall_time};
use zeropp_pipeline::executor::{
    Executor, Instruments, ModelWorker, StatusBoard, StepRecord, WorkerOptions,
};
use zeropp_pipeline::ir::{Action, Compute};
use zeropp_pipeline::simulate::StageCosts;
use zeropp_pipeline::timeline::{Computed, SaveSpan, Span, bubble, bubble_own_span, bubble_step};
use zeropp_plan::recompute::{Recomputed, redone};
use zeropp_zero3::optimizer::OptimizerOptions;
use zeropp_zero3::stage::ShardOptions;
use zeropp_zero3::{Optimizer, ParamExport, ShardedStage};

use crate::checkpoint::Saver;
use crate::checkpoint::initial::{self, Initial};
use crate::checkpoint::patience::Patience;
use crate::checkpoint::resume::{Loader, Resumed};
use crate::config::{Config, StepRange};
use crate::error::RankError;
use crate::plan::blueprint::Blueprint;
use crate::plan::peak::{BestRate, Peak};
use crate::recorder::FlightRecorder;
use crate::run::agreement::{AgreedBlueprint, Digests, agree};
use crate::run::diagnose::Diverged;
use crate::run::evaluation::{EvaluationSet, Evaluator};
use crate::run::layers::{self, LayerWatch};
use crate::run::processes;
use crate::run::request::StepAnswer;
use crate::run::reschedule::{Offered, RankNote};
use crate::run::stop::Stopper;
use crate::run::tokens::{self, Scored};
use crate::run::training::Training;
use crate::world::hello::Roster;

/// Steps whose spans a trace keeps by default.
const TRACED_STEPS: u64 = 8;

/// The state that all ranks of the process share.
#[derive(Clone)]
pub(crate) struct RunShared {
    pub(crate) blueprint: Arc<Blueprint>,
    pub(crate) data: Arc<(Dataset, Sampler)>,
    pub(crate) status: Arc<StatusBoard>,
    pub(crate) epoch: Instant,
    /// A name for the run, given before its ranks start; rank 0's process's counts.
    pub(crate) run: Arc<str>,
    /// The descriptions of all processes, once they are known.
    pub(crate) roster: Arc<OnceLock<Arc<Roster>>>,
    /// The cores or GPUs of this machine, and their peak FLOP/s.
    pub(crate) peak: Peak,
    /// World ranks of this process.
    pub(crate) here: Arc<[usize]>,
    /// Name of this machine.
    pub(crate) host: String,
    pub(crate) export: Export,
    pub(crate) loader: Option<Arc<Loader>>,
    /// The weights that the run begins with, if it begins.
    pub(crate) initial: Option<Arc<Initial>>,
    pub(crate) saver: Option<Arc<Saver>>,
    /// The saver that makes the copies in memory, if the run makes any.
    pub(crate) copier: Option<Arc<Saver>>,
    /// The samples of the validation loss.
    pub(crate) evaluation: Option<Arc<EvaluationSet>>,
    pub(crate) stopper: Stopper,
    /// In rank 0's process, the trainer's answer to each reported step.
    pub(crate) answers: Option<Arc<Mutex<Receiver<StepAnswer>>>>,
    pub(crate) recorder: Option<Arc<FlightRecorder>>,
    /// Of this process's own settings and blueprint.
    pub(crate) digests: Arc<OnceLock<Digests>>,
    /// The blueprint that this process runs in place of its own, if it cannot run that, and in
    /// which settings it differs; or why it cannot run rank 0's either.
    pub(crate) agreed: Arc<OnceLock<Result<AgreedBlueprint, String>>>,
    /// The program that rank 0 has offered last.
    pub(crate) offered: Offered,
}

impl RunShared {
    /// Whether what the ranks do is kept.
    pub(crate) fn is_traced(&self) -> bool {
        let config = &self.blueprint.config;
        config.trace.is_some() || config.save_costs.is_some() || self.export == Export::Timeline
    }

    /// Whether what they do in `step` is kept, of a run that had `done` steps behind it.
    pub(crate) fn traces(&self, step: u64, done: u64) -> bool {
        let steps = traced_steps(&self.blueprint.config, done);
        self.is_traced() && (steps.first..=steps.last).contains(&step)
    }
}

/// The steps that a trace holds, of a run that had `done` steps behind it.
pub(crate) fn traced_steps(config: &Config, done: u64) -> StepRange {
    let first = StepRange { first: done + 1, last: done + TRACED_STEPS };
    config.trace_steps.unwrap_or(first)
}

/// The results that the ranks leave behind besides their figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Export {
    Nothing,
    Weights,
    /// The reduced gradients of one single step.
    Gradients,
    /// The validation loss of the weights as they are: no step is run.
    Evaluation,
    /// The spans of every rank, in the steps that a trace holds.
    Timeline,
}

/// The results that a rank leaves behind.
#[derive(Default)]
pub(crate) struct RankResult {
    /// Times by rank 0's clock.
    pub(crate) spans: Vec<Span>,
    /// Saves of the steps that a trace holds.
    pub(crate) saves: Vec<SaveSpan>,
    /// How far from rank 0's clock that may be.
    pub(crate) clock_error_ns: u64,
    pub(crate) exported: Vec<ParamExport>,
}

/// How a rank's part of the run ended, where nothing failed.
#[derive(Default)]
pub(crate) struct RankEnd {
    /// The results of this rank; where there are several processes, those of all ranks on rank 0.
    pub(crate) results: Vec<RankResult>,
    pub(crate) stopped: Option<Stopped>,
    pub(crate) diverged: Option<Diverged>,
    /// Step of the newest checkpoint that was written.
    pub(crate) saved: Option<u64>,
}

impl RankEnd {
    /// Those of this rank and of `next`, which comes after it.
    pub(crate) fn and(mut self, next: RankEnd) -> RankEnd {
        self.results.extend(next.results);
        RankEnd {
            results: self.results,
            stopped: next.stopped.or(self.stopped),
            diverged: next.diverged.or(self.diverged),
            saved: next.saved.or(self.saved),
        }
    }
}

/// A state that is ready.
pub(crate) struct Ready {
    /// Since when, in seconds since 1970.
    pub(crate) at: f64,
    /// Read from here.
    pub(crate) resumed: Option<Resumed>,
    /// How many validation losses in a row were no lower, where the settings wait for no more: no
    /// step is left to do.
    pub(crate) no_lower: Option<u64>,
}

/// An event that a rank reports to its process while it runs.
pub(crate) enum RankEvent {
    /// Its state is ready for the first step, which rank 0 begins when its trainer says so.
    Ready(Ready),
    /// A step is done; and whether all ranks wait at its end for what is to follow.
    Step(StepMetrics, StageTimes, bool),
    /// The validation loss that was asked for.
    Evaluated(Evaluation),
    /// The weights that were asked for: of all ranks where rank 0 is, and none elsewhere.
    Weights(Vec<RankResult>),
}

/// One rank's figures of a step, which go to rank 0 at its end.
#[derive(Serialize, Deserialize)]
pub(crate) struct RankStep {
    losses: Vec<MicroBatchLoss>,
    /// Scored tokens of the whole step, where not all are and the rank has a head.
    #[serde(default)]
    pub(crate) scored: Option<u64>,
    /// By rank 0's clock.
    pub(crate) computed: Computed,
    all_gathers: u64,
    reduce_scatters: u64,
    all_reduces: u64,
    /// All-gathers that made matrices whole for the optimizer.
    optimizer_gathers: u64,
    sent_bytes: u64,
    peak: MemoryBytes,
    at_once: u64,
    early: u64,
    idle: u64,
    times: StageTimes,
    /// The layers of its stages, in a step in which layers are looked at.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) layers: Vec<LayerWatch>,
    /// Nanoseconds of work that the rank did again.
    redone_ns: u64,
    /// Nanoseconds that saving kept the rank from its work.
    pub(crate) save_blocked_ns: u64,
    /// The report of the rank's writer, where it is done and in another process than rank 0.
    pub(crate) save: Option<WriterReport>,
    /// The same of a copy in memory.
    pub(crate) copy: Option<WriterReport>,
    /// What it says where programs are exchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reschedule: Option<RankNote>,
}

/// The loss of one micro-batch. Their order is that of the batch's samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct MicroBatchLoss {
    dp: usize,
    zero3: usize,
    micro_batch: usize,
    /// Of the loss.
    bits: u32,
}

/// The times of each kind of compute action on each stage, in that order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct StageTimes(Vec<StageTime>);

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct StageTime {
    stage: usize,
    kind: Compute,
    /// Of all together.
    ns: u64,
    /// How many.
    n: u64,
}

impl StageTimes {
    fn find(&self, stage: usize, kind: Compute) -> Result<usize, usize> {
        self.0.binary_search_by_key(&(stage, kind), |t| (t.stage, t.kind))
    }

    fn add(&mut self, time: StageTime) {
        match self.find(time.stage, time.kind) {
            Ok(at) => {
                self.0[at].ns += time.ns;
                self.0[at].n += time.n;
            }
            Err(at) => self.0.insert(at, time),
        }
    }

    pub(crate) fn merge(&mut self, other: &StageTimes) {
        other.0.iter().for_each(|time| self.add(*time));
    }

    /// Mean times of each stage. A whole backward counts as B, with nothing left for W.
    pub(crate) fn costs(&self, stages: usize) -> Vec<StageCosts> {
        let mean = |stage: usize, kind: Compute| {
            self.find(stage, kind).map_or(0, |at| self.0[at].ns / self.0[at].n.max(1))
        };
        (0..stages)
            .map(|s| StageCosts {
                f_ns: mean(s, Compute::F),
                b_ns: mean(s, Compute::B) + mean(s, Compute::BW),
                w_ns: mean(s, Compute::W),
                r_ns: mean(s, Compute::R),
                ..StageCosts::default()
            })
            .collect()
    }

    fn of(spans: &[Span]) -> StageTimes {
        let mut times = StageTimes::default();
        for span in spans {
            if let Action::Compute { kind, stage, .. } = span.action {
                times.add(StageTime { stage, kind, ns: span.end_ns - span.start_ns, n: 1 });
            }
        }
        times
    }
}

/// Runs all steps on one rank, which computes on `device`; `report` receives its events on a
/// process's first rank.
pub(crate) fn run_rank(
    shared: &RunShared,
    device: Device,
    world: Arc<dyn Communicator>,
    report: impl FnMut(RankEvent),
) -> Result<RankEnd, RankError> {
    // First of all: what follows is done together only where the settings say the same.
    let shared = &RunShared { blueprint: agree(shared, &*world)?, ..shared.clone() };
    let (roster, copies) = processes::meet(shared, &*world)?;
    let copier = shared.copier.clone().filter(|_| copies);
    let shared = &RunShared { copier, ..shared.clone() };
    let threads = processes::threads(shared, &roster, world.rank())?;
    let _in_use = threads.install();
    let groups = Groups::new(world, shared.blueprint.mesh)?;
    let meter = Meter::new();
    let scored = Scored::default();
    let (mut executor, resumed) = build_executor(shared, &device, &groups, &meter, &scored)?;
    if shared.export == Export::Gradients {
        executor.worker.capture_gradients();
    }
    let evaluator = evaluator(shared, &device, &groups, resumed.as_ref())?;
    let context = (&groups, &*meter, scored);
    let mut training = Training::new(shared, context, executor, evaluator, &roster, report)?;
    training.run(resumed)?;
    training.finish()
}

/// Fills what this rank has of the weights that the run begins with; where it goes on, of those
/// alone that do not train.
fn read_initial(
    shared: &RunShared,
    groups: &Groups,
    goes_on: bool,
    stages: &mut [ShardedStage],
) -> Result<(), RankError> {
    let (bp, initial) = (&shared.blueprint, shared.initial.as_deref());
    let mut read = || match goes_on {
        false => initial::read(bp, initial, stages),
        true if bp.base.is_some() => initial::read_frozen(initial, stages),
        true => Ok(()),
    };
    match bp.config.init_from {
        Some(_) => initial::read_together(Patience::new(&bp.config), &*groups.world, read),
        None => read(),
    }
}

fn build_executor(
    shared: &RunShared,
    device: &Device,
    groups: &Groups,
    meter: &Arc<Meter>,
    scored: &Scored,
) -> Result<(Executor<ModelWorker>, Option<Resumed>), RankError> {
    let bp = &shared.blueprint;
    let config = &bp.config;
    let options = ShardOptions {
        device: device.clone(),
        compute: bp.compute,
        pack_weights: bp.packs_weights(),
        zero1: config.zero1,
        seed: config.seed,
    };
    let pp = groups.coords.pp;
    let schedule = bp.programs.of(groups.coords.dp);
    let mine = schedule.stages_of(pp);
    let parts: Vec<_> =
        mine.iter().map(|s| bp.model.parts[bp.stages[*s].clone()].to_vec()).collect();
    let mut sharded: Vec<_> = mine
        .iter()
        .zip(&parts)
        .map(|(s, parts)| ShardedStage::new(*s, parts, groups, &options, meter))
        .collect();
    let mut optimizer =
        Optimizer::new(&mut sharded, groups, optimizer_options(bp), config.zero1, meter);
    let resumed = match &shared.loader {
        Some(loader) => loader.load(&*groups.world, &mut sharded, &mut optimizer)?,
        None => None,
    };
    read_initial(shared, groups, resumed.is_some(), &mut sharded)?;
    if resumed.is_none() {
        // A mean of the weights begins with them.
        optimizer.restart(&sharded);
    }
    optimizer.share_tied(&mut sharded);
    let batches = config.deal().all() * bp.mesh.zero3;
    // Stages recompute where the replica's own program says so.
    let recomputed = Recomputed::new(config.recompute, schedule);
    let worker_options = WorkerOptions {
        device: device.clone(),
        dims: [config.micro_batch_size, config.seq, bp.model.hidden],
        compute: bp.compute,
        loss_scale: 1.0 / batches as f32,
        units: schedule.units.clone(),
        redone: redone(schedule),
        selective: recomputed.selective,
    };
    let sampler = match &resumed {
        Some(Resumed { step, position, .. }) => {
            shared.data.1.clone().going_on(*step, position.clone())
        }
        None => shared.data.1.clone(),
    };
    for saver in shared.saver.iter().chain(&shared.copier) {
        saver.goes_on(sampler.clone());
    }
    let tokens = tokens::training(shared, device, groups, sampler, scored);
    let worker = ModelWorker::new(worker_options, tokens, parts, sharded, optimizer, meter.clone());
    let executor = Executor::new(
        schedule,
        groups.pipeline.clone(),
        groups.world.rank(),
        Instruments { meter: meter.clone(), status: shared.status.clone(), epoch: shared.epoch },
        worker,
    );
    Ok((executor, resumed))
}

/// This rank's part of the validation losses, if the run has any.
fn evaluator(
    shared: &RunShared,
    device: &Device,
    groups: &Groups,
    resumed: Option<&Resumed>,
) -> Result<Option<Evaluator>, RankError> {
    let Some(set) = &shared.evaluation else { return Ok(None) };
    let bp = &shared.blueprint;
    let before = match &shared.saver {
        Some(saver) => saver.plateau(&*groups.world, resumed, bp.config.keep_best)?,
        None => None,
    };
    if let Some(copier) = &shared.copier {
        copier.begin_plateau(before);
    }
    let tokens = tokens::evaluation(shared, device, groups, set);
    Ok(Some(Evaluator::new(bp, set.clone(), tokens, groups, before)))
}

fn optimizer_options(bp: &Blueprint) -> OptimizerOptions {
    OptimizerOptions {
        parameters: bp.own.parameters(&bp.config),
        lr: bp.own.rate(&bp.config),
        clip: bp.config.clip,
        tie: bp.tie(),
    }
}

pub(crate) fn summarise(
    record: &StepRecord,
    losses: Vec<(usize, f32)>,
    groups: &Groups,
    meter: &Meter,
) -> RankStep {
    let c = groups.coords;
    let count =
        |f: fn(&Action) -> bool| record.spans.iter().filter(|s| f(&s.action)).count() as u64;
    let (early, idle) = groups.held_aside();
    let loss = |(micro_batch, loss): (usize, f32)| MicroBatchLoss {
        dp: c.dp,
        zero3: c.zero3,
        micro_batch,
        bits: loss.to_bits(),
    };
    RankStep {
        losses: losses.into_iter().map(loss).collect(),
        scored: None,
        computed: Computed::of(&record.spans).unwrap_or_default(),
        all_gathers: count(|a| matches!(a, Action::AllGather { .. })),
        reduce_scatters: count(|a| matches!(a, Action::ReduceScatter { .. })),
        all_reduces: count(|a| matches!(a, Action::ReplicaReduce { .. })),
        optimizer_gathers: record.outcome.map_or(0, |outcome| outcome.gathers),
        sent_bytes: record.sent_bytes,
        peak: meter.peak(),
        at_once: meter.at_once().total(),
        early,
        idle,
        times: StageTimes::of(&record.spans),
        layers: Vec::new(),
        redone_ns: record.redone.map_or(0, |redone| redone.ns),
        save_blocked_ns: 0,
        save: None,
        copy: None,
        reschedule: None,
    }
}

pub(crate) fn step_metrics(
    bp: &Blueprint,
    step: u64,
    step_s: f64,
    best: &mut BestRate,
    record: &StepRecord,
    ranks: &[RankStep],
) -> (StepMetrics, StageTimes) {
    let mut losses: Vec<_> = ranks.iter().flat_map(|r| r.losses.iter().copied()).collect();
    losses.sort_unstable();
    let sum: f64 = losses.iter().map(|l| f64::from(f32::from_bits(l.bits))).sum();
    let outcome = record.outcome.expect("every program ends with the optimizer step");
    let tokens = bp.config.tokens_per_step() as u64;
    let tokens_per_s = tokens as f64 / step_s;
    let total = |f: fn(&RankStep) -> u64| ranks.iter().map(f).sum();
    let most = |f: fn(&RankStep) -> u64| ranks.iter().map(f).max().unwrap_or(0);
    let computed: Vec<Computed> = ranks.iter().map(|r| r.computed).collect();
    let mut times = StageTimes::default();
    ranks.iter().for_each(|r| times.merge(&r.times));
    let metrics = StepMetrics {
        step,
        wall_time: wall_time(),
        loss: sum / losses.len() as f64,
        grad_norm: outcome.grad_norm,
        lr: outcome.lr,
        tokens,
        scored_tokens: ranks.iter().filter_map(|r| r.scored).max(),
        tokens_per_s,
        step_s,
        flops_util: best.utilisation(tokens_per_s * bp.plan.flops_per_token),
        bubble: bubble(&computed),
        bubble_own_span: bubble_own_span(&computed),
        bubble_step: bubble_step(&computed, (step_s * 1e9) as u64),
        all_gathers: total(|r| r.all_gathers),
        reduce_scatters: total(|r| r.reduce_scatters),
        all_reduces: total(|r| r.all_reduces),
        optimizer_gathers: total(|r| r.optimizer_gathers),
        comm_bytes: total(|r| r.sent_bytes),
        peak_bytes: ranks.iter().fold(MemoryBytes::default(), |m, r| m.max(&r.peak)),
        at_once_bytes: most(|r| r.at_once),
        early_bytes: most(|r| r.early),
        idle_bytes: total(|r| r.idle),
        save_blocked_s: most(|r| r.save_blocked_ns) as f64 / 1e9,
        layers: layers::metrics(bp, ranks.iter().flat_map(|r| &r.layers), outcome.skipped),
        eval: None,
        skipped: outcome.skipped,
        rolled_back: outcome.rolled_back,
        redone_s: most(|r| r.redone_ns) as f64 / 1e9,
    };
    (metrics, times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stage_times_add_up_in_any_order() {
        let (stages, ranks) = (4096, 512);
        let one = |rank: usize| {
            let mut times = StageTimes::default();
            for stage in (rank..stages).step_by(ranks).rev() {
                for kind in [Compute::F, Compute::B, Compute::W] {
                    times.add(StageTime { stage, kind, ns: 10 + stage as u64, n: 2 });
                }
            }
            times
        };
        let (mut forth, mut back) = (StageTimes::default(), StageTimes::default());
        for rank in 0..ranks {
            forth.merge(&one(rank));
            back.merge(&one(ranks - 1 - rank));
        }
        assert_eq!(forth, back);
        let costs = forth.costs(stages);
        assert!((0..stages).all(|s| costs[s].f_ns == (10 + s as u64) / 2 && costs[s].r_ns == 0));
    }
}
