//! The cut of a step's sums, as a checkpoint has it.
//!
//! Gradients are summed within a unit and then over units, so that B and U are part of what a run
//! computes. A resumed run that leaves them open goes on with those it was saved with, whatever
//! defaults its new mesh would have; where the batch of all ranks was asked for, with that batch on
//! as many replicas as there are.

use zeropp_zero3::checkpoint::{Checkpoint, Store};

use crate::checkpoint::resume::{candidates, samples_per_step};
use crate::config::{Config, Resume};

/// `config` with the batch and the unit of the checkpoint that it goes on from, where they are left
/// open. A checkpoint that cannot be read is left to whoever resumes from it.
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
    let unit = config.unit.or_else(|| saved("unit").filter(|_| config.in_units()));
    let config = Config { unit, ..config };
    if asked {
        return config;
    }
    let settings = &checkpoint.manifest().settings;
    let samples = settings.get("global-batch").and_then(|_| samples_per_step(settings));
    if let Some(config) = samples.and_then(|samples| config.with_samples(samples)) {
        return config;
    }
    Config { micro_batches: saved("micro-batches"), ..config }
}
