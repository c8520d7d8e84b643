//! What every rank of this process is doing now, for the message when one of them hangs.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::ir::Action;

/// Where a rank is.
#[derive(Clone, Copy)]
struct Status {
    step: u64,
    action: Action,
    /// Since when it computes, as opposed to waiting for others.
    computing: Option<Instant>,
}

/// One slot a world rank: the step and the action it is at, and whether it computes.
pub struct StatusBoard(Vec<Mutex<Option<Status>>>);

impl StatusBoard {
    /// A board for `world` ranks that have not started.
    pub fn new(world: usize) -> Self {
        Self((0..world).map(|_| Mutex::new(None)).collect())
    }

    /// Notes what `rank` does.
    pub fn set(&self, rank: usize, step: u64, action: Action) {
        *self.0[rank].lock() = Some(Status { step, action, computing: None });
    }

    /// Notes that `rank` has what its action needs and computes, or that it is done with that.
    pub fn set_computing(&self, rank: usize, computing: bool) {
        if let Some(status) = self.0[rank].lock().as_mut() {
            status.computing = computing.then(Instant::now);
        }
    }

    /// The ranks that have been computing one action for `at_least`, in words: those that others
    /// wait for, directly or not.
    pub fn stalled(&self, at_least: Duration) -> Vec<String> {
        let busy = |slot: &Mutex<Option<Status>>| {
            slot.lock().and_then(|s| s.computing).map(|since| since.elapsed())
        };
        let long = |rank: &usize| busy(&self.0[*rank]).is_some_and(|t| t >= at_least);
        (0..self.0.len()).filter(long).map(|rank| self.describe(rank)).collect()
    }

    /// What `rank` was last seen doing, in words.
    pub fn describe(&self, rank: usize) -> String {
        let Some(Status { step, action, .. }) = *self.0[rank].lock() else {
            return format!("rank {rank} before its first action");
        };
        let stage = match action {
            Action::Compute { stage, .. }
            | Action::Overlap { forward: (stage, _), .. }
            | Action::Send { stage, .. }
            | Action::Recv { stage, .. }
            | Action::AllGather { stage }
            | Action::Free { stage }
            | Action::ReduceScatter { stage }
            | Action::ReplicaReduce { stage } => format!("stage {stage}, "),
            Action::OptimizerStep => String::new(),
        };
        format!("rank {rank} in step {step}, {stage}action {action}")
    }
}
