//! One process a rank, started by an MPI launcher.

use std::sync::Arc;
use std::time::Duration;

use zeropp_core::comm::mpi::{Describe, MpiOptions, MpiWorld};
use zeropp_core::config::Config;
use zeropp_core::launch::Launch;
use zeropp_core::mesh::Mesh;
use zeropp_pipeline::executor::StatusBoard;

use super::World;
use crate::Error;

/// This process's rank of `mesh`.
pub(super) fn start(
    config: &Config,
    mesh: Mesh,
    status: &Arc<StatusBoard>,
) -> Result<World, Error> {
    let launch = Launch::from_env()?;
    if let Some(launch) = &launch {
        check_size(mesh, launch.world)?;
    } else {
        check_size(mesh, 1)?;
    }
    let options = options(config);
    let (board, rank) = (status.clone(), launch.as_ref().map_or(0, |launch| launch.rank));
    let describe: Describe = Arc::new(move || board.describe(rank));
    let mut process = MpiWorld::start(options, Some(describe))?;
    if let Some(launch) = &launch {
        launch.check("MPI", process.rank(), process.size())?;
    }
    check_size(mesh, process.size())?;
    let ranks = vec![(process.rank(), process.communicator())];
    Ok(World { ranks, _keep: Box::new(process) })
}

/// The engine's settings.
pub(crate) fn options(config: &Config) -> MpiOptions {
    MpiOptions {
        timeout: Duration::from_secs_f64(config.timeout_s),
        start_timeout: Duration::from_secs_f64(config.start_timeout_s),
    }
}

/// Compares the number of processes with the ranks of the mesh.
fn check_size(mesh: Mesh, processes: usize) -> Result<(), Error> {
    let ranks = mesh.world();
    if processes == ranks {
        return Ok(());
    }
    let problem = format!("{mesh} is {ranks} ranks, but {processes} processes were started");
    let help = format!("use mpirun -np {ranks}, or another mesh");
    Err(zeropp_core::config::ConfigError::value("engine", "mpi", problem, help).into())
}
