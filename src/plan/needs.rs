//! What a prediction of memory needs to know of a run.

use zeropp_core::metrics::RankPlan;

use crate::config::Config;

/// What the memory of a run's ranks is predicted from.
#[derive(Clone, Copy)]
pub(crate) struct Needs<'a> {
    pub(crate) config: &'a Config,
    /// What each pipeline rank holds.
    pub(crate) ranks: &'a [RankPlan],
}

impl Needs<'_> {
    /// The pipeline rank that holds most.
    pub(crate) fn largest(&self) -> &RankPlan {
        self.ranks.iter().max_by_key(|rank| rank.held.at_once.total()).expect("a rank")
    }

    /// Bytes of the pipeline rank that holds most.
    pub(crate) fn most(&self) -> u64 {
        self.largest().held.at_once.total()
    }
}
