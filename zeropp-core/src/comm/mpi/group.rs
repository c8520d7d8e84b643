//! A group of ranks as this process sees it.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::collective::Meeting;
use super::sys::Comm;
use crate::comm::buffers::Buffers;

/// What a communicator knows about its group.
pub(super) struct Group {
    /// Equal on all members, different from every other group's.
    pub(super) id: u64,
    pub(super) name: String,
    /// World ranks, in the group's order.
    pub(super) members: Vec<usize>,
    /// This rank's place among them.
    pub(super) place: usize,
    pub(super) buffers: Buffers,
}

/// A group this rank has just become a member of.
pub(super) struct Joined(pub(super) Arc<Group>);

impl Group {
    pub(super) fn new(id: u64, name: String, members: Vec<usize>, place: usize) -> Arc<Group> {
        Arc::new(Group { id, name, members, place, buffers: Buffers::default() })
    }

    pub(super) fn size(&self) -> usize {
        self.members.len()
    }

    /// World ranks of all members but this one.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + '_ {
        let me = self.members[self.place];
        self.members.iter().copied().filter(move |rank| *rank != me)
    }
}

/// The communication thread's side of a group. Collectives are posted to `main` in the order in
/// which the ranks call them. What a collective needs after all ranks have joined goes to `late`,
/// again in the order of the calls: with one communicator for both, ranks could post a second
/// half and the next collective's first half in different orders.
pub(super) struct Channel {
    pub(super) group: Arc<Group>,
    pub(super) main: Comm,
    pub(super) late: Comm,
    pub(super) meetings: BTreeMap<u64, Meeting>,
}
