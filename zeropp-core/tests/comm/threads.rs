//! Ranks that are threads of one process.

use super::*;

/// Whether the engine knows of more than one process.
pub(super) const PROCESSES: bool = false;

/// The communicators of a world.
pub(super) fn world(size: usize, options: ThreadsOptions) -> Vec<Rank> {
    ThreadsWorld::new(size, options).communicators()
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
