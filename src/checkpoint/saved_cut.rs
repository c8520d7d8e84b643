//! The cut of a step's sums, as a checkpoint has it.
//!
//! Gradients are summed within a unit and then over units, so that B and U are part of what a run
//! computes. A resumed run that leaves them open goes on with those it was saved with, whatever
//! defaults its new mesh would have.

use zeropp_zero3::checkpoint::{Checkpoint, Store};

use crate::checkpoint::resume::candidates;
use crate::config::{Config, Resume};

/// `config` with the micro-batches and the unit of the checkpoint that it goes on from, where they
/// are left open. A checkpoint that cannot be read is left to whoever resumes from it.
pub(crate) fn take_over(config: Config) -> Config {
    let asked = config.micro_batches.is_some() || config.global_batch.is_some();
    let open =
        config.schedule_file().is_none() && (!asked || config.unit.is_none() && config.in_units());
    let Some(folder) = config.save.as_ref().filter(|_| config.resume != Resume::No && open) else {
        return config;
    };
    let store = Store::new(folder);
    let Ok(steps) = candidates(&store, config.resume) else { return config };
    let tried = if config.resume_fallback { steps.len() } else { 1 };
    let mut newest_first = steps.iter().rev().take(tried);
    let opened = newest_first.find_map(|step| Checkpoint::open(&store.path(*step)).ok());
    let Some(checkpoint) = opened else { return config };
    let saved = |key: &str| {
        let text = checkpoint.manifest().settings.get(key)?;
        text.parse::<usize>().ok().filter(|n| *n > 0)
    };
    Config {
        micro_batches: config.micro_batches.or_else(|| match asked {
            true => None,
            false => saved("micro-batches"),
        }),
        unit: config.unit.or_else(|| saved("unit").filter(|_| config.in_units())),
        ..config
    }
}
