//! The tests that run on every engine: on the `world` of the module that has them.

use super::*;

mod failures;
mod load;
mod results;

/// Runs `f` on one thread a rank and returns what each returned, in rank order.
fn on_ranks<T: Send>(size: usize, options: ThreadsOptions, f: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    on_communicators(world(size, options), f)
}
