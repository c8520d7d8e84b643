//! Ranks that are threads of one process.

use super::*;

/// Whether the engine knows of more than one process.
pub(super) const PROCESSES: bool = false;

/// The communicators of a world.
pub(super) fn world(size: usize, options: ThreadsOptions) -> Vec<Rank> {
    ThreadsWorld::new(size, options).communicators()
}

#[path = "suite.rs"]
mod suite;
