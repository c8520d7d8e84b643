//! The limit on what a rank keeps from forward to backward.

use zeropp_pipeline::schedules::Kind;
use zeropp_pipeline::timeline::Timeline;
use zeropp_plan::programs::most_kept;

use crate::config::{Bytes, Config, ConfigError};

/// Refuses a program that, as `simulated` with the bytes of its stages, holds more activations and
/// weight stashes at once than `mem-limit` allows.
///
/// # Errors
/// The limit, what the program needs and where, and which schedules look for less.
pub(crate) fn check(config: &Config, simulated: &Timeline) -> Result<(), ConfigError> {
    let Some(limit) = config.mem_limit else { return Ok(()) };
    let Some((rank, most)) = most_kept(simulated) else { return Ok(()) };
    if most <= limit.0 {
        return Ok(());
    }
    let schedule = &config.schedule;
    let problem = format!("schedule {schedule} needs {} on pipeline rank {rank}", Bytes(most));
    let help = match config.kind() {
        Some(kind) if kind.obeys_limit => "raise it, use a smaller unit, or recompute".to_owned(),
        _ => format!(
            "raise it, or use one of the schedules {}, which search for an order within it",
            Kind::names(|kind| kind.obeys_limit)
        ),
    };
    Err(ConfigError::value("mem-limit", limit, problem, help))
}
