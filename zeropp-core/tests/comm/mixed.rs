//! Ranks that are threads of several processes.

use super::*;

/// Whether the engine knows of more than one process.
pub(super) const PROCESSES: bool = true;

/// The communicators of a world of as many processes as ranks in each, or more.
pub(super) fn world(size: usize, options: ThreadsOptions) -> Vec<Rank> {
    let each = (1..=size.isqrt()).rev().find(|each| size.is_multiple_of(*each)).unwrap_or(1);
    mixed_world(size, each, options)
}

/// Runs `f` on one thread a rank and returns what each returned, in rank order.
pub(super) fn on_ranks<T: Send>(
    size: usize,
    options: ThreadsOptions,
    f: impl Fn(Rank) -> T + Sync,
) -> Vec<T> {
    on_communicators(world(size, options), f)
}

#[path = "failures.rs"]
mod failures;
#[path = "load.rs"]
mod load;
#[path = "results.rs"]
mod results;
