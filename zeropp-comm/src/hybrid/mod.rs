//! The hybrid engine: the ranks of a process are its threads, and another engine joins processes.
//!
//! A group whose members are all in one process is a group of the threads engine: no byte leaves
//! the process. Where no process has more than one member, every call goes straight to a group of
//! the outer engine. In all other groups the ranks of a process [meet](crate::threads) as
//! threads do; the last to arrive starts the outer operation, and one thread a process
//! carries it on while the ranks compute.
//!
//! Such an operation begins with an exchange of headers, in the order of the calls: it
//! compares what the processes are about to do, and small data travels in it. All else are
//! messages between two processes, which need no order. Sums take every rank's own values, in rank
//! order in `f32`, never a sum made in another process: so the bits do not depend on which ranks
//! share a process.
//!
//! Errors name world ranks, never processes. The first failure of a process aborts the outer
//! engine with all that is known about it, and the other way round. A rank that drops its
//! communicators while others of its process go on is missed by ranks of its own process at once,
//! by those of other processes within the timeout.

mod communicator;
mod driver;
mod engine;
mod failure;
mod group;
mod header;
mod in_progress;
mod plan;
mod split;
mod ticket;

use std::sync::Arc;

use super::threads::ThreadsOptions;
use super::threads::communicator::ThreadsCommunicator;
use super::threads::group::ThreadsGroup as LocalGroup;
use super::threads::world::{Liveness, ThreadsState};
use super::{CommResult, Communicator};
use communicator::HybridCommunicator;
use engine::HybridProcess;
use group::HybridGroup;

/// The ranks that are threads of this process, in a world of several processes.
pub struct HybridWorld(Vec<(usize, Arc<dyn Communicator>)>);

impl HybridWorld {
    /// Joins the threads of this process to those of the others: process i of `outer` has ranks
    /// `i * ranks_each` to `(i + 1) * ranks_each - 1`. All processes pass the same `ranks_each`.
    /// The time limit of `options` is that of all operations, the outer engine's own is not used.
    ///
    /// # Errors
    /// The system grants no thread to carry operations on.
    ///
    /// # Panics
    /// Panics if `ranks_each` is 0.
    pub fn new(
        outer: Arc<dyn Communicator>,
        ranks_each: usize,
        options: ThreadsOptions,
    ) -> CommResult<HybridWorld> {
        assert!(ranks_each > 0, "ranks_each must be at least 1");
        let (process, processes) = (outer.rank(), outer.size());
        let first = process * ranks_each;
        let world = Arc::new(ThreadsState::new(first, ranks_each, options));
        let engine = HybridProcess::start(world.clone(), outer.clone(), ranks_each)?;
        let here: Vec<usize> = (first..first + ranks_each).collect();
        let local = LocalGroup::new(world.clone(), "world".into(), here.clone());
        let members = (0..processes * ranks_each).collect();
        let group =
            (processes > 1).then(|| HybridGroup::new(engine, outer, local.clone(), members));
        let communicator = |(index, rank): (usize, usize)| {
            let liveness = Arc::new(Liveness { world: world.clone(), rank });
            let end: Arc<dyn Communicator> = match &group {
                Some(group) => Arc::new(HybridCommunicator::new(group.clone(), index, liveness)),
                None => Arc::new(ThreadsCommunicator::new(local.clone(), index, liveness)),
            };
            (rank, end)
        };
        Ok(HybridWorld(here.into_iter().enumerate().map(communicator).collect()))
    }

    /// World rank and `world` communicator of every rank of this process, in rank order.
    pub fn communicators(self) -> Vec<(usize, Arc<dyn Communicator>)> {
        self.0
    }
}
