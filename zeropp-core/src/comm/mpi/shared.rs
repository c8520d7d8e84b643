//! What the communicators of this process and its communication thread both see.

use std::sync::OnceLock;

use crossbeam_channel::Sender;

use super::MpiOptions;
use super::driver::Command;
use crate::comm::CommError;

/// State of this rank's world.
pub(super) struct Shared {
    pub(super) options: MpiOptions,
    /// World rank of this process.
    pub(super) rank: usize,
    /// World size.
    pub(super) size: usize,
    pub(super) commands: Sender<Command>,
    failure: OnceLock<(usize, CommError)>,
}

impl Shared {
    pub(super) fn new(
        options: MpiOptions,
        rank: usize,
        size: usize,
        commands: Sender<Command>,
    ) -> Self {
        Self { options, rank, size, commands, failure: OnceLock::new() }
    }

    /// The error that every operation ends with since the world failed.
    pub(super) fn error(&self) -> Option<CommError> {
        let (first, error) = self.failure.get()?;
        Some(error.as_seen_by(self.rank, *first))
    }

    /// The rank that failed first, and its error.
    pub(super) fn failure(&self) -> Option<&(usize, CommError)> {
        self.failure.get()
    }

    /// Notes that the world failed, unless it has before. Returns whether this was the first.
    pub(super) fn set_failure(&self, rank: usize, error: CommError) -> bool {
        self.failure.set((rank, error)).is_ok()
    }
}

/// The rank can still take part: shared by its communicators, gone with the last of them.
pub(super) struct Presence(pub(super) std::sync::Arc<Shared>);

impl Drop for Presence {
    fn drop(&mut self) {
        // The communication thread has ended if nobody listens.
        let _ = self.0.commands.send(Command::Depart);
    }
}
