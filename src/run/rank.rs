//! One rank: builds its stages, runs the steps, reports each of them.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::Device;
use zeropp_comm::Communicator;
use zeropp_comm::groups::Groups;
use zeropp_core::files::ScratchFile;
use zeropp_core::kernels::threads::Threads;
use zeropp_core::meter::Meter;
use zeropp_pipeline::executor::{Executor, Instruments, ModelWorker, WorkerOptions};
use zeropp_pipeline::ir::Schedule;
use zeropp_plan::recompute::{Recomputed, copied_out, redone};
use zeropp_zero3::optimizer::OptimizerOptions;
use zeropp_zero3::stage::ShardOptions;
use zeropp_zero3::state_file::StateFile;
use zeropp_zero3::{Optimizer, ShardedStage};

use crate::checkpoint::initial;
use crate::checkpoint::patience::Patience;
use crate::checkpoint::resume::Resumed;
use crate::error::RankError;
use crate::plan::blueprint::Blueprint;
use crate::run::agreement::agree;
use crate::run::evaluation::Evaluator;
use crate::run::processes;
use crate::run::results::{RankEnd, RankEvent};
use crate::run::shared::{Export, RunShared};
use crate::run::tokens::{self, Scored};
use crate::run::training::Training;

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
    let starting = processes::starting_threads(shared, &roster);
    let (mut executor, resumed) = {
        let _in_use = starting.as_ref().map(Threads::install);
        build_executor(shared, &device, &groups, &meter, &scored)?
    };
    drop(starting);
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
    let (bp, config) = (&shared.blueprint, &shared.blueprint.config);
    let options = shard_options(bp, device, meter)?;
    let pp = groups.coords.pp;
    let schedule = bp.programs.of(groups.coords.dp);
    let (mine, parts): (Vec<_>, Vec<_>) = bp.layers_of(schedule, pp).into_iter().unzip();
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
    // Stages recompute where the replica's own program says so.
    let recomputed = Recomputed::new(config.recompute, schedule);
    let worker_options = WorkerOptions {
        device: device.clone(),
        dims: [config.micro_batch_size, config.seq, bp.model.hidden],
        sample_slices: schedule.sample_slices.iter().map(|tokens| *tokens as usize).collect(),
        compute: bp.compute,
        loss_scale: 1.0 / (config.deal().all() * bp.mesh.zero3) as f32,
        routers: config.router_losses(),
        units: schedule.units.clone(),
        redone: redone(schedule),
        selective: recomputed.selective,
        head: bp.head.as_ref().map(|head| (head.split.clone(), bp.stages.len())),
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
    let worker = copying_out(worker, schedule, config.recompute_out.as_deref())?;
    let executor = Executor::new(
        schedule,
        groups.pipeline.clone(),
        groups.world.rank(),
        Instruments { meter: meter.clone(), status: shared.status.clone(), epoch: shared.epoch },
        worker,
    );
    Ok((executor, resumed))
}

/// The worker with a file in `folder` for what its program copies out of memory, if it does.
fn copying_out(
    worker: ModelWorker,
    program: &Schedule,
    folder: Option<&Path>,
) -> Result<ModelWorker, RankError> {
    let out = copied_out(program);
    let Some(folder) = folder.filter(|_| !out.is_empty()) else { return Ok(worker) };
    let file = ScratchFile::open(folder).map_err(|e| no_file("recompute:out", folder, &e))?;
    Ok(worker.copying_out(out, file))
}

/// How this rank holds its stages.
fn shard_options(
    bp: &Blueprint,
    device: &Device,
    meter: &Arc<Meter>,
) -> Result<ShardOptions, RankError> {
    let config = &bp.config;
    let open = |folder: &Path| {
        StateFile::open(folder, meter).map_err(|e| no_file("optimizer:out", folder, &e))
    };
    Ok(ShardOptions {
        device: device.clone(),
        compute: bp.compute,
        pack_weights: bp.packs_weights(),
        zero1: config.zero1,
        seed: config.seed,
        file: config.optimizer_out.as_deref().map(open).transpose()?,
    })
}

fn no_file(field: &str, folder: &Path, error: &std::io::Error) -> RankError {
    let help = "choose a folder that may be written to";
    RankError::Program(format!("{field} = {}: {error}; {help}", folder.display()))
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
        tied_rows: bp.tied_rows(),
    }
}
