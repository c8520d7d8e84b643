//! Where a run's ranks are: threads of this process, or processes of which this is one.

#[cfg(feature = "mpi")]
mod mpi;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use zeropp_core::comm::Communicator;
use zeropp_core::comm::threads::{ThreadsOptions, ThreadsWorld};
use zeropp_core::config::{Config, EngineKind};
use zeropp_core::mesh::Mesh;

use crate::Error;
use crate::rank::Shared;

/// The ranks that this process runs, and what keeps their world going.
pub(crate) struct World {
    /// World rank and world communicator of each.
    pub(crate) ranks: Vec<(usize, Arc<dyn Communicator>)>,
    /// Place of the first of them among all ranks of this machine.
    pub(crate) first_local: usize,
    /// Ends the engine when the run is over; dropped after the communicators.
    _keep: Box<dyn Any>,
}

impl World {
    /// Brings all ranks of `mesh` together with the engine that `config` names.
    ///
    /// # Errors
    /// A launcher that started other ranks than the mesh has, or an engine that does not start.
    pub(crate) fn start(
        config: &Config,
        mesh: Mesh,
        #[cfg_attr(not(feature = "mpi"), expect(unused_variables))] shared: &Shared,
    ) -> Result<World, Error> {
        let timeout = Duration::from_secs_f64(config.timeout_s);
        match config.engine {
            EngineKind::Threads => Ok(Self::threads(mesh, timeout)),
            #[cfg(feature = "mpi")]
            EngineKind::Mpi => mpi::start(mesh, timeout, shared),
            engine => unreachable!("a build without {engine} refuses the setting"),
        }
    }

    fn threads(mesh: Mesh, timeout: Duration) -> World {
        let options = ThreadsOptions { timeout, ..ThreadsOptions::default() };
        let world = ThreadsWorld::new(mesh.world(), options);
        World {
            ranks: world.communicators().into_iter().enumerate().collect(),
            first_local: 0,
            _keep: Box::new(()),
        }
    }
}
