//! A plan that the search goes on from, and where it comes from.

use super::pattern::Pattern;
use super::sequence::RankOrders;
use super::walk::Walk;

/// A plan to go on from.
#[derive(Clone, Debug)]
pub(super) struct StartingPoint {
    /// The placement that it is for.
    pub(super) track: usize,
    pub(super) plan: RankOrders,
    pub(super) score: i64,
    /// By how much annealing left limits broken.
    pub(super) excess: usize,
    pub(super) name: String,
    /// The walk that it keeps to, if its keys may drift.
    pub(super) walk: Option<Walk>,
    /// The pattern that it comes from, and how long its list waits, if it may be changed.
    pub(super) pattern: Option<(Pattern, i64)>,
}

impl StartingPoint {
    /// The first word of its name, and its placement.
    pub(super) fn family(&self) -> (usize, &str) {
        (self.track, self.name.split(' ').next().unwrap_or_default())
    }
}

/// The best ones first.
pub(super) fn by_score(pool: &mut [StartingPoint]) {
    pool.sort_by_key(|seed| seed.score);
}
