//! A group of ranks as the communication thread sees it.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::collective::MpiCollective;
use super::sys::Comm;
use super::tree::TreePosition;
use crate::progress::Group;

/// The communication thread's side of a group. Collectives are posted to `main` in the order in
/// which the ranks call them. What a collective needs after all ranks have joined goes to `late`,
/// again in the order of the calls: with one communicator for both, ranks could post a second
/// half and the next collective's first half in different orders.
pub(super) struct MpiChannel {
    pub(super) group: Arc<Group>,
    pub(super) main: Comm,
    pub(super) late: Comm,
    pub(super) exchanges: BTreeMap<u64, MpiCollective>,
    /// Where this rank is in the tree that headers take.
    pub(super) position: TreePosition,
    /// Collectives that this rank has called.
    pub(super) called: u64,
}

impl MpiChannel {
    /// A group in which nothing has been called.
    pub(super) fn new(group: Arc<Group>, main: Comm, late: Comm) -> MpiChannel {
        let position = TreePosition::of(group.place, group.size());
        MpiChannel { group, main, late, exchanges: BTreeMap::new(), position, called: 0 }
    }
}
