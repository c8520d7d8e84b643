//! Processes started by an MPI launcher, with one rank or several each.

use std::sync::Arc;
use std::time::Duration;

use crate::config::{Config, ConfigError, Place};
use zeropp_comm::hybrid::HybridWorld;
use zeropp_comm::launch::Launch;
use zeropp_comm::mesh::Mesh;
use zeropp_comm::mpi::{Describe, MpiOptions, MpiWorld, Order};
use zeropp_comm::placement;
use zeropp_core::device::Devices;
use zeropp_pipeline::executor::StatusBoard;

use super::{LocalRank, World, rank_of_thread};
use crate::Error;

/// This process's ranks of the mesh.
pub(super) fn start(
    config: &Config,
    devices: &Devices,
    status: &Arc<StatusBoard>,
) -> Result<World, Error> {
    let mesh = config.mesh();
    let launch = Launch::from_env()?;
    let each = ranks_each(mesh, launch.as_ref().map_or(1, |launch| launch.world))?;
    // All ranks of a process share its device: messages arrive on one.
    let device = devices.of(launch.as_ref().and_then(|launch| launch.local_rank).unwrap_or(0));
    let options = MpiOptions { device: device.clone(), ..options(config, each) };
    let (board, process) = (status.clone(), launch.as_ref().map_or(0, |launch| launch.rank));
    let describe: Describe = Arc::new(move || {
        let rank = rank_of_thread().unwrap_or(process * each);
        (rank, board.describe(rank))
    });
    let mut process = MpiWorld::start(options, Some(describe))?;
    if let Some(launch) = &launch {
        launch.check("MPI", process.launched_rank(), process.size())?;
    }
    // Without a launcher's word, only MPI knows how many there are.
    if ranks_each(mesh, process.size())? != each {
        let problem = format!("MPI has {} processes, its launcher did not say so", process.size());
        return Err(ConfigError::value("engine", "mpi", problem, "start with mpirun").into());
    }
    if process.rank() == 0 {
        let warnings = [placement::warning(process.hosts(), each, mesh), few_cores(each)];
        warnings.iter().flatten().for_each(|text| tracing::warn!("{text}"));
    }
    let outer = process.communicator();
    let ranks = match each {
        1 => vec![(process.rank(), outer)],
        _ => HybridWorld::new(outer, each, super::options(config))?.communicators(),
    };
    let ranks = ranks.into_iter().map(|(rank, communicator)| {
        let device = device.clone();
        LocalRank { rank, device, communicator }
    });
    let ranks = ranks.collect();
    let host = process.hosts()[process.rank()].clone();
    Ok(World { ranks, host, _keep: Box::new(process) })
}

/// The warning where a process of several ranks may not use the cores that are there: mpirun binds
/// each of few processes to one core.
fn few_cores(ranks_each: usize) -> Option<String> {
    let allowed = std::thread::available_parallelism().map_or(1, |n| n.get());
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let there = info.lines().filter(|line| line.starts_with("processor")).count();
    (allowed < ranks_each.min(there)).then(|| {
        format!(
            "the {ranks_each} ranks of a process may use {allowed} of {there} cores; where mpirun \
             has bound it, use --bind-to none"
        )
    })
}

/// The engine's settings for processes of `each` ranks, as far as the configuration has them.
pub(crate) fn options(config: &Config, each: usize) -> MpiOptions {
    let mesh = config.mesh();
    let order = (config.place == Place::Hosts).then(|| -> Order {
        Arc::new(move |hosts: &[String]| placement::by_host(hosts, each, mesh))
    });
    MpiOptions {
        timeout: config.timeout(),
        // Of several ranks the threads have their own.
        first_timeout: config.first_timeout().filter(|_| each == 1),
        start_timeout: Duration::from_secs_f64(config.start_timeout_s),
        order,
        ..MpiOptions::default()
    }
}

/// Ranks of each process.
fn ranks_each(mesh: Mesh, processes: usize) -> Result<usize, Error> {
    let ranks = mesh.world();
    if ranks.is_multiple_of(processes) {
        return Ok(ranks / processes);
    }
    let problem = format!("{mesh} is {ranks} ranks, but {processes} processes were started");
    let help = format!("use mpirun -np {ranks}, a number that divides it, or another mesh");
    Err(ConfigError::value("engine", "mpi", problem, help).into())
}
