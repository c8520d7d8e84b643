//! Stages on a rank and kinds of schedule with which ranks would idle less, found by predicting for
//! them.

use std::time::{Duration, Instant};

use zeropp_core::files::in_words;
use zeropp_pipeline::schedules::Kind;

use crate::config::Config;
use crate::plan::blueprint::Blueprint;
use crate::plan::memory;

/// How long is looked for: a schedule of many actions takes a while to predict for.
const TIME: Duration = Duration::from_secs(3);
/// Stages on a rank that are tried.
const STAGES: std::ops::RangeInclusive<usize> = 1..=8;
/// Less than this is no reason to change a setting: bubbles are of estimates.
const WORTH: f64 = 0.03;

/// What another V, or another V and kind, would have instead, where that is clearly less time.
pub(crate) fn note(bp: &Blueprint) -> Option<String> {
    let config = &bp.config;
    let is_free = config.stages.is_none() && config.schedule_file().is_none();
    if config.pp == 1 || !is_free || bp.plan.bubble < WORTH {
        return None;
    }
    let until = Instant::now() + TIME;
    // What needs too much here as it is, is to run elsewhere.
    let is_elsewhere = memory::is_short(bp);
    let (now_ns, mut best) = (bp.step_ns(), None);
    let mut least_ns = (now_ns as f64 * (1.0 - WORTH)) as u64;
    for other in others(config) {
        if Instant::now() > until {
            break;
        }
        let Ok(other) = Blueprint::new(&other, bp.model.clone(), &bp.own) else { continue };
        if other.step_ns() < least_ns && (is_elsewhere || !memory::is_short(&other)) {
            least_ns = other.step_ns();
            best = Some(other);
        }
    }
    let other = best?;
    let most = |bp: &Blueprint| bp.plan.ranks.iter().map(|r| r.at_once.total()).max().unwrap_or(0);
    Some(format!(
        "{} would take {:.1} % off the time of a step's computes: a bubble of {:.1} % in place of \
         {:.1} %, and at most {} on a rank in place of {} (simulated)",
        flags(config, &other.config),
        100.0 * (1.0 - other.step_ns() as f64 / now_ns as f64),
        100.0 * other.plan.bubble,
        100.0 * bp.plan.bubble,
        in_words(most(&other)),
        in_words(most(bp)),
    ))
}

/// The same micro-batches with other stages on each rank, and other kinds that are made at once;
/// first those that differ in one setting.
fn others(config: &Config) -> Vec<Config> {
    let (now, batches) = (config.virtual_stages(), Some(config.micro_batches()));
    let of = |schedule: &str, v: usize| Config {
        schedule: schedule.into(),
        virtual_stages: Some(v),
        unit: config.unit.filter(|_| schedule == config.schedule),
        micro_batches: if config.global_batch.is_some() { None } else { batches },
        ..config.clone()
    };
    let all = Kind::planned().flat_map(|kind| {
        let fits = move |v: &usize| kind.stages.allows(*v) && config.pp * v <= config.layers;
        STAGES.filter(fits).map(move |v| (kind.name, v))
    });
    let mut all: Vec<(&str, usize)> = all.collect();
    all.retain(|other| *other != (&config.schedule, now));
    all.sort_by_key(|(kind, v)| (*kind != config.schedule) as usize + (*v != now) as usize);
    all.into_iter().map(|(kind, v)| of(kind, v)).collect()
}

/// What differs, with what followed from it.
fn flags(from: &Config, to: &Config) -> String {
    // V follows from the kind where it is not given.
    let mut flags = vec![format!("--virtual {}", to.virtual_stages())];
    if from.schedule != to.schedule {
        flags.push(format!("--schedule {}", to.schedule));
    }
    if from.global_batch.is_none() {
        flags.push(format!("--micro-batches {}", to.micro_batches()));
    }
    flags.join(" ")
}
