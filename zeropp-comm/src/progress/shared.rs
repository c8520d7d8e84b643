//! The state that the communicators of one rank and its communication thread share.

use std::sync::{Arc, OnceLock};

use crossbeam_channel::Sender;

use super::{Command, Engine};
use crate::CommError;
use crate::patience::Timeout;

/// State of one rank's world.
pub(crate) struct Shared<E: Engine> {
    pub(crate) engine: E,
    /// How long one operation may take before the world fails.
    pub(crate) timeout: Timeout,
    /// World rank.
    pub(crate) rank: usize,
    /// World size.
    pub(crate) size: usize,
    pub(crate) commands: Sender<Command<E>>,
    failure: OnceLock<(usize, CommError)>,
}

impl<E: Engine> Shared<E> {
    pub(crate) fn new(
        engine: E,
        timeout: Timeout,
        rank: usize,
        size: usize,
        commands: Sender<Command<E>>,
    ) -> Self {
        Self { engine, timeout, rank, size, commands, failure: OnceLock::new() }
    }

    /// The error that every operation ends with since the world failed.
    pub(crate) fn error(&self) -> Option<CommError> {
        let (first, error) = self.failure.get()?;
        Some(error.as_seen_by(self.rank, *first))
    }

    /// The rank that failed first, and its error.
    pub(crate) fn failure(&self) -> Option<&(usize, CommError)> {
        self.failure.get()
    }

    /// Notes that the world failed, unless it has before. Returns whether this was the first.
    pub(crate) fn set_failure(&self, rank: usize, error: CommError) -> bool {
        self.failure.set((rank, error)).is_ok()
    }
}

/// The rank can still take part: shared by its communicators, gone with the last of them.
pub(crate) struct RankLiveness<E: Engine>(pub(crate) Arc<Shared<E>>);

impl<E: Engine> Drop for RankLiveness<E> {
    fn drop(&mut self) {
        // The communication thread has ended if the channel is closed.
        let _ = self.0.commands.send(Command::Depart);
    }
}
