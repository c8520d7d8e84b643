//! One process a rank, started by an MPI launcher.

use std::sync::Arc;
use std::time::Duration;

use zeropp_core::comm::mpi::{Describe, MpiOptions, MpiWorld};
use zeropp_core::launch::Launch;
use zeropp_core::mesh::Mesh;

use super::World;
use crate::Error;
use crate::rank::Shared;

/// This process's rank of `mesh`.
pub(super) fn start(mesh: Mesh, timeout: Duration, shared: &Shared) -> Result<World, Error> {
    let launch = Launch::from_env()?;
    if let Some(launch) = &launch {
        check_size(mesh, launch.world)?;
    } else {
        check_size(mesh, 1)?;
    }
    let local = launch.as_ref().and_then(|launch| launch.local_rank).unwrap_or(0);
    let device = shared.devices.of(local);
    let options = MpiOptions { timeout, device, ..MpiOptions::default() };
    let (board, rank) = (shared.status.clone(), launch.as_ref().map_or(0, |launch| launch.rank));
    let describe: Describe = Arc::new(move || board.describe(rank));
    let mut process = MpiWorld::start(options, Some(describe))?;
    if let Some(launch) = &launch {
        launch.check("MPI", process.rank(), process.size())?;
    }
    check_size(mesh, process.size())?;
    let ranks = vec![(process.rank(), process.communicator())];
    Ok(World { ranks, first_local: local, _keep: Box::new(process) })
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
