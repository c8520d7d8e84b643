//! Ranks that are threads of several processes.

use super::*;

/// Whether the engine knows of more than one process.
pub(super) const PROCESSES: bool = true;

/// The communicators of a world of as many processes as ranks in each, or more.
pub(super) fn world(size: usize, options: ThreadsOptions) -> Vec<Rank> {
    let each = (1..=size.isqrt()).rev().find(|each| size.is_multiple_of(*each)).unwrap_or(1);
    mixed_world(size, each, options)
}

#[path = "suite.rs"]
mod suite;
