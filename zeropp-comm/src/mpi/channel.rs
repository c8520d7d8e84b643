//! A group of ranks as the communication thread sees it.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::collective::HeaderExchange;
use super::sys::Comm;
use crate::progress::Group;

/// The communication thread's side of a group. Collectives are posted to `main` in the order in
/// which the ranks call them. What a collective needs after all ranks have joined goes to `late`,
/// again in the order of the calls: with one communicator for both, ranks could post a second
/// half and the next collective's first half in different orders.
pub(super) struct Channel {
    pub(super) group: Arc<Group>,
    pub(super) main: Comm,
    pub(super) late: Comm,
    pub(super) exchanges: BTreeMap<u64, HeaderExchange>,
}
