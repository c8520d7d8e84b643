//! What ranks say to rank 0 at the end of a step.

use serde::{Deserialize, Serialize};

/// What rank 0 knows of a step at its end.
#[derive(Clone, Copy)]
pub(crate) struct EndedStep {
    pub(crate) step: u64,
    /// Seconds that it took, without what is no part of it.
    pub(crate) seconds: f64,
    /// Whether a save is under way.
    pub(crate) saving: bool,
}

/// What a rank says at the end of a step.
#[derive(Serialize, Deserialize)]
pub(crate) struct RankNote {
    /// It cannot run what was offered.
    pub(super) refuses: bool,
    /// Nanoseconds that it computed.
    pub(super) busy_ns: u64,
    /// Start and end of each action of its program, by rank 0's clock, where the step is measured.
    pub(super) times: Vec<[u64; 2]>,
}
