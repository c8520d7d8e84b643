//! Where a rank's thread waits for its communication thread.

use super::patience::Deadline;
use super::sync::{Condvar, Mutex, wait};
use super::{CommError, CommResult};

/// The place for one result.
pub(super) struct Slot<T> {
    result: Mutex<Option<CommResult<T>>>,
    bell: Condvar,
}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self { result: Mutex::new(None), bell: Condvar::new() }
    }
}

impl<T> Slot<T> {
    /// Leaves the result; the first one counts.
    pub(crate) fn put(&self, result: CommResult<T>) {
        self.result.lock().get_or_insert(result);
        self.bell.notify_all();
    }

    /// Leaves an error.
    pub(crate) fn fail(&self, error: CommError) {
        self.put(Err(error));
    }

    /// Whether the result is there.
    pub(crate) fn is_done(&self) -> bool {
        self.result.lock().is_some()
    }

    /// Sleeps until the result is there, or until `deadline`; whether it is. Leaves it there.
    pub(crate) fn look_until(&self, deadline: Deadline) -> bool {
        let mut result = self.result.lock();
        while result.is_none() {
            if wait(&self.bell, &mut result, deadline) {
                break;
            }
        }
        result.is_some()
    }

    /// Sleeps until the result is there, or until `deadline`.
    pub(crate) fn wait(&self, deadline: Deadline) -> Option<CommResult<T>> {
        let mut result = self.result.lock();
        while result.is_none() {
            if wait(&self.bell, &mut result, deadline) {
                break;
            }
        }
        result.take()
    }
}
