//! Where ranks wait for a result, each on a seat of its own.

use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::world::World;
use crate::comm::CommError;

/// One result for each of several waiting ranks.
pub(super) struct Seats<T> {
    results: Mutex<Results<T>>,
    bells: Box<[Condvar]>,
}

struct Results<T> {
    values: Vec<Option<T>>,
    missing: usize,
}

/// How a wait ended.
pub(super) enum Wait<T> {
    /// With the result.
    Done(T),
    /// With the world's first error.
    Failed(CommError),
    /// With neither in time.
    Expired,
}

impl<T> Seats<T> {
    pub(super) fn new(count: usize) -> Self {
        let values = (0..count).map(|_| None).collect();
        Self {
            results: Mutex::new(Results { values, missing: count }),
            bells: (0..count).map(|_| Condvar::new()).collect(),
        }
    }

    /// Gives `seat` its result; true when it was the last to get one.
    pub(super) fn put(&self, seat: usize, value: T) -> bool {
        let mut results = self.results.lock();
        results.values[seat] = Some(value);
        results.missing -= 1;
        self.bells[seat].notify_all();
        results.missing == 0
    }

    /// Whether the result for `seat` is there.
    pub(super) fn has(&self, seat: usize) -> bool {
        self.results.lock().values[seat].is_some()
    }

    /// Makes every waiting rank look again whether the world has failed.
    pub(super) fn wake_all(&self) {
        // Under the lock, a waiter either has not looked yet or already sleeps.
        let _guard = self.results.lock();
        for bell in &self.bells {
            bell.notify_all();
        }
    }

    /// Sleeps until `seat` has its result, the world fails, or its timeout is over.
    pub(super) fn wait(&self, seat: usize, rank: usize, world: &World) -> Wait<T> {
        let deadline = Instant::now().checked_add(world.options.timeout);
        let mut results = self.results.lock();
        let mut expired = false;
        loop {
            if let Some(value) = results.values[seat].take() {
                return Wait::Done(value);
            }
            if expired {
                return Wait::Expired;
            }
            if let Some(error) = world.error(rank) {
                return Wait::Failed(error);
            }
            match deadline {
                Some(at) => expired = self.bells[seat].wait_until(&mut results, at).timed_out(),
                None => self.bells[seat].wait(&mut results),
            }
        }
    }
}
