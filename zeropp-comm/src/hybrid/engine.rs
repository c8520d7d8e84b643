//! The state that all ranks and groups of one process share.

use std::collections::HashMap;
use std::sync::Arc;

use crossbeam_channel::Sender;
use parking_lot::Mutex;

use super::driver;
use super::failure::Report;
use super::in_progress::HybridInProgress;
use crate::threads::world::ThreadsState;
use crate::{CommError, CommResult, Communicator};

/// This process's part of a mixed world.
pub(super) struct HybridProcess {
    /// The ranks of this process.
    pub(super) world: Arc<ThreadsState>,
    /// All processes.
    pub(super) outer: Arc<dyn Communicator>,
    /// Ranks of each process.
    pub(super) ranks_each: usize,
    /// Members of each group by its name, for errors about groups of other processes. Where
    /// groups share a name, the newest.
    members: Mutex<HashMap<String, Vec<usize>>>,
    all_in_progress: Sender<Arc<HybridInProgress>>,
}

impl HybridProcess {
    /// Starts the driver, and reports each side's failures to the other.
    ///
    /// # Errors
    /// The system grants no thread.
    pub(super) fn start(
        world: Arc<ThreadsState>,
        outer: Arc<dyn Communicator>,
        ranks_each: usize,
    ) -> CommResult<Arc<HybridProcess>> {
        let tell = outer.clone();
        world.on_failure(Box::new(move |rank, error| tell.abort(&Report::new(rank, error).text())));
        let (all_in_progress, arriving) = crossbeam_channel::unbounded();
        let members = Mutex::default();
        let engine = Arc::new(HybridProcess { world, outer, ranks_each, members, all_in_progress });
        driver::start(arriving, Arc::downgrade(&engine))?;
        Ok(engine)
    }

    /// Hands an operation to the driver.
    pub(super) fn drive(&self, in_progress: Arc<HybridInProgress>) {
        self.all_in_progress.send(in_progress).expect("the driver lives as long as the engine");
    }

    /// Remembers who is in the group called `name`.
    pub(super) fn note_members(&self, name: &str, members: Vec<usize>) {
        self.members.lock().insert(name.to_owned(), members);
    }

    /// The process of a world rank.
    pub(super) fn process_of(&self, rank: usize) -> usize {
        rank / self.ranks_each
    }

    /// All ranks of `process`.
    pub(super) fn ranks_of(&self, process: usize) -> impl Iterator<Item = usize> + use<> {
        process * self.ranks_each..(process + 1) * self.ranks_each
    }

    /// The first rank of `process` in the group called `name`, or of all its ranks.
    pub(super) fn rank_in(&self, name: &str, process: usize) -> usize {
        let members = self.members.lock();
        let of = |rank: &&usize| self.process_of(**rank) == process;
        let found = members.get(name).and_then(|members| members.iter().find(of));
        found.copied().unwrap_or(process * self.ranks_each)
    }

    /// Fails the world with what the outer engine said; returns what `rank` shall say.
    pub(super) fn fail_with_outer(&self, rank: usize, error: CommError) -> CommError {
        let Report { rank: first, error } = self.translate(error);
        self.world.fail(first, error);
        self.world.error(rank).expect("just failed")
    }

    /// Fails the world where the outer one has failed without an operation of this process.
    pub(super) fn watch(&self) {
        if let Some(error) = self.outer.failure() {
            let Report { rank, error } = self.translate(error);
            self.world.fail(rank, error);
        }
    }
}
