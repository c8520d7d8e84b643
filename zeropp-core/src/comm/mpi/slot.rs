//! Where a rank's thread waits for the communication thread.

use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::group::Joined;
use crate::comm::{CommError, CommResult};
use burn::tensor::Tensor;

/// What an operation gives its rank.
pub(super) enum Output {
    /// A flat buffer.
    Buffer(Tensor<1>),
    /// Everyone's small data.
    Bytes(Vec<Vec<u8>>),
    /// A new sub-group.
    Group(Joined),
    /// That all are here.
    Nothing,
}

/// The place for one result.
#[derive(Default)]
pub(super) struct Slot {
    result: Mutex<Option<CommResult<Output>>>,
    bell: Condvar,
}

impl Slot {
    /// Leaves the result; the first one counts.
    pub(super) fn put(&self, result: CommResult<Output>) {
        self.result.lock().get_or_insert(result);
        self.bell.notify_all();
    }

    /// Leaves an error.
    pub(super) fn fail(&self, error: CommError) {
        self.put(Err(error));
    }

    /// Whether the result is there.
    pub(super) fn is_done(&self) -> bool {
        self.result.lock().is_some()
    }

    /// Sleeps until the result is there, or until `deadline`; whether it is. Leaves it there.
    pub(super) fn look_until(&self, deadline: Instant) -> bool {
        let mut result = self.result.lock();
        while result.is_none() {
            if self.bell.wait_until(&mut result, deadline).timed_out() {
                break;
            }
        }
        result.is_some()
    }

    /// Sleeps until the result is there, or until `deadline`.
    pub(super) fn wait(&self, deadline: Option<Instant>) -> Option<CommResult<Output>> {
        let mut result = self.result.lock();
        while result.is_none() {
            match deadline {
                None => self.bell.wait(&mut result),
                Some(at) => {
                    if self.bell.wait_until(&mut result, at).timed_out() {
                        break;
                    }
                }
            }
        }
        result.take()
    }
}
