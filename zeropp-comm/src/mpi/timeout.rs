//! An operation that takes too long, while the ranks are asked for it.

use std::sync::Arc;

use crossbeam_channel::Sender;

use super::engine::Slot;
use crate::patience::Deadline;
use crate::progress::Awaited;

/// One late operation, and who has answered since.
pub(super) struct MpiTimeout {
    pub(super) what: Awaited,
    pub(super) slot: Arc<Slot>,
    /// Who only wants to know the missing ranks.
    pub(super) answer: Option<Sender<Vec<usize>>>,
    pub(super) deadline: Deadline,
    pub(super) answered: Vec<bool>,
    /// World ranks that have said that they have called it.
    pub(super) called: Vec<bool>,
}
