//! Where ranks wait for a result, each on a slot of its own.

use std::time::Instant;

use super::world::World;
use crate::CommError;
use crate::sync::{Condvar, Mutex};

/// One result for each of several waiting ranks.
pub(crate) struct ResultSlots<T> {
    results: Mutex<Vec<Option<T>>>,
    bells: Box<[Condvar]>,
}

/// How a wait ended.
pub(crate) enum Wait<T> {
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

    /// Sleeps until `slot` has its result, the world fails, or its timeout is over.
    pub(super) fn wait(&self, slot: usize, rank: usize, world: &World) -> Wait<T> {
        self.wait_until(slot, rank, world, Instant::now().checked_add(world.options.timeout))
    }

    /// The same with a time of one's own; none is for ever.
    pub(crate) fn wait_until(
        &self,
        slot: usize,
        rank: usize,
        world: &World,
        deadline: Option<Instant>,
    ) -> Wait<T> {
        let mut results = self.results.lock();
        let mut expired = false;
        loop {
            if let Some(value) = results[slot].take() {
                return Wait::Done(value);
            }
            if expired {
                return Wait::Expired;
            }
            if let Some(error) = world.error(rank) {
                return Wait::Failed(error);
            }
            match deadline {
                Some(at) => expired = self.bells[slot].wait_until(&mut results, at).timed_out(),
                None => self.bells[slot].wait(&mut results),
            }
        }
    }
}
