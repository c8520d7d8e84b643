//! The cut of a step's sums, as a checkpoint has it.
//!
//! Gradients are summed within a unit and then over units, so that B and U are part of what a run
//! computes. A resumed run that leaves them open goes on with those it was saved with, whatever
//! defaults its new mesh would have; where the batch of all ranks was asked for, with that batch on
//! as many replicas as there are.

use zeropp_zero3::checkpoint::{Checkpoint, Manifest, Store};

use crate::checkpoint::kept::{Kept, batch_then, other_mesh, samples_per_step};
use crate::checkpoint::resume::candidates;
use crate::config::{Config, Resume};

/// `config` with the batch and the unit of the checkpoint that it goes on from, where they are left
/// open, and with its deal of an uneven batch. A checkpoint that cannot be read is left to the code
/// that resumes from it.
pub(crate) fn take_over(config: Config) -> Config {
    match goes_on_from(&config) {
        Some(checkpoint) if config.schedule_file().is_none() => {
            let manifest = checkpoint.manifest();
            let settings = &manifest.settings;
            with_stages(with_deal(with_batch(config, settings), settings), manifest)
        }
        _ => config,
    }
}

/// The checkpoint that a run of `config` goes on from, if it goes on from one that can be opened.
pub(crate) fn goes_on_from(config: &Config) -> Option<Checkpoint> {
    let folder = config.save.as_ref().filter(|_| config.resume != Resume::No)?;
    let store = Store::new(folder);
    let steps = candidates(&store, config.resume).ok()?;
    let tried = if config.resume_fallback { steps.len() } else { 1 };
    let mut newest_first = steps.iter().rev().take(tried);
    newest_first.find_map(|step| Checkpoint::open(&store.path(*step)).ok())
}

/// `config` with the batch and the unit of a checkpoint with these settings, as far as they are
/// left open.
fn with_batch(config: Config, settings: &Kept) -> Config {
    let asked = config.micro_batches.is_some() || config.global_batch.is_some();
    let saved = |key: &str| settings.get(key)?.parse::<usize>().ok().filter(|n| *n > 0);
    let unit = config.unit.or_else(|| saved("unit").filter(|_| config.in_units()));
    let config = Config { unit, ..config };
    if asked {
        return config;
    }
    let samples = settings.get("global-batch").and_then(|_| samples_per_step(settings));
    if let Some(config) = samples.and_then(|samples| config.with_samples(samples)) {
        return config;
    }
    Config { micro_batches: saved("micro-batches"), ..config }
}

/// `config` with the stages that the run had found, where it may find others, on the same mesh with
/// as many: on another one times are others, and ranks hold other bytes.
fn with_stages(config: Config, manifest: &Manifest) -> Config {
    let found = manifest.program.as_ref().and_then(|program| program.blocks.as_ref());
    let stages = config.pp.saturating_mul(config.virtual_stages());
    let is_alike = || other_mesh(&manifest.settings, &config).is_none();
    let found = found.filter(|found| config.recuts() && found.len() == stages && is_alike());
    let text =
        |found: &Vec<usize>| found.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let found = found.map(text).filter(|_| config.stages.is_none());
    Config { stages: config.stages.clone().or(found), ..config }
}

/// `config` with the deal of a checkpoint with these settings, where both deal the same samples to
/// as many ranks: the order of sums follows from it.
fn with_deal(config: Config, settings: &Kept) -> Config {
    let then = batch_then(settings).filter(|then| {
        let of = |c: &Config| (c.samples_per_step(), c.micro_batch_size, c.zero3, c.dp);
        of(then) == of(&config)
    });
    Config { dealt_by: then.and_then(|then| then.deal().dealt_by()), ..config }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::kept::DEALT_BY;
    use crate::checkpoint::settings::settings;

    /// Before, another kind dealt the same batch otherwise, and the last bits of sums changed.
    #[test]
    fn an_uneven_batch_stays_dealt_as_in_the_checkpoint() {
        let of = |schedule: &str| Config {
            pp: 3,
            zero3: 2,
            dp: 2,
            micro_batch_size: 3,
            global_batch: Some("90".into()),
            schedule: schedule.into(),
            ..Config::default()
        };
        for (then, now, dealt) in
            [("gpipe", "interleaved-zb", [8, 7]), ("interleaved-zb", "gpipe", [9, 6])]
        {
            let mut kept = settings(&of(then));
            assert_ne!(of(now).deal().to_vec(), dealt);
            assert_eq!(with_deal(of(now), &kept).deal().to_vec(), dealt, "{now} after {then}");
            // As before there was an entry.
            assert!(kept.remove(DEALT_BY).is_some());
            assert_eq!(with_deal(of(now), &kept).deal().to_vec(), dealt, "{now} after {then}");
            let other = Config { global_batch: Some("102".into()), ..of(now) };
            assert_eq!(with_deal(other.clone(), &kept), other, "another batch is dealt anew");
        }
    }
}
