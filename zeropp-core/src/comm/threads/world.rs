//! What all groups of one world share: the first failure, who is still there, and the workers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::ThreadsOptions;
use super::group::Group;
use super::workers::Workers;
use crate::comm::CommError;

/// State of the world. Lock order: `groups`, then a group's locks, then a seat's.
pub(super) struct World {
    pub(super) options: ThreadsOptions,
    pub(super) workers: Workers,
    failure: OnceLock<Failure>,
    departed: Box<[AtomicBool]>,
    groups: Mutex<Vec<Weak<Group>>>,
}

/// The first error, and the world rank that saw it.
struct Failure {
    rank: usize,
    error: CommError,
}

impl World {
    pub(super) fn new(size: usize, options: ThreadsOptions) -> Self {
        let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
        let workers = options.workers.unwrap_or_else(|| size.min(cores()));
        Self {
            workers: Workers::start(workers),
            options,
            failure: OnceLock::new(),
            departed: (0..size).map(|_| AtomicBool::new(false)).collect(),
            groups: Mutex::default(),
        }
    }

    /// Makes `group` hear of failures. Those of the past it finds by asking for [`error`](Self::error).
    pub(super) fn register(&self, group: &Arc<Group>) {
        let mut groups = self.groups.lock();
        groups.retain(|old| old.strong_count() > 0);
        groups.push(Arc::downgrade(group));
    }

    /// The error that every operation of `rank` ends with since the world failed.
    pub(super) fn error(&self, rank: usize) -> Option<CommError> {
        let Failure { rank: first, error } = self.failure.get()?;
        Some(match error {
            // What only the rank that saw it can say in the first person.
            CommError::Timeout { .. } | CommError::Invalid { .. } if *first != rank => {
                CommError::Aborted { rank: *first, reason: error.to_string() }
            }
            _ => error.clone(),
        })
    }

    /// Fails the world with `error`, unless it has failed before, and wakes every waiting rank.
    pub(super) fn fail(&self, rank: usize, error: CommError) {
        if self.failure.set(Failure { rank, error }).is_ok() {
            for group in self.live_groups() {
                group.wake_all();
            }
        }
    }

    /// Whether `rank` has dropped its last communicator.
    pub(super) fn has_departed(&self, rank: usize) -> bool {
        self.departed[rank].load(Ordering::Acquire)
    }

    fn depart(&self, rank: usize) {
        self.departed[rank].store(true, Ordering::Release);
        for group in self.live_groups() {
            if let Some(operation) = group.waits_for(rank) {
                let lost = CommError::PeerLost { group: group.name.clone(), rank, operation };
                return self.fail(rank, lost);
            }
        }
    }

    fn live_groups(&self) -> Vec<Arc<Group>> {
        self.groups.lock().iter().filter_map(Weak::upgrade).collect()
    }
}

/// A rank that can still take part: shared by its communicators, gone with the last of them.
pub(super) struct Presence {
    pub(super) world: Arc<World>,
    pub(super) rank: usize,
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.world.depart(self.rank);
    }
}
