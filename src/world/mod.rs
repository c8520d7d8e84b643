//! Where a run's ranks are: threads of this process, or processes of which this is one.

pub(crate) mod clocks;
pub(crate) mod cores;
pub(crate) mod hello;
mod job;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
#[cfg(feature = "cuda")]
mod nccl;
pub(crate) mod shares;

use std::any::Any;
use std::sync::Arc;

use crate::config::{Config, EngineKind};
use burn::tensor::Device;
use zeropp_comm::Communicator;
use zeropp_comm::launch::host_name;
use zeropp_comm::mesh::Mesh;
use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};
use zeropp_core::device::Devices;
use zeropp_pipeline::executor::StatusBoard;

use crate::Error;

/// A rank that this process runs.
pub(crate) struct LocalRank {
    /// Its number in the world.
    pub(crate) rank: usize,
    /// Where it computes.
    pub(crate) device: Device,
    /// The world, as it sees it.
    pub(crate) communicator: Arc<dyn Communicator>,
}

/// The ranks that this process runs, and what keeps their world going.
pub(crate) struct World {
    pub(crate) ranks: Vec<LocalRank>,
    /// Name of this machine.
    pub(crate) host: String,
    /// Ends the engine when the run is over; dropped after the communicators.
    _keep: Box<dyn Any>,
}

impl World {
    /// Refuses what this process alone can see will not start, before anything takes time.
    ///
    /// # Errors
    /// A launcher that started other ranks than the mesh has, ranks without a GPU, or without the
    /// cores that they are to be bound to.
    pub(crate) fn check(
        config: &Config,
        #[cfg_attr(not(feature = "cuda"), expect(unused_variables))] devices: &Devices,
    ) -> Result<(), Error> {
        match config.engine {
            EngineKind::Threads => Ok(cores::of_this_process(config).map(drop)?),
            #[cfg(feature = "cuda")]
            EngineKind::Nccl => nccl::gpus(config, &config.job()?, 0, devices).map(drop),
            _ => Ok(config.job().map(drop)?),
        }
    }

    /// Brings all ranks of the mesh together with the engine that `config` names.
    ///
    /// # Errors
    /// A launcher that started other ranks than the mesh has, or an engine that does not start.
    pub(crate) fn start(
        config: &Config,
        devices: &Devices,
        #[cfg_attr(not(feature = "mpi"), expect(unused_variables))] status: &Arc<StatusBoard>,
    ) -> Result<World, Error> {
        match config.engine {
            EngineKind::Threads => Ok(Self::threads(config.mesh(), options(config), devices)),
            #[cfg(feature = "mpi")]
            EngineKind::Mpi => mpi::start(config, devices, status),
            #[cfg(feature = "cuda")]
            EngineKind::Nccl => nccl::start(config, devices),
            #[cfg(not(all(feature = "mpi", feature = "cuda")))]
            engine => unreachable!("a build without {engine} refuses the setting"),
        }
    }

    /// All ranks of the mesh as threads of this process.
    pub(crate) fn threads(mesh: Mesh, options: ThreadsOptions, devices: &Devices) -> World {
        Self::of(ThreadsWorld::new(mesh.world(), options).communicators(), devices)
    }

    /// A world that is going already, by its ranks in this process.
    pub(crate) fn of(communicators: Vec<Arc<dyn Communicator>>, devices: &Devices) -> World {
        let ranks = communicators.into_iter().enumerate();
        let ranks = ranks.map(|(place, communicator)| {
            let (rank, device) = (communicator.rank(), devices.of(place));
            LocalRank { rank, device, communicator }
        });
        World { ranks: ranks.collect(), host: host_name(), _keep: Box::new(()) }
    }
}

impl Config {
    /// Refuses ranks for which this machine has no device, before a process is started for them.
    ///
    /// # Errors
    /// As [`devices`](Self::devices) and [`job`](Self::job); too few GPUs or cores.
    pub fn check_devices(&self) -> Result<(), Error> {
        World::check(self, &self.devices()?)
    }
}

/// The settings of ranks that are threads.
pub(crate) fn options(config: &Config) -> ThreadsOptions {
    let (timeout, first_timeout) = (config.timeout(), config.first_timeout());
    ThreadsOptions { timeout, first_timeout, ..ThreadsOptions::default() }
}

/// The rank that the calling thread runs: its name says it.
#[cfg(feature = "mpi")]
fn rank_of_thread() -> Option<usize> {
    std::thread::current().name()?.strip_prefix("rank ")?.parse().ok()
}
