//! The MPI engine: every rank is a process of its own, started by an MPI launcher.
//!
//! One [communication thread](driver) starts and ends MPI and makes every call to it. The rank's
//! threads hand it operations and sleep until it has their results. It polls what is under way,
//! with pauses: without a thread that polls, MPI moves nothing while the rank computes. The longer
//! it has waited for others, the longer they are, so that waiting takes no core.
//!
//! As a rank joins a collective it announces to the others of the group which one and with what, in
//! [small messages](wire) beside the data that go [up and down a tree](tree). So ranks can compare
//! signatures, and data moves only where all have joined and agree. Sums are made here, in rank
//! order in `f32`: a reduce-scatter is an all-to-all and a sum, an all-reduce that followed by an
//! all-gather. So the bits are those of the threads engine, and it is faster than MPI's own
//! reductions.
//!
//! The first error is sent to all ranks and ends every operation everywhere. Once the ranks have
//! reported it to their users ([`MpiWorld::finish`]), or have had the time to, the job is aborted.
//! A panic on any thread aborts the job at once: unwinding into MPI would hang it.

mod channel;
mod collective;
mod comms;
mod driver;
mod engine;
mod headers;
mod mail;
mod payload;
mod sys;
mod timeout;
mod timeout_attribution;
mod tree;
mod wire;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use burn::tensor::Device;
use crossbeam_channel::{Receiver, bounded, unbounded};

use super::progress::{Group, ProgressCommunicator, RankLiveness};
use super::{CommError, CommResult, Communicator, THREADS};
use crate::patience::{Deadline, Timeout, received};
use crate::placement::one_name_each;
use channel::MpiChannel;
use comms::GroupComms;
use driver::MpiDriver;
use engine::{Command, MpiEngine, Shared};
use sys::{Comm, MpiError};

/// Settings of the MPI engine.
#[derive(Clone)]
pub struct MpiOptions {
    /// How long one operation may be waited for before the world fails.
    pub timeout: Duration,
    /// The same until the rank has its first step behind it, where that has a time of its own.
    pub first_timeout: Option<Duration>,
    /// How long the processes may take to find each other.
    pub start_timeout: Duration,
    /// Which process gets which rank. Default: as the launcher numbers them.
    pub order: Option<Order>,
    /// Where messages are to arrive. MPI itself sees the CPU's memory only.
    pub device: Device,
}

impl Default for MpiOptions {
    fn default() -> Self {
        let timeout = Duration::from_secs(300);
        let start_timeout = Duration::from_secs(60);
        let device = Device::flex();
        Self { timeout, first_timeout: None, start_timeout, order: None, device }
    }
}

/// From the host of every process, in the launcher's order, to the processes in the order of their
/// ranks. The same answer in every process.
pub type Order = Arc<dyn Fn(&[String]) -> Vec<usize> + Send + Sync>;

/// World rank of the thread that asks, and what it is doing in words: for the message of a panic.
pub type Describe = Arc<dyn Fn() -> (usize, String) + Send + Sync>;

/// This process's rank in a world of processes. There can be one in the life of a process.
pub struct MpiWorld {
    shared: Arc<Shared>,
    crew: Crew,
    world: Option<Arc<dyn Communicator>>,
    thread: Option<JoinHandle<()>>,
    ended: Receiver<()>,
}

impl MpiWorld {
    /// Starts MPI and finds the other ranks. From here on a panic on any thread ends the job,
    /// after its message and what `describe` says.
    ///
    /// # Errors
    /// `Unavailable` where MPI was started before in this process or does not start in time;
    /// `Backend` with MPI's own text.
    pub fn start(options: MpiOptions, describe: Option<Describe>) -> CommResult<MpiWorld> {
        static STARTED: AtomicBool = AtomicBool::new(false);
        if STARTED.swap(true, Ordering::Relaxed) {
            return Err(unavailable("it was started before; a process can start it once"));
        }
        let (started, start) = bounded(1);
        let (end, ended) = bounded::<()>(0);
        let own = options.clone();
        let body = move || {
            let driver = match open(own) {
                Ok((driver, world, crew)) => {
                    let _ = started.send(Ok((driver.shared.clone(), world, crew)));
                    driver
                }
                Err(error) => {
                    let _ = started.send(Err(error.in_operation("starting".into())));
                    return;
                }
            };
            driver.run();
            drop(end);
        };
        let thread = std::thread::Builder::new().name(THREADS.into()).spawn(body);
        let thread = thread.map_err(|e| unavailable(&format!("no thread can be started ({e})")))?;
        let deadline = Deadline::after(options.start_timeout);
        let opened = received(deadline, &start).ok_or_else(|| {
            let s = options.start_timeout.as_secs_f64();
            unavailable(&format!("not all processes of the job arrived within {s} s"))
        })?;
        let (shared, group, crew) = opened.map_err(|_| unavailable("its thread has ended"))??;
        end_job_on_panic(shared.rank, describe);
        let liveness = Arc::new(RankLiveness(shared.clone()));
        let world = Arc::new(ProgressCommunicator::new(group, liveness));
        Ok(MpiWorld { shared, crew, world: Some(world), thread: Some(thread), ended })
    }

    /// World rank of this process.
    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    /// Number of processes.
    pub fn size(&self) -> usize {
        self.shared.size
    }

    /// This process's number by the launcher.
    pub fn launched_rank(&self) -> usize {
        self.crew.launched[self.shared.rank]
    }

    /// The host of every process, by rank.
    pub fn hosts(&self) -> &[String] {
        &self.crew.hosts
    }

    /// The `world` communicator, once.
    ///
    /// # Panics
    /// Panics the second time.
    pub fn communicator(&mut self) -> Arc<dyn Communicator> {
        self.world.take().expect("the world communicator is given away once")
    }

    /// Ends MPI; blocks until all ranks have dropped their communicators. In a world that has
    /// failed it returns at once: the process should report it to its user and exit with an error,
    /// for in a moment the whole job is ended. Dropping does the same.
    pub fn finish(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.world = None;
        let _ = self.shared.commands.send(Command::Finish);
        if let Some((first, _)) = self.shared.failure() {
            // The launcher kills everyone once one process has ended: the culprit speaks first.
            if *first != self.shared.rank {
                std::thread::sleep(driver::REPORT_TIME);
            }
            return;
        }
        let patience = self.shared.timeout.get().saturating_add(Duration::from_secs(5));
        if received(Deadline::after(patience), &self.ended).is_none() {
            tracing::error!("rank {}: MPI does not end; ending the job", self.shared.rank);
            sys::end_job();
        }
        let _ = thread.join();
    }
}

impl Drop for MpiWorld {
    fn drop(&mut self) {
        self.end();
    }
}

fn unavailable(reason: &str) -> CommError {
    CommError::Unavailable { engine: "mpi".into(), reason: reason.into() }
}

/// Who the processes are, by rank.
struct Crew {
    /// Numbers by the launcher.
    launched: Vec<usize>,
    hosts: Vec<String>,
}

/// Starts MPI on this thread.
fn open(options: MpiOptions) -> Result<(MpiDriver, Arc<Group>, Crew), MpiError> {
    sys::init()?;
    let launched = Comm::world();
    let hosts = one_name_each(&launched.all_hosts()?);
    let order = options.order.as_ref().map(|order| order(&hosts));
    let order = order.unwrap_or_else(|| (0..hosts.len()).collect());
    let me = launched.rank()?;
    let rank = order.iter().position(|process| *process == me).expect("an order has everyone");
    let all = launched.split(0, rank)?;
    let size = all.size()?;
    let hosts = order.iter().map(|process| hosts[*process].clone()).collect();
    let crew = Crew { launched: order, hosts };
    let (control, data) = (all.duplicate()?, all.duplicate()?);
    let (main, late) = (all.duplicate()?, all.duplicate()?);
    let group = Group::world(rank, size);
    let world = MpiChannel::new(GroupComms { group: group.clone(), main, late });
    let (commands, orders) = unbounded();
    let engine = MpiEngine { device: options.device };
    let timeout = Timeout::new(options.timeout, options.first_timeout, 1);
    let shared = Arc::new(Shared::new(engine, timeout, rank, size, commands));
    Ok((MpiDriver::new(shared, orders, control, data, world), group, crew))
}

/// Makes a panic end the job: a rank that unwinds and leaves the others waiting hangs them.
fn end_job_on_panic(rank: usize, describe: Option<Describe>) {
    let write = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        write(info);
        let reported = describe.as_ref().map(|describe| describe());
        let (rank, doing) = reported.unwrap_or_else(|| (rank, format!("rank {rank}")));
        tracing::error!("rank {rank} failed: panicked: {info} ({doing})");
        sys::end_job();
    }));
}
