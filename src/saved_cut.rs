//! The cut of a step's sums, as a checkpoint has it.
//!
//! Gradients are summed within a unit and then over units, so that B and U are part of what a run
//! computes. A resumed run that leaves them open goes on with those it was saved with, whatever
//! defaults its new mesh would have.

use zeropp_zero3::checkpoint::{Checkpoint, Store};

use crate::config::{Config, Resume};

/// `config` with the micro-batches and the unit of the checkpoint that it goes on from, where they
/// are left open. A checkpoint that cannot be read is left to whoever resumes from it.
pub(crate) fn take_over(config: Config) -> Config {
    let open = config.schedule_file().is_none()
        && (config.micro_batches.is_none() || config.unit.is_none() && config.in_units());
    let Some(folder) = config.save.as_ref().filter(|_| config.resume != Resume::No && open) else {
        return config;
    };
    let store = Store::new(folder);
    let path = match config.resume {
        Resume::Step(step) => Ok(store.path(step)),
        _ => store.newest(),
    };
    let Ok(checkpoint) = path.and_then(|path| Checkpoint::open(&path)) else { return config };
    let saved = |key: &str| {
        let text = checkpoint.manifest().settings.get(key)?;
        text.parse::<usize>().ok().filter(|n| *n > 0)
    };
    Config {
        micro_batches: config.micro_batches.or_else(|| saved("micro-batches")),
        unit: config.unit.or_else(|| saved("unit").filter(|_| config.in_units())),
        ..config
    }
}
