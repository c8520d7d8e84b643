//! MPI's communicators of a group.

use std::sync::Arc;

use super::sys::Comm;
use crate::progress::Group;

/// Collectives are posted to `main` in the order in which the ranks call them. What a collective
/// needs after all ranks have joined goes to `late`, again in the order of the calls: with one
/// communicator for both, ranks could post a second half and the next collective's first half in
/// different orders.
pub(super) struct GroupComms {
    pub(super) group: Arc<Group>,
    pub(super) main: Comm,
    pub(super) late: Comm,
}
