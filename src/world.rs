//! Where a run's ranks are: threads of this process, or processes of which this is one.

use std::sync::Arc;
use std::time::Duration;

use zeropp_core::comm::Communicator;
use zeropp_core::comm::threads::{ThreadsOptions, ThreadsWorld};
use zeropp_core::config::{Config, EngineKind};
use zeropp_core::mesh::Mesh;
use zeropp_pipeline::executor::StatusBoard;

use crate::Error;

/// The ranks that this process runs, and what keeps their world going.
pub(crate) struct World {
    /// World rank and world communicator of each.
    pub(crate) ranks: Vec<(usize, Arc<dyn Communicator>)>,
    /// Ends MPI when the run is over.
    #[cfg(feature = "mpi")]
    _process: Option<zeropp_core::comm::mpi::MpiWorld>,
}

impl World {
    /// Brings all ranks of `mesh` together with the engine that `config` names.
    ///
    /// # Errors
    /// A launcher that started other ranks than the mesh has, or an engine that does not start.
    pub(crate) fn start(
        config: &Config,
        mesh: Mesh,
        status: &Arc<StatusBoard>,
    ) -> Result<World, Error> {
        let timeout = Duration::from_secs_f64(config.timeout_s);
        match config.engine {
            EngineKind::Mpi => Self::one_process(mesh, timeout, status),
            _ => Ok(Self::threads(mesh, timeout)),
        }
    }

    fn threads(mesh: Mesh, timeout: Duration) -> World {
        let options = ThreadsOptions { timeout, ..ThreadsOptions::default() };
        let world = ThreadsWorld::new(mesh.world(), options);
        World {
            ranks: world.communicators().into_iter().enumerate().collect(),
            #[cfg(feature = "mpi")]
            _process: None,
        }
    }

    #[cfg(not(feature = "mpi"))]
    fn one_process(_: Mesh, _: Duration, _: &Arc<StatusBoard>) -> Result<World, Error> {
        unreachable!("a build without MPI refuses the setting")
    }

    #[cfg(feature = "mpi")]
    fn one_process(
        mesh: Mesh,
        timeout: Duration,
        status: &Arc<StatusBoard>,
    ) -> Result<World, Error> {
        use zeropp_core::comm::mpi::{Describe, MpiOptions, MpiWorld};
        use zeropp_core::launch::Launch;

        let launch = Launch::from_env()?;
        if let Some(launch) = &launch {
            check_size(mesh, launch.world)?;
        } else {
            check_size(mesh, 1)?;
        }
        let options = MpiOptions { timeout, ..MpiOptions::default() };
        let (board, rank) = (status.clone(), launch.as_ref().map_or(0, |launch| launch.rank));
        let describe: Describe = Arc::new(move || board.describe(rank));
        let mut process = MpiWorld::start(options, Some(describe))?;
        if let Some(launch) = &launch {
            launch.check("MPI", process.rank(), process.size())?;
        }
        check_size(mesh, process.size())?;
        let ranks = vec![(process.rank(), process.communicator())];
        Ok(World { ranks, _process: Some(process) })
    }
}

/// Compares the number of processes with the ranks of the mesh.
#[cfg(feature = "mpi")]
fn check_size(mesh: Mesh, processes: usize) -> Result<(), Error> {
    let ranks = mesh.world();
    if processes == ranks {
        return Ok(());
    }
    let problem = format!("{mesh} is {ranks} ranks, but {processes} processes were started");
    let help = format!("use mpirun -np {ranks}, or another mesh");
    Err(zeropp_core::config::ConfigError::value("engine", "mpi", problem, help).into())
}
