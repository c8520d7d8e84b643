//! A group of ranks as the communication thread sees it.

use std::collections::BTreeMap;

use super::collective::MpiCollective;
use super::comms::GroupComms;
use super::tree::TreePosition;

/// The communication thread's side of a group.
pub(super) struct MpiChannel {
    pub(super) comms: GroupComms,
    pub(super) exchanges: BTreeMap<u64, MpiCollective>,
    /// Where this rank is in the tree that headers take.
    pub(super) position: TreePosition,
    /// Collectives that this rank has called.
    pub(super) called: u64,
}

impl MpiChannel {
    /// A group in which nothing has been called.
    pub(super) fn new(comms: GroupComms) -> MpiChannel {
        let position = TreePosition::of(comms.group.place, comms.group.size());
        MpiChannel { comms, exchanges: BTreeMap::new(), position, called: 0 }
    }
}
