//! Operations under way.

use std::time::Duration;

use crate::patience::Deadline;
use zeropp_failures::CommResult;

/// The engine's side of a [`Pending`].
pub trait InFlight<T>: Send {
    /// Whether `wait` would return at once (with a result or an error).
    fn is_done(&mut self) -> bool;
    /// Blocks until the result is there, the operation fails, or it times out.
    fn wait(self: Box<Self>) -> CommResult<T>;
    /// Blocks until `is_done`, or `deadline`; returns `is_done`. Fails nothing.
    fn wait_until(&mut self, deadline: Deadline) -> bool {
        while !self.is_done() {
            if deadline.is_over() {
                return false;
            }
            std::thread::sleep(POLL_PAUSE);
        }
        true
    }
    /// World ranks that have not taken part so far, as far as the engine can find out in a few
    /// seconds. For engines that are built on another one, which has no time limits of its own.
    fn missing(&mut self) -> Vec<usize> {
        Vec::new()
    }
}

/// Between two looks at an operation of an engine that has nothing better than looking.
const POLL_PAUSE: Duration = Duration::from_micros(200);

/// An operation under way. Dropping it detaches: the engine keeps the buffers until it is done.
#[must_use = "an operation is complete only once it has been waited for"]
pub struct Pending<T>(pub(crate) PendingState<T>);

/// Where an operation is.
pub(crate) enum PendingState<T> {
    Ready(CommResult<T>),
    InFlight(Box<dyn InFlight<T>>),
}

impl<T> Pending<T> {
    /// An operation that is already complete, or failed.
    pub fn ready(result: CommResult<T>) -> Self {
        Self(PendingState::Ready(result))
    }

    /// An operation the engine is working on.
    pub fn in_flight(op: Box<dyn InFlight<T>>) -> Self {
        Self(PendingState::InFlight(op))
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_done(&mut self) -> bool {
        match &mut self.0 {
            PendingState::Ready(_) => true,
            PendingState::InFlight(op) => op.is_done(),
        }
    }

    /// Blocks until [`is_done`](Self::is_done), or `deadline`; returns `is_done`. Fails nothing.
    pub fn wait_until(&mut self, deadline: Deadline) -> bool {
        match &mut self.0 {
            PendingState::Ready(_) => true,
            PendingState::InFlight(op) => op.wait_until(deadline),
        }
    }

    /// World ranks that have not taken part so far, as far as the engine can find out.
    pub fn missing(&mut self) -> Vec<usize> {
        match &mut self.0 {
            PendingState::Ready(_) => Vec::new(),
            PendingState::InFlight(op) => op.missing(),
        }
    }

    /// Blocks until the operation is complete.
    ///
    /// # Errors
    /// The operation's error, or the world's first one.
    pub fn wait(self) -> CommResult<T> {
        match self.0 {
            PendingState::Ready(result) => result,
            PendingState::InFlight(op) => op.wait(),
        }
    }
}
