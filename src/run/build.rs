//! What a rank's steps are run with: its stages with their state, its executor, its evaluator; at
//! the run's start, and where its stages have been cut anew.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::Device;
use zeropp_checkpoint::Plateau;
use zeropp_comm::groups::Groups;
use zeropp_core::data::Sampler;
use zeropp_core::layer::Part;
use zeropp_core::meter::Meter;
use zeropp_core::split::AwayPlace;
use zeropp_pipeline::executor::{Executor, Instruments, ModelWorker, WorkerOptions};
use zeropp_pipeline::ir::Schedule;
use zeropp_plan::layout::HOST;
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
use crate::plan::host;
use crate::run::evaluation::Evaluator;
use crate::run::recut::Leaving;
use crate::run::shared::RunShared;
use crate::run::tokens::{self, Scored};

/// What a rank has for as long as its world lives, whatever its stages are.
pub(crate) struct Bench {
    pub(crate) device: Device,
    pub(crate) groups: Groups,
    pub(crate) meter: Arc<Meter>,
    /// Scored tokens of the step under way.
    pub(crate) scored: Scored,
}

/// A rank that is ready for its next step.
pub(crate) struct Built {
    pub(crate) executor: Executor<ModelWorker>,
    pub(crate) sampler: Sampler,
    /// Where it goes on, if it does.
    pub(crate) resumed: Option<Resumed>,
}

/// A rank's stages and what updates them.
struct Stages {
    parts: Vec<Vec<Part>>,
    sharded: Vec<ShardedStage>,
    optimizer: Optimizer,
}

/// The rank as it begins the run, or goes on from a checkpoint. All ranks call it.
///
/// # Errors
/// A checkpoint or weights that cannot be read; the world's first.
pub(crate) fn begun(shared: &RunShared, bench: &Bench) -> Result<Built, RankError> {
    let mut stages = stages(shared, bench)?;
    let Stages { sharded, optimizer, .. } = &mut stages;
    let resumed = match &shared.loader {
        Some(loader) => loader.load(&*bench.groups.world, sharded, optimizer)?,
        None => None,
    };
    read_initial(shared, &bench.groups, resumed.is_some(), sharded)?;
    if resumed.is_none() {
        // A mean of the weights begins with them.
        optimizer.restart(sharded);
    }
    let sampler = match &resumed {
        Some(Resumed { step, position, .. }) => {
            shared.data.1.clone().going_on(*step, position.clone())
        }
        None => shared.data.1.clone(),
    };
    for saver in shared.saver.iter().chain(&shared.copier) {
        saver.goes_on(sampler.clone());
    }
    let executor = executor(shared, bench, stages, sampler.clone())?;
    Ok(Built { executor, sampler, resumed })
}

/// The rank with the stages that it has from now on, and the state that `leaving` ranks had of
/// them, and how many bytes ranks sent each other for it. All ranks call it.
///
/// # Errors
/// The world's first.
pub(crate) fn recut(
    shared: &RunShared,
    bench: &Bench,
    sampler: Sampler,
    leaving: Leaving,
) -> Result<(Executor<ModelWorker>, u64), RankError> {
    let mut stages = stages(shared, bench)?;
    let Stages { sharded, optimizer, .. } = &mut stages;
    let moved = leaving.arrive(&*bench.groups.world, &bench.device, sharded, optimizer)?;
    Ok((executor(shared, bench, stages, sampler)?, moved))
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

/// The rank's stages, of which nothing is known yet.
fn stages(shared: &RunShared, bench: &Bench) -> Result<Stages, RankError> {
    let (bp, config) = (&shared.blueprint, &shared.blueprint.config);
    let options = shard_options(bp, bench)?;
    let (groups, meter) = (&bench.groups, &bench.meter);
    let schedule = bp.programs.of(groups.coords.dp);
    let mine = bp.layers_of(schedule, groups.coords.pp);
    let (mine, parts): (Vec<_>, Vec<_>) = mine.into_iter().unzip();
    let mut sharded: Vec<_> = mine
        .iter()
        .zip(&parts)
        .map(|(s, parts)| ShardedStage::new(*s, parts, groups, &options, meter))
        .collect();
    let optimizer =
        Optimizer::new(&mut sharded, groups, optimizer_options(bp), config.zero1, meter);
    Ok(Stages { parts, sharded, optimizer })
}

/// What runs the steps of the rank with these stages, of the samples from where `sampler` begins.
fn executor(
    shared: &RunShared,
    bench: &Bench,
    stages: Stages,
    sampler: Sampler,
) -> Result<Executor<ModelWorker>, RankError> {
    let (bp, config) = (&shared.blueprint, &shared.blueprint.config);
    let Bench { device, groups, meter, scored } = bench;
    let Stages { parts, mut sharded, optimizer } = stages;
    optimizer.share_tied(&mut sharded);
    let schedule = bp.programs.of(groups.coords.dp);
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
    let tokens = tokens::training(shared, device, groups, sampler, scored);
    let worker = ModelWorker::new(worker_options, tokens, parts, sharded, optimizer, meter.clone());
    let worker = copying_out(worker, schedule, bp, bench)?;
    Ok(Executor::new(
        schedule,
        groups.pipeline.clone(),
        groups.world.rank(),
        Instruments { meter: meter.clone(), status: shared.status.clone(), epoch: shared.epoch },
        worker,
    ))
}

/// The worker with a place for what its program copies out of memory, if it does.
fn copying_out(
    worker: ModelWorker,
    program: &Schedule,
    bp: &Blueprint,
    bench: &Bench,
) -> Result<ModelWorker, RankError> {
    let out = copied_out(program);
    if bp.config.recompute_out.is_none() || out.is_empty() {
        return Ok(worker);
    }
    let place = match bp.config.out_folder() {
        Some(folder) => AwayPlace::file(folder).map_err(|e| no_file("recompute:out", folder, &e)),
        None => pinned(&host::activations(bp, bench.groups.coords), bench),
    };
    Ok(worker.copying_out(out, place?))
}

/// Pinned memory of the rank's host.
fn pinned(pinned: &host::Pinned, bench: &Bench) -> Result<AwayPlace, RankError> {
    let host::Pinned { field, bytes, parcels, help } = *pinned;
    AwayPlace::host(&bench.device, bytes, parcels, field)
        .map_err(|error| RankError::Program(format!("{field} = {HOST}: {error}; {help}")))
}

/// How this rank holds its stages.
fn shard_options(bp: &Blueprint, bench: &Bench) -> Result<ShardOptions, RankError> {
    let config = &bp.config;
    let (out, meter) = (bp.states_out(), &bench.meter);
    let file = match (config.states_folder(), config.states_on_host()) {
        (Some(folder), _) => Some(
            StateFile::open(folder, out, meter)
                .map_err(|e| no_file("optimizer:out", folder, &e))?,
        ),
        (None, true) => {
            let place = pinned(&host::states(bp, bench.groups.coords), bench)?;
            Some(StateFile::on_host(place, out, meter))
        }
        (None, false) => None,
    };
    Ok(ShardOptions {
        device: bench.device.clone(),
        compute: bp.compute,
        pack_weights: bp.packs_weights(),
        zero1: config.zero1,
        seed: config.seed,
        file,
        in_order: config.one_order(),
    })
}

fn no_file(field: &str, folder: &Path, error: &std::io::Error) -> RankError {
    let help = "choose a folder that may be written to";
    RankError::Program(format!("{field} = {}: {error}; {help}", folder.display()))
}

/// This rank's part of the validation losses, if the run has any.
pub(crate) fn evaluator(
    shared: &RunShared,
    bench: &Bench,
    resumed: Option<&Resumed>,
) -> Result<Option<Evaluator>, RankError> {
    if shared.evaluation.is_none() {
        return Ok(None);
    }
    let before = match &shared.saver {
        Some(saver) => {
            let keeps_best = shared.blueprint.config.keep_best;
            saver.plateau(&*bench.groups.world, resumed, keeps_best)?
        }
        None => None,
    };
    if let Some(copier) = &shared.copier {
        copier.begin_plateau(before);
    }
    Ok(evaluator_after(shared, bench, before))
}

/// The same in a run whose losses have gone like `plateau` before.
pub(crate) fn evaluator_after(
    shared: &RunShared,
    bench: &Bench,
    plateau: Option<Plateau>,
) -> Option<Evaluator> {
    let set = shared.evaluation.as_ref()?;
    let tokens = tokens::evaluation(shared, &bench.device, &bench.groups, set);
    Some(Evaluator::new(&shared.blueprint, set.clone(), tokens, &bench.groups, plateau))
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
