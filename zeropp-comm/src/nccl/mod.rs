//! The NCCL engine: every rank has a GPU, and NCCL moves and sums what is there.
//!
//! A rank is a thread of some process. On GPUs a process has one: CUDA's frees may wait for all
//! GPUs of a process, and so for an operation that waits for a rank whose device thread frees. Each
//! has a communication thread (`driver`) that makes all of its calls to NCCL, on a queue of its own
//! for every communicator (`lane`). Operations wait for the work that makes their buffers, and
//! later work for the operations, by events on the device: no call here waits for the GPU.
//!
//! A rank issues its operations of all communicators in the order of its calls (`turns`), so ranks
//! whose programs come to their common operations in one order never wait for each other in a
//! circle, however strictly NCCL keeps that order on the device.
//!
//! Beside NCCL, ranks send each other small frames (`wire`) over connections of their own
//! (`links`): NCCL cannot compare what the ranks call, has no tags, and does not say who is
//! missing. What is small and read by the CPU anyway goes there whole: exchanges, barriers, splits.
//!
//! Sums run in NCCL's order, in `f32`: their bits differ from the other engines', by rounding only.
//! The device is behind [a trait](Accelerator), so that everything else runs and is tested without
//! a GPU, on a library that stands in for libnccl.

mod accelerator;
#[cfg(feature = "cuda")]
pub mod cuda;
mod driver;
mod engine;
mod gpus;
mod header_exchange;
mod lane;
mod library;
mod links;
mod mail;
mod timeout_attribution;
mod turns;
mod wire;

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded, unbounded};
use zeropp_core::device::LibrarySearch;
use zeropp_core::threads::BackgroundThread;

use super::progress::{Group, ProgressCommunicator, RankLiveness};
use super::{CommError, CommResult, Communicator, THREADS};
use crate::patience::{Deadline, Timeout, received};
use crate::rendezvous::Rendezvous;
pub use accelerator::{Accelerator, DeviceResult, Event, OnPinned, Pinned, RawEvent, RawStream};
use driver::NcclDriver;
use engine::{Command, NcclEngine, Shared};
pub use gpus::gpus_for;
use library::{Nccl, search_from_env};
use links::Connections;
pub use links::address_towards;

/// How long a world's end may take beyond its timeout.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// Settings of the NCCL engine.
#[derive(Clone, Debug, PartialEq)]
pub struct NcclOptions {
    /// How long one operation may take before the world fails.
    pub timeout: Duration,
    /// The same until the rank has its first step behind it, where that has a time of its own.
    pub first_timeout: Option<Duration>,
    /// How long the ranks may take to find each other.
    pub start_timeout: Duration,
    /// Name or address under which the other ranks reach this one. With an address it listens
    /// there only, with a name everywhere.
    pub host: String,
    /// Where to look for libnccl.
    pub search: LibrarySearch,
}

impl Default for NcclOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(300),
            first_timeout: None,
            start_timeout: Duration::from_secs(60),
            host: Ipv4Addr::LOCALHOST.to_string(),
            search: search_from_env(),
        }
    }
}

/// One rank of a world whose data goes over NCCL.
pub struct NcclWorld {
    shared: Arc<Shared>,
    world: Option<Arc<dyn Communicator>>,
    version: String,
    thread: Option<JoinHandle<()>>,
    ended: Receiver<()>,
}

impl NcclWorld {
    /// Makes this rank one of `size` that share `rendezvous`, with its tensors on `accelerator`.
    /// Blocks until all have called it.
    ///
    /// # Errors
    /// `Unavailable` where libnccl is missing or too old, or ranks do not come in time, named;
    /// `Backend` with the device's words.
    pub fn start(
        options: NcclOptions,
        rank: usize,
        size: usize,
        accelerator: Arc<dyn Accelerator>,
        rendezvous: &dyn Rendezvous,
    ) -> CommResult<NcclWorld> {
        let nccl = Nccl::load(&options.search)?;
        let (commands, orders) = unbounded();
        let links = Connections::open(&options, rank, size, rendezvous, commands.clone())?;
        let engine = NcclEngine::new(accelerator, options.start_timeout);
        let timeout = Timeout::new(options.timeout, options.first_timeout, 1);
        let shared = Arc::new(Shared::new(engine, timeout, rank, size, commands));
        let group = Group::world(rank, size);
        let (started, start) = bounded(1);
        let (end, ended) = bounded::<()>(0);
        let (own, world, version) = (shared.clone(), group.clone(), nccl.version());
        let no_thread = |e: std::io::Error| CommError::Unavailable {
            engine: "nccl".into(),
            reason: format!("no thread can be started ({e})"),
        };
        let rooms = BackgroundThread::start(&format!("rooms {rank}")).map_err(no_thread)?;
        let body = move || {
            let entered = own.engine.accelerator.enter();
            let entered = entered.map_err(|text| own.device_error("starting", text));
            let mut driver = NcclDriver::new(own, orders, nccl, links, rooms, world);
            let begun = entered.and_then(|()| driver.greet());
            let ok = begun.is_ok();
            let _ = started.send(begun);
            if ok {
                driver.run();
            }
            drop(end);
        };
        let thread = std::thread::Builder::new().name(format!("{THREADS} {rank}")).spawn(body);
        let thread = thread.map_err(no_thread)?;
        start.recv().unwrap_or_else(|_| {
            Err(shared.device_error("starting", "the communication thread ended".into()))
        })?;
        let liveness = Arc::new(RankLiveness(shared.clone()));
        let world = Arc::new(ProgressCommunicator::new(group, liveness));
        Ok(NcclWorld { shared, world: Some(world), version, thread: Some(thread), ended })
    }

    /// World rank.
    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    /// NCCL's version, such as 2.27.3.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The rank that failed first, in a world that has failed.
    pub fn failed_rank(&self) -> Option<usize> {
        self.shared.failure().map(|(rank, _)| *rank)
    }

    /// The `world` communicator, once.
    ///
    /// # Panics
    /// Panics the second time.
    pub fn communicator(&mut self) -> Arc<dyn Communicator> {
        self.world.take().expect("the world communicator is given away once")
    }

    /// Ends the rank's part, after its communicators have been dropped: waits for what is on the
    /// device, and frees NCCL's communicators. In a world that has failed it waits a few seconds
    /// at most. Dropping does the same.
    pub fn finish(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.world = None;
        let _ = self.shared.commands.send(Command::Finish);
        let patience = self.shared.timeout.get().saturating_add(END_PATIENCE);
        if received(Deadline::after(patience), &self.ended).is_none() {
            tracing::error!("rank {}: NCCL does not return; leaving it behind", self.shared.rank);
            return;
        }
        let _ = thread.join();
    }
}

impl Drop for NcclWorld {
    fn drop(&mut self) {
        self.end();
    }
}
