//! Facts about a run from the settings that its checkpoint keeps: its batch, how that was dealt,
//! and its learning rate.

use std::collections::BTreeMap;

use zeropp_zero3::checkpoint::Manifest;

use crate::checkpoint::identity;
use crate::config::{Config, OPTIONS, Table};

/// Settings as a checkpoint keeps them.
pub(crate) type Kept = BTreeMap<String, String>;

/// How many micro-batches of an uneven batch went to a replica at a time; beside the settings.
pub(crate) const DEALT_BY: &str = "dealt-by";
/// Settings that the learning rate follows from.
pub(crate) const RATE: [&str; 5] = ["steps", "lr", "min-lr", "warmup", "decay"];

/// The batch of a run with these settings, as a checkpoint keeps them, and how it was dealt.
pub(crate) fn batch_then(settings: &Kept) -> Option<Config> {
    let factor = |key: &str| settings.get(key)?.parse::<usize>().ok();
    Some(Config {
        micro_batches: Some(factor("micro-batches")?),
        micro_batch_size: factor("micro-batch-size")?,
        zero3: factor("zero3")?,
        dp: factor("dp")?,
        global_batch: identity::typed(settings, "global-batch").map(str::to_owned),
        // Earlier versions dealt as the schedule wanted it, in rounds of P.
        pp: factor("pp").unwrap_or(1),
        schedule: identity::typed(settings, "schedule").unwrap_or_default().to_owned(),
        dealt_by: factor(DEALT_BY),
        ..Config::default()
    })
}

/// Adds how an uneven batch is dealt.
pub(crate) fn add_deal(config: &Config, kept: &mut Kept) {
    kept.extend(config.deal().dealt_by().map(|by| (DEALT_BY.into(), by.to_string())));
}

/// Samples of a step of a run with these settings, as a checkpoint keeps them.
pub(crate) fn samples_per_step(settings: &Kept) -> Option<usize> {
    batch_then(settings).map(|then| then.samples_per_step())
}

/// The size of a mesh that is another one than that of these settings, as a checkpoint keeps them,
/// in words.
pub(crate) fn other_mesh(settings: &Kept, config: &Config) -> Option<String> {
    let now = [("pp", config.pp), ("zero3", config.zero3), ("dp", config.dp)];
    let then = |key: &str| settings.get(key)?.parse::<usize>().ok();
    let other = now.into_iter().find(|(key, now)| then(key) != Some(*now));
    other.map(|(key, _)| match then(key) {
        Some(was) => format!("{key} was {was}"),
        None => format!("{key} was not known"),
    })
}

/// The learning rate of a checkpoint's step by the settings that it keeps, for those of earlier
/// versions, which do not keep the rate itself.
pub(crate) fn rate_then(manifest: &Manifest) -> Option<f64> {
    let mut settings = Table::new();
    for option in OPTIONS.iter().filter(|option| RATE.contains(&option.key)) {
        let text = identity::typed(&manifest.settings, option.key)?;
        settings.insert(option.key.into(), option.kind.parse(text).ok()?);
    }
    let then = Config::default().with(settings).ok()?;
    Some(then.learning_rate().at(manifest.step))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::settings::settings;

    #[test]
    fn kept_settings_give_the_batch() {
        let config = Config { pp: 2, zero3: 3, dp: 2, ..Config::default() };
        assert_eq!(samples_per_step(&settings(&config)), Some(config.samples_per_step()));
        // Where it does not divide evenly, micro-batches are only the most of a rank.
        let uneven = Config { global_batch: Some("21".into()), ..config };
        assert_eq!(uneven.resolved().micro_batches, Some(4));
        assert_eq!(samples_per_step(&settings(&uneven)), Some(21));
    }
}
