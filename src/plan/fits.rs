//! Settings of a run that would need less memory, found by predicting for them.

use std::time::{Duration, Instant};

use crate::config::{Config, EngineKind, Recompute};
use crate::plan::blueprint::Blueprint;
use crate::refusal::Fit;

/// How many are looked for.
const WANTED: usize = 3;
/// How long is looked for more: a schedule of many actions takes a while to predict for.
const TIME: Duration = Duration::from_secs(5);

/// Up to three settings with which `fits` says how much is needed, because it fits: the fewest
/// settings first, of each set all but the last as far as they go, and the last no further than it
/// takes. All train the same batch.
pub(crate) fn search(bp: &Blueprint, fits: impl Fn(&Blueprint) -> Option<u64>) -> Vec<Fit> {
    let until = Instant::now() + TIME;
    let tried = |config: &Config| {
        if Instant::now() > until {
            return None;
        }
        let needed = fits(&Blueprint::new(config, bp.model.clone(), &bp.own).ok()?)?;
        Some(Fit { flags: flags(&bp.config, config), needed })
    };
    let mut sets: Vec<usize> = (1..1 << LADDERS.len()).collect();
    sets.sort_by_key(|set| set.count_ones());
    let mut found: Vec<(usize, Fit)> = Vec::new();
    for set in sets {
        // With more settings than fit already there is nothing new to say.
        if found.len() == WANTED || found.iter().any(|(other, _)| set & other == *other) {
            continue;
        }
        let chosen: Vec<_> = (0..LADDERS.len()).filter(|i| set >> i & 1 == 1).collect();
        let (last, others) = chosen.split_last().expect("a set has one");
        let far = others.iter().try_fold(bp.config.clone(), |config, i| LADDERS[*i](&config).pop());
        let fit = far.and_then(|config| LADDERS[*last](&config).iter().find_map(tried));
        found.extend(fit.map(|fit| (set, fit)));
    }
    found.into_iter().map(|(_, fit)| fit).collect()
}

/// Of one setting the values that need less and less.
type Ladder = fn(&Config) -> Vec<Config>;

const LADDERS: [Ladder; 6] = [recompute, micro_batch_size, unit, virtual_stages, zero1, zero3];

fn recompute(config: &Config) -> Vec<Config> {
    let less = match config.recompute {
        Recompute::None => &[Recompute::Selective, Recompute::Full][..],
        Recompute::Selective => &[Recompute::Full],
        Recompute::Full => &[],
    };
    less.iter().map(|recompute| Config { recompute: *recompute, ..config.clone() }).collect()
}

/// 2, 4, 8 and so on, up to `most`.
fn powers(most: usize) -> impl Iterator<Item = usize> {
    (1..usize::BITS).map(|i| 1 << i).take_while(move |by| *by <= most)
}

/// So many micro-batches of each rank; where the replicas have not as many each, they follow from
/// the samples.
fn each(config: &Config, n: usize) -> Option<usize> {
    config.deal().fewer().is_none().then_some(n)
}

/// The same samples of a step in more micro-batches.
fn micro_batch_size(config: &Config) -> Vec<Config> {
    let size = config.micro_batch_size;
    let divided = |by: usize| Config {
        micro_batch_size: size / by,
        micro_batches: each(config, config.micro_batches().saturating_mul(by)),
        ..config.clone()
    };
    powers(size).filter(|by| size.is_multiple_of(*by)).map(divided).collect()
}

fn unit(config: &Config) -> Vec<Config> {
    let smaller = |by: usize| Config { unit: Some(config.unit() / by), ..config.clone() };
    powers(config.unit()).filter(|_| config.in_units()).map(smaller).collect()
}

fn virtual_stages(config: &Config) -> Vec<Config> {
    let stages = config.virtual_stages();
    let fits = |v: &usize| config.stages.is_none() && config.pp * stages * v <= config.layers;
    let more = |by: usize| Config { virtual_stages: Some(stages * by), ..config.clone() };
    powers(4).filter(fits).map(more).collect()
}

fn zero1(config: &Config) -> Vec<Config> {
    let helps = config.dp > 1 && !config.zero1;
    helps.then(|| Config { zero1: true, ..config.clone() }).into_iter().collect()
}

/// More ranks, where each may have a machine or a device of its own.
fn zero3(config: &Config) -> Vec<Config> {
    let (batches, all) = (config.micro_batches(), config.deal().all());
    let more = |by: usize| Config {
        zero3: config.zero3 * by,
        micro_batches: each(config, batches / by),
        unit: Some(config.unit().min(batches / by)),
        ..config.clone()
    };
    let divides = |by: usize| match config.deal().fewer() {
        Some(_) => all.is_multiple_of(by) && all / by >= config.dp,
        None => batches.is_multiple_of(by),
    };
    let fits = |by: &usize| divides(*by) && config.engine != EngineKind::Threads;
    powers(8).filter(fits).map(more).collect()
}

/// What differs, as flags. A unit that was left open would follow from others of them.
fn flags(from: &Config, to: &Config) -> String {
    let (old, new) = (from.clone(), to.clone());
    let values = [
        ("recompute", old.recompute.to_string(), new.recompute.to_string()),
        ("micro-batch-size", text(old.micro_batch_size), text(new.micro_batch_size)),
        ("virtual", text(old.virtual_stages()), text(new.virtual_stages())),
        ("zero1", old.zero1.to_string(), new.zero1.to_string()),
        ("zero3", text(old.zero3), text(new.zero3)),
        ("micro-batches", text(old.micro_batches()), text(new.micro_batches())),
    ];
    let differs = values.iter().filter(|(_, old, new)| old != new);
    let mut flags: Vec<String> = differs.map(|(key, _, new)| format!("--{key} {new}")).collect();
    let follows = ["--virtual", "--micro-batches"];
    let moves = flags.iter().any(|flag| follows.iter().any(|key| flag.starts_with(key)));
    if to.in_units() && (moves || old.unit() != new.unit()) {
        flags.push(format!("--unit {}", new.unit()));
    }
    flags.join(" ").replace("--zero1 true", "--zero1")
}

fn text(n: usize) -> String {
    n.to_string()
}
