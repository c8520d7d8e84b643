//! What every rank of this process is doing now, for the message when one of them hangs.

use parking_lot::Mutex;

use crate::ir::Action;

/// One slot a world rank: the step and the action it is at.
pub struct StatusBoard(Vec<Mutex<Option<(u64, Action)>>>);

impl StatusBoard {
    /// A board for `world` ranks that have not started.
    pub fn new(world: usize) -> Self {
        Self((0..world).map(|_| Mutex::new(None)).collect())
    }

    /// Notes what `rank` does.
    pub fn set(&self, rank: usize, step: u64, action: Action) {
        *self.0[rank].lock() = Some((step, action));
    }

    /// What `rank` was last seen doing, in words.
    pub fn describe(&self, rank: usize) -> String {
        let Some((step, action)) = *self.0[rank].lock() else {
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
