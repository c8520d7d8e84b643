//! GPU ranks over NCCL: threads of this process, and of others that it meets at a rendezvous.

use std::net::ToSocketAddrs;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::config::{Config, ConfigError};
use zeropp_comm::launch::ProcessJob;
use zeropp_comm::nccl::cuda::CudaAccelerator;
use zeropp_comm::nccl::{NcclOptions, NcclWorld, address_towards, gpus_for};
use zeropp_comm::rendezvous::{self, Member, Rendezvous};
use zeropp_comm::{CommError, CommResult};
use zeropp_core::device::Devices;
use zeropp_core::threads::{REFUSED_HELP, start_scoped};

use super::{LocalRank, World};
use crate::Error;

/// How long a process whose world has failed elsewhere waits before it ends: launchers kill all
/// others once one has ended, and the one at fault should speak first.
const REPORT_TIME: Duration = Duration::from_millis(500);

/// This process's ranks of the mesh, each on a GPU of its own.
pub(super) fn start(config: &Config, devices: &Devices) -> Result<World, Error> {
    let job = config.job()?;
    if job.ranks > 1 {
        let problem = format!(
            "{} ranks are in one process, whose GPUs CUDA may let wait for each other for ever",
            job.ranks
        );
        let help = "start a process for each, by `zeropp run`, torchrun or srun";
        return Err(ConfigError::value("engine", config.engine, problem, help).into());
    }
    let met = config.meet(&job)?;
    let members = rendezvous::members(&*met)?;
    let host = &members[job.process].host;
    let before = members[..job.process].iter().filter(|m| m.host == *host).map(|m| m.ranks).sum();
    let gpus = gpus(config, &job, before, devices)?;
    let options = NcclOptions {
        timeout: config.timeout(),
        first_timeout: config.first_timeout(),
        start_timeout: Duration::from_secs_f64(config.start_timeout_s),
        host: own_address(&job, &members),
        ..NcclOptions::default()
    };
    let worlds = start_ranks(&options, &job, gpus.clone(), &*met)?;
    let mut kept =
        NcclWorldParts { here: job.first_rank..job.first_rank + job.ranks, worlds, _met: met };
    let ranks = kept.worlds.iter_mut().zip(gpus).map(|(world, gpu)| LocalRank {
        rank: world.rank(),
        device: devices.of(gpu),
        communicator: world.communicator(),
    });
    let ranks = ranks.collect();
    let host = host.clone();
    Ok(World { ranks, host, _keep: Box::new(kept) })
}

/// The GPUs of this process's ranks, after those of `before` ranks of other processes of the
/// machine.
///
/// # Errors
/// There are too few.
pub(super) fn gpus(
    config: &Config,
    job: &ProcessJob,
    before: usize,
    devices: &Devices,
) -> Result<Range<usize>, Error> {
    gpus_for(job.ranks, before, devices.count()).map_err(|problem| {
        let help = "use fewer ranks on a machine, or check CUDA_VISIBLE_DEVICES";
        ConfigError::value("device", config.device, problem, help).into()
    })
}

/// Starts the ranks together: each waits for all others.
fn start_ranks(
    options: &NcclOptions,
    job: &ProcessJob,
    gpus: Range<usize>,
    met: &dyn Rendezvous,
) -> Result<Vec<NcclWorld>, Error> {
    let start = |rank: usize, gpu: usize| -> CommResult<NcclWorld> {
        let gpu = CudaAccelerator::new(gpu).map_err(unusable)?;
        NcclWorld::start(options.clone(), rank, job.world, Arc::new(gpu), met)
    };
    let start = &start;
    let started: CommResult<Vec<NcclWorld>> = std::thread::scope(|scope| {
        let ranks = (job.first_rank..).zip(gpus);
        let begin = |(rank, gpu)| {
            let thread = start_scoped(scope, "start", move || start(rank, gpu));
            thread.map_err(|e| unusable(format!("no thread can be started ({e}); {REFUSED_HELP}")))
        };
        let threads = ranks.map(begin).collect::<CommResult<Vec<_>>>()?;
        threads.into_iter().map(|thread| thread.join().expect("starting does not panic")).collect()
    });
    Ok(started?)
}

/// Where the other ranks reach this process. A machine may have many addresses: the one that leads
/// to rank 0's is taken, and on rank 0's own machine what the others call it.
fn own_address(job: &ProcessJob, members: &[Member]) -> String {
    let loopback = NcclOptions::default().host;
    let one_host = members.iter().all(|member| member.host == members[0].host);
    let Some(meeting) = job.meeting.as_ref().filter(|_| !one_host) else { return loopback };
    let towards = meeting.to_string().to_socket_addrs().into_iter().flatten();
    let own = towards.filter_map(|peer| address_towards(peer).ok()).find(|ip| !ip.is_loopback());
    let at_rank_0 = members[job.process].host == members[0].host;
    match own {
        Some(own) if !at_rank_0 => own.to_string(),
        _ => meeting.host().to_owned(),
    }
}

fn unusable(text: String) -> CommError {
    CommError::Unavailable { engine: "nccl".into(), reason: text }
}

/// The parts that keep the ranks' world going.
struct NcclWorldParts {
    here: Range<usize>,
    worlds: Vec<NcclWorld>,
    _met: Arc<dyn Rendezvous>,
}

impl Drop for NcclWorldParts {
    fn drop(&mut self) {
        let failed = self.worlds.iter().find_map(NcclWorld::failed_rank);
        // Together, for each waits until its communicators have ended on all ranks.
        std::thread::scope(|scope| {
            for world in self.worlds.drain(..) {
                // Without a thread it ends when it is dropped.
                let _ = start_scoped(scope, "end", || world.finish());
            }
        });
        if failed.is_some_and(|rank| !self.here.contains(&rank)) {
            std::thread::sleep(REPORT_TIME);
        }
    }
}
