//! Copies of the newest state in memory (ADR 50): where a run's state may be, and the message where
//! there are none.

use tracing::warn;
use zeropp_checkpoint::places::StateStores;
use zeropp_zero3::checkpoint::Store;

use crate::config::Config;

/// Where the run's state may be, if it saves.
pub(crate) fn places(config: &Config) -> Option<StateStores> {
    let checkpoints = Store::new(config.save.as_ref()?);
    Some(StateStores { checkpoints, copies: config.copies_folder().map(Store::new) })
}

/// Reports that there are no copies, and why.
pub(crate) fn without(why: &str) {
    warn!("copies: none are made, as {why}; after a failure the run goes on from its checkpoints");
}
