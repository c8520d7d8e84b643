//! `recompute = auto`: the least recomputation with which a run fits its memory.

use zeropp_core::files::in_words;
use zeropp_core::layer::Model;
use zeropp_plan::recompute::least;

use crate::Error;
use crate::config::{Config, OutStates, OutUnits, Recompute};
use crate::own::CustomParts;
use crate::plan::blueprint::Blueprint;
use crate::plan::{host, memory, slice_number};

/// The run, with `recompute = auto` with the least recomputation that fits; where none does, with
/// all that there is. With a folder for that, activations are copied out before stages are computed
/// again. A note says which, where it is any.
///
/// # Errors
/// What is wrong with the settings.
pub(crate) fn planned(
    config: &Config,
    model: Model,
    own: &CustomParts,
) -> Result<Blueprint, Error> {
    let mut planned = with_states_out(config, model, own)?;
    planned.plan.notes.extend(host::predicted(&planned));
    Ok(planned)
}

/// With `optimizer:out-states = auto` moments alone are out where that is enough, else all.
fn with_states_out(config: &Config, model: Model, own: &CustomParts) -> Result<Blueprint, Error> {
    if config.states_folder().is_none() || config.optimizer_out_states != OutStates::Auto {
        return with_least(config, model, own);
    }
    let made = |optimizer_out_states| {
        with_least(&Config { optimizer_out_states, ..config.clone() }, model.clone(), own)
    };
    let moments = made(OutStates::Moments);
    let short = match &moments {
        Ok(moments) => memory::shortage(&moments.needs()),
        Err(_) if config.mem_limit.is_none() => return moments,
        Err(_) => None,
    };
    if moments.is_ok() && short.is_none() {
        return moments;
    }
    let mut all = made(OutStates::All)?;
    let why = short.map_or_else(String::new, |memory::Shortage { needed, room, source }| {
        let (needed, room) = (in_words(needed), in_words(room));
        format!(", as {needed} would be needed with moments out alone, and {source} is {room}")
    });
    all.plan.notes.push(format!("optimizer:out-states = auto: all{why}"));
    Ok(all)
}

fn with_least(config: &Config, model: Model, own: &CustomParts) -> Result<Blueprint, Error> {
    if config.recompute != Recompute::Auto {
        return slice_number::planned(config, model, own);
    }
    let mut short = None;
    let made = |config: Config| {
        let made = slice_number::planned(&config, model.clone(), own);
        if config.recompute == Recompute::None && short.is_none() {
            short = made.as_ref().ok().and_then(|made| memory::shortage(&made.needs()));
        }
        made
    };
    let mut chosen = match (&config.recompute_out, config.recompute_out_batches) {
        (Some(_), None) => with_copies(config, made)?,
        _ => without_copies(config, made)?,
    };
    chosen.recompute_chosen = true;
    let out = chosen.config.recompute_out.as_ref();
    if chosen.config.recompute != Recompute::None || out.is_some() {
        let mut values = Vec::new();
        values.extend(chosen.config.recompute_first.map(|first| format!("first={first}")));
        values.extend(out.map(|folder| format!("out={}", folder.display())));
        values.extend(
            chosen.config.recompute_out_batches.map(|batches| format!("out-batches={batches}")),
        );
        let units = chosen.config.recompute_out_units;
        values.extend((units == OutUnits::Later).then(|| format!("out-units={units}")));
        let values = if values.is_empty() { "".into() } else { format!(":{}", values.join(",")) };
        let why = short.map_or_else(String::new, |memory::Shortage { needed, room, source }| {
            let (needed, room) = (in_words(needed), in_words(room));
            format!(", as {needed} would be needed without, and {source} is {room}")
        });
        let word = chosen.config.recompute;
        chosen.plan.notes.push(format!("recompute = auto: {word}{values}{why}"));
    }
    Ok(chosen)
}

fn fits(made: &Blueprint) -> bool {
    !memory::is_short(&made.needs())
}

/// Micro-batches of a unit; 1 where the program says itself what is done again.
fn unit(made: &Blueprint) -> usize {
    match made.config.schedule_file() {
        None if made.slices.is_none() => made.config.unit(),
        _ => 1,
    }
}

/// The least recomputation that fits.
fn without_copies(
    config: &Config,
    mut made: impl FnMut(Config) -> Result<Blueprint, Error>,
) -> Result<Blueprint, Error> {
    let made = |(recompute, recompute_first)| {
        made(Config { recompute, recompute_first, ..config.clone() })
    };
    least(unit, made, fits)
}

/// None, what is cheap, copies of as few micro-batches of each unit as fit beside that, and then
/// recomputation beside copies of all.
fn with_copies(
    config: &Config,
    mut made: impl FnMut(Config) -> Result<Blueprint, Error>,
) -> Result<Blueprint, Error> {
    for recompute in [Recompute::None, Recompute::Selective] {
        // One that cannot be is none, such as beyond a limit on memory.
        let kept = made(Config { recompute, recompute_out: None, ..config.clone() });
        if kept.as_ref().is_ok_and(fits) {
            return kept;
        }
    }
    let selective = Config { recompute: Recompute::Selective, ..config.clone() };
    let Some(mut least) = made(selective.clone()).ok().filter(fits) else {
        return without_copies(config, made);
    };
    // Fewer do not fit, or are not known to; so many do.
    let (mut fewer, mut enough) = (0, unit(&least));
    while enough - fewer > 1 {
        let batches = fewer.midpoint(enough);
        match made(Config { recompute_out_batches: Some(batches), ..selective.clone() }) {
            Ok(made) if fits(&made) => (enough, least) = (batches, made),
            _ => fewer = batches,
        }
    }
    // Beyond what the host has too little is out in any case: then stages are computed again.
    match host::is_short(&least) {
        true => without_copies(&Config { recompute_out: None, ..config.clone() }, made),
        false => Ok(least),
    }
}
