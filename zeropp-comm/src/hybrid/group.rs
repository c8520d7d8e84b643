//! A group with members in several processes, as one of them sees it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use parking_lot::Mutex;

use super::engine::HybridProcess;
use super::in_progress::HybridInProgress;
use crate::threads::group::ThreadsGroup as LocalGroup;
use crate::{CommError, Communicator};

/// The state that the members in this process share.
pub(super) struct HybridGroup {
    pub(super) engine: Arc<HybridProcess>,
    /// The processes that have members, by their first member's place.
    pub(super) outer: Arc<dyn Communicator>,
    /// The members in this process.
    pub(super) local: Arc<LocalGroup>,
    /// World ranks, in the group's order.
    pub(super) members: Vec<usize>,
    /// Where each member is: place of its process in `outer`, and its place among that process's.
    pub(super) homes: Vec<(usize, usize)>,
    /// Places of each process's members.
    pub(super) places: Vec<Vec<usize>>,
    /// Collectives that all ranks of this process have joined.
    all_in_progress: Mutex<HashMap<u64, Arc<HybridInProgress>>>,
    /// Collectives whose missing ranks have been reported to the others.
    pub(super) noted: Mutex<HashSet<u64>>,
}

impl HybridGroup {
    /// The group of `members` (world ranks), of which `local` are those in this process; `outer`
    /// joins the processes that have any, in the order of their first members.
    pub(super) fn new(
        engine: Arc<HybridProcess>,
        outer: Arc<dyn Communicator>,
        local: Arc<LocalGroup>,
        members: Vec<usize>,
    ) -> Arc<HybridGroup> {
        let mut processes: Vec<usize> = Vec::new();
        let mut places: Vec<Vec<usize>> = Vec::new();
        let mut homes = Vec::with_capacity(members.len());
        for (place, rank) in members.iter().enumerate() {
            let process = engine.process_of(*rank);
            let known = processes.iter().position(|p| *p == process);
            let home = known.unwrap_or_else(|| {
                processes.push(process);
                places.push(Vec::new());
                processes.len() - 1
            });
            homes.push((home, places[home].len()));
            places[home].push(place);
        }
        debug_assert_eq!(outer.size(), processes.len());
        let (all_in_progress, noted) = (Mutex::default(), Mutex::default());
        Arc::new(HybridGroup {
            engine,
            outer,
            local,
            members,
            homes,
            places,
            all_in_progress,
            noted,
        })
    }

    /// Ranks in the group.
    pub(super) fn size(&self) -> usize {
        self.members.len()
    }

    /// This process's place in `outer`.
    pub(super) fn here(&self) -> usize {
        self.outer.rank()
    }

    /// Places of the other processes in `outer`.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let here = self.here();
        (0..self.places.len()).filter(move |process| *process != here)
    }

    /// Whether every process has one member, so that the outer group is this group.
    pub(super) fn is_direct(&self) -> bool {
        self.members.len() == self.places.len()
    }

    /// World ranks of the members in the process at `home` of `outer`.
    pub(super) fn ranks_at(&self, home: usize) -> impl Iterator<Item = usize> + '_ {
        self.places[home].iter().map(|place| self.members[*place])
    }

    /// Fails the world with what the member `index` of this process saw.
    pub(super) fn fail(&self, index: usize, error: CommError) -> CommError {
        let rank = self.local.members[index];
        self.engine.world.fail(rank, error);
        self.engine.world.error(rank).expect("just failed")
    }

    /// Remembers a collective under way.
    pub(super) fn start(&self, sequence: u64, in_progress: Arc<HybridInProgress>) {
        self.all_in_progress.lock().insert(sequence, in_progress);
    }

    /// Forgets a collective that is done.
    pub(super) fn finish(&self, sequence: u64) {
        self.all_in_progress.lock().remove(&sequence);
    }

    /// A collective that all ranks of this process have joined and that is not done.
    pub(super) fn in_progress(&self, sequence: u64) -> Option<Arc<HybridInProgress>> {
        self.all_in_progress.lock().get(&sequence).cloned()
    }
}
