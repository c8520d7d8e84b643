//! `slices = auto`: samples in slices where a step is predicted to be shorter so, else whole.

use zeropp_core::layer::Model;
use zeropp_plan::slices::numbers;
use zeropp_plan::worth::is_worth;

use crate::Error;
use crate::config::{Config, SliceCount};
use crate::own::CustomParts;
use crate::plan::blueprint::Blueprint;
use crate::plan::split::step_ns;
use crate::plan::{memory, split};

/// The run of these settings; where they leave the number of slices open, with the one of which a
/// step is shortest, or that fits where fewer do not. Of more slices it has to be
/// [worth](is_worth) that. No bit depends on it: where whole samples run, slices have their units.
/// A note says what was chosen.
///
/// # Errors
/// What is wrong with the settings.
pub(crate) fn planned(
    config: &Config,
    model: Model,
    own: &CustomParts,
) -> Result<Blueprint, Error> {
    let whole = split::planned(config, model.clone(), own);
    // Slices can only meet a limit on memory that whole samples do not.
    if !config.chooses_slices() || whole.is_err() && config.mem_limit.is_none() {
        return whole;
    }
    let is_short = |made: &Blueprint| memory::is_short(&made.needs());
    let why_not = match &whole {
        Err(why) => Some(format!("with whole samples, {why}")),
        Ok(whole) => is_short(whole).then(|| "whole samples need more memory".to_string()),
    };
    let before = whole.as_ref().map_or(u64::MAX, step_ns);
    // Sums follow from units of samples, which some kinds have others of for slices.
    let units = |made: &Blueprint| {
        let (slices, units) = (made.schedule().slices_per_sample(), &made.schedule().units);
        units.iter().map(|unit| unit / slices).collect::<Vec<_>>()
    };
    let units_before = whole.as_ref().ok().map(units);
    let (mut best, mut least) = (whole, before);
    for n in numbers(config.seq) {
        let sliced = Config { slices: SliceCount::Of(n), ..config.clone() };
        // Those that cannot be are none, such as beyond a limit on memory.
        let Ok(made) = split::planned(&sliced, model.clone(), own) else { continue };
        if units_before.as_ref().is_some_and(|before| *before != units(&made)) {
            continue;
        }
        let ns = step_ns(&made);
        let is_better = match best.as_ref().map(|best| (is_short(best), is_short(&made))) {
            Err(_) | Ok((true, false)) => true,
            Ok((false, true)) => false,
            Ok(_) => is_worth(least as f64, ns as f64),
        };
        if is_better {
            (best, least) = (Ok(made), ns);
        }
    }
    let mut best = best?;
    let Some(slices) = &best.slices else { return Ok(best) };
    let n = slices.tokens().len();
    let why = why_not.unwrap_or_else(|| {
        let gain = 100.0 * (1.0 - least as f64 / before.max(1) as f64);
        format!("a step is predicted to take {gain:.0} % less")
    });
    best.plan.notes.push(format!("slices = auto: samples are cut into {n} slices: {why}"));
    best.slices_chosen = true;
    Ok(best)
}

/// The same settings, with what was chosen for a run of them open again.
pub(crate) fn reopened(bp: &Blueprint) -> Config {
    let config = split::reopened(bp);
    let slices = if bp.slices_chosen { SliceCount::Auto } else { config.slices };
    Config { slices, ..config }
}
