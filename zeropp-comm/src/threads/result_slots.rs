//! Where ranks wait for a result, each on a slot of its own.

use std::time::Duration;

use super::world::ThreadsState;
use crate::CommError;
use crate::patience::Deadline;
use crate::sync::{self, Condvar, Mutex};

/// One result for each of several waiting ranks.
pub(crate) struct ResultSlots<T> {
    results: Mutex<Vec<Option<T>>>,
    bells: Box<[Condvar]>,
}

/// How a wait ended.
pub(crate) enum WaitEnd<T> {
    /// With the result.
    Done(T),
    /// With the world's first error.
    Failed(CommError),
    /// With neither in time.
    Expired,
}

impl<T> ResultSlots<T> {
    pub(super) fn new(count: usize) -> Self {
        Self {
            results: Mutex::new((0..count).map(|_| None).collect()),
            bells: (0..count).map(|_| Condvar::new()).collect(),
        }
    }

    /// Gives all slots their results, in order and at once: a rank that has its result and then
    /// fails the world does not take the others' results from them.
    pub(crate) fn put(&self, values: impl IntoIterator<Item = T>) {
        let mut results = self.results.lock();
        for (slot, value) in values.into_iter().enumerate() {
            results[slot] = Some(value);
            self.bells[slot].notify_all();
        }
    }

    /// Whether the result for `slot` is there.
    pub(crate) fn has(&self, slot: usize) -> bool {
        self.results.lock()[slot].is_some()
    }

    /// Makes every waiting rank look again whether the world has failed.
    pub(super) fn wake_all(&self) {
        // Under the lock, a waiter either has not looked yet or already sleeps.
        let _guard = self.results.lock();
        for bell in &self.bells {
            bell.notify_all();
        }
    }

    /// Sleeps until `slot` has its result, the world fails, or `timeout` is over.
    pub(crate) fn wait(
        &self,
        slot: usize,
        rank: usize,
        world: &ThreadsState,
        timeout: Duration,
    ) -> WaitEnd<T> {
        let deadline = Deadline::after(timeout);
        let mut results = self.results.lock();
        let mut expired = false;
        loop {
            if let Some(value) = results[slot].take() {
                return WaitEnd::Done(value);
            }
            if expired {
                return WaitEnd::Expired;
            }
            if let Some(error) = world.error(rank) {
                return WaitEnd::Failed(error);
            }
            expired = sync::wait(&self.bells[slot], &mut results, deadline);
        }
    }
}
