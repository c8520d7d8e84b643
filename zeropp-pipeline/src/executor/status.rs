//! The current and last actions of every rank of this process: for the message when one of them
//! hangs, and for the record that it leaves behind.

use std::time::Duration;

use parking_lot::Mutex;
use zeropp_comm::flight::{Ring, now_ns};

use crate::ir::Action;

/// One action of one rank. Times are those of [`now_ns`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActionRecord {
    /// Step, from 1.
    pub step: u64,
    /// The action.
    pub action: Action,
    /// When the rank came to it.
    pub begin_ns: u64,
    /// When it began to compute, having what it needs from other ranks.
    pub compute_ns: Option<u64>,
    /// When it was done computing.
    pub computed_ns: Option<u64>,
    /// When the rank went on.
    pub end_ns: Option<u64>,
}

impl ActionRecord {
    /// Since when it computes, as opposed to waiting for others.
    fn computing(&self) -> Option<u64> {
        self.compute_ns.filter(|_| self.computed_ns.is_none())
    }
}

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

    /// The ranks that have been computing one action for `at_least`, in words: those that others
    /// wait for, directly or not.
    pub fn stalled(&self, at_least: Duration) -> Vec<String> {
        let now = now_ns();
        let computing = |rank: usize| self.0[rank].lock().last_mut()?.computing();
        let long = |rank: usize| {
            let time = Duration::from_nanos(now.saturating_sub(computing(rank)?));
            (time >= at_least).then(|| {
                let s = (time.as_secs_f64() * 10.0).round() / 10.0;
                format!("{}, which it has computed for {s} s", self.describe(rank))
            })
        };
        (0..self.0.len()).filter_map(long).collect()
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
