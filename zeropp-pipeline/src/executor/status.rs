//! The current and last actions of every rank of this process: for the message when one of them
//! hangs, and for the record that it leaves behind.

use std::time::Duration;

use parking_lot::Mutex;
use zeropp_failures::flight::{Ring, now_ns};

use zeropp_failures::ActionRecord;

use crate::ir::Action;

/// One slot a world rank: its last actions.
pub struct StatusBoard(Vec<Mutex<Ring<ActionRecord>>>);

impl StatusBoard {
    /// A board for `world` ranks that have not started.
    pub fn new(world: usize) -> Self {
        Self((0..world).map(|_| Mutex::default()).collect())
    }

    /// Notes what `rank` does from now on.
    pub fn set(&self, rank: usize, step: u64, action: Action) {
        let begin_ns = now_ns();
        let mut ring = self.0[rank].lock();
        if let Some(before) = ring.last_mut() {
            before.end_ns.get_or_insert(begin_ns);
        }
        let (compute_ns, computed_ns, end_ns) = (None, None, None);
        ring.push(ActionRecord { step, action, begin_ns, compute_ns, computed_ns, end_ns });
    }

    /// Notes that `rank` has what its action needs and computes, or that it is done with that.
    pub fn set_computing(&self, rank: usize, computing: bool) {
        let now = now_ns();
        if let Some(record) = self.0[rank].lock().last_mut() {
            // Two computations that overlap on paper come one after the other.
            record.compute_ns.get_or_insert(now);
            record.computed_ns = (!computing).then_some(now);
        }
    }

    /// Notes that `rank` goes on to compute after a wait within its action, which is no part of
    /// what the computation takes.
    pub(super) fn go_on(&self, rank: usize, waited: Duration) {
        if let Some(record) = self.0[rank].lock().last_mut() {
            record.compute_ns = record.compute_ns.map(|ns| ns + waited.as_nanos() as u64);
            record.computed_ns = None;
        }
    }

    /// Notes that `rank` is done with its last action, and with the step.
    pub(crate) fn end_step(&self, rank: usize) {
        if let Some(record) = self.0[rank].lock().last_mut() {
            record.end_ns.get_or_insert(now_ns());
        }
    }

    /// The last actions of `rank`, from the oldest to the newest.
    pub fn actions(&self, rank: usize) -> Vec<ActionRecord> {
        self.0[rank].lock().iter().copied().collect()
    }

    /// The action that `rank` was last seen doing, in words.
    pub fn describe(&self, rank: usize) -> String {
        let Some(ActionRecord { step, action, .. }) = self.0[rank].lock().last_mut().copied()
        else {
            return format!("rank {rank} before its first action");
        };
        let stage = action.stage().map(|stage| format!("stage {stage}, ")).unwrap_or_default();
        format!("rank {rank} in step {step}, {stage}action {action}")
    }
}
