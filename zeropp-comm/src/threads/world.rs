//! The state that all groups of one world share: the first failure, the ranks that are still there,
//! and the workers.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};

use super::ThreadsOptions;
use super::group::ThreadsGroup;
use super::workers::Workers;
use crate::CommError;
use crate::patience::Timeout;
use crate::sync::{AtomicBool, Mutex};

/// Receives the first error and the world rank that saw it.
pub(crate) type OnFailure = Box<dyn Fn(usize, &CommError) + Send + Sync>;

/// State of the world. Lock order: `groups`, then a group's locks, then a slot's.
pub(crate) struct ThreadsState {
    pub(crate) options: ThreadsOptions,
    /// How long one operation may be waited for.
    pub(crate) timeout: Timeout,
    pub(crate) workers: Workers,
    /// World rank of the first rank here; other processes may have others.
    first: usize,
    failure: OnceLock<FirstFailure>,
    on_failure: OnceLock<OnFailure>,
    departed: Box<[AtomicBool]>,
    groups: Mutex<Vec<Weak<ThreadsGroup>>>,
}

/// The first error, and the world rank that saw it.
struct FirstFailure {
    rank: usize,
    error: CommError,
}

impl ThreadsState {
    /// `size` ranks, numbered from `first`.
    pub(crate) fn new(first: usize, size: usize, options: ThreadsOptions) -> Self {
        let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
        let workers = options.workers.unwrap_or_else(|| size.min(cores()));
        Self {
            workers: Workers::start(workers),
            timeout: Timeout::new(options.timeout, options.first_timeout, size),
            options,
            first,
            failure: OnceLock::new(),
            on_failure: OnceLock::new(),
            departed: (0..size).map(|_| AtomicBool::new(false)).collect(),
            groups: Mutex::default(),
        }
    }

    /// Reports failures to `group` from now on. Those of the past it finds by asking for
    /// [`error`](Self::error).
    pub(super) fn register(&self, group: &Arc<ThreadsGroup>) {
        let mut groups = self.groups.lock();
        groups.retain(|old| old.strong_count() > 0);
        groups.push(Arc::downgrade(group));
    }

    /// The error that every operation of `rank` ends with since the world failed.
    pub(crate) fn error(&self, rank: usize) -> Option<CommError> {
        let FirstFailure { rank: first, error } = self.failure.get()?;
        Some(error.as_seen_by(rank, *first))
    }

    /// Registers `tell`, which receives the first failure. Set once, before any rank starts.
    pub(crate) fn on_failure(&self, tell: OnFailure) {
        let first = self.on_failure.set(tell).is_ok();
        debug_assert!(first, "set once");
    }

    /// Fails the world with `error`, unless it has failed before, and wakes every waiting rank.
    pub(crate) fn fail(&self, rank: usize, error: CommError) {
        if self.failure.set(FirstFailure { rank, error: error.clone() }).is_ok() {
            if let Some(tell) = self.on_failure.get() {
                tell(rank, &error);
            }
            for group in self.live_groups() {
                group.wake_all();
            }
        }
    }

    /// Whether `rank` has dropped its last communicator.
    pub(super) fn has_departed(&self, rank: usize) -> bool {
        self.departed[rank - self.first].load(Ordering::Acquire)
    }

    fn depart(&self, rank: usize) {
        self.departed[rank - self.first].store(true, Ordering::Release);
        for group in self.live_groups() {
            if let Some(operation) = group.waits_for(rank) {
                let lost = CommError::PeerLost { group: group.name.clone(), rank, operation };
                return self.fail(rank, lost);
            }
        }
    }

    fn live_groups(&self) -> Vec<Arc<ThreadsGroup>> {
        self.groups.lock().iter().filter_map(Weak::upgrade).collect()
    }
}

/// A rank that can still take part: shared by its communicators, gone with the last of them.
pub(crate) struct Liveness {
    pub(crate) world: Arc<ThreadsState>,
    pub(crate) rank: usize,
}

impl Drop for Liveness {
    fn drop(&mut self) {
        self.world.depart(self.rank);
    }
}
