//! What the communicators of one rank and its communication thread both see.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use burn::tensor::Tensor;
use crossbeam_channel::Sender;

use super::NcclOptions;
use super::accelerator::{Accelerator, Event};
use super::driver::Command;
use crate::comm::CommError;

/// State of one rank's world.
pub(super) struct Shared {
    pub(super) options: NcclOptions,
    /// World rank.
    pub(super) rank: usize,
    /// World size.
    pub(super) size: usize,
    pub(super) commands: Sender<Command>,
    pub(super) accelerator: Arc<dyn Accelerator>,
    failure: OnceLock<(usize, CommError)>,
    jobs: AtomicU64,
}

/// What an operation gives its rank.
pub(super) enum Output {
    /// The operation is queued on the device, and done at this event; none where nothing moves.
    Issued(Option<Arc<Event>>),
    /// A message, and when it is queued.
    Message(Tensor<1>, Arc<Slot>),
    /// What all ranks brought.
    Bytes(Vec<Vec<u8>>),
    /// A new sub-group.
    Group(Joined),
}

/// A group this rank has just become a member of.
pub(super) struct Joined(pub(super) Arc<Group>);

/// The place for one result.
pub(super) type Slot = crate::comm::slot::Slot<Output>;

/// What a communicator knows about its group.
pub(super) struct Group {
    /// Equal on all members, different from every other group's.
    pub(super) id: u64,
    pub(super) name: String,
    /// World ranks, in the group's order.
    pub(super) members: Vec<usize>,
    /// This rank's place among them.
    pub(super) place: usize,
}

impl Group {
    pub(super) fn size(&self) -> usize {
        self.members.len()
    }

    /// World ranks of all members but this one.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + '_ {
        let me = self.members[self.place];
        self.members.iter().copied().filter(move |rank| *rank != me)
    }
}

impl Shared {
    pub(super) fn new(
        options: NcclOptions,
        (rank, size): (usize, usize),
        commands: Sender<Command>,
        accelerator: Arc<dyn Accelerator>,
    ) -> Self {
        let (failure, jobs) = (OnceLock::new(), AtomicU64::new(0));
        Self { options, rank, size, commands, accelerator, failure, jobs }
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

    /// A number for buffers that are being pinned.
    pub(super) fn next_job(&self) -> u64 {
        self.jobs.fetch_add(1, Ordering::Relaxed)
    }

    /// Starts to pin the buffers of job number `job`; the communication thread hears of the end.
    pub(super) fn pin(&self, job: u64, tensors: Vec<Tensor<1>>) {
        let commands = self.commands.clone();
        let then = Box::new(move |pinned| {
            // The communication thread has ended if nobody listens.
            let _ = commands.send(Command::Pinned(job, pinned));
        });
        self.accelerator.pin(tensors, then);
    }

    /// The device's words as an error.
    pub(super) fn device_error(&self, operation: impl Into<String>, text: String) -> CommError {
        CommError::Backend { engine: "nccl".into(), operation: operation.into(), code: 0, text }
    }
}

/// The rank can still take part: shared by its communicators, gone with the last of them.
pub(super) struct Presence(pub(super) Arc<Shared>);

impl Drop for Presence {
    fn drop(&mut self) {
        let _ = self.0.commands.send(Command::Depart);
    }
}
