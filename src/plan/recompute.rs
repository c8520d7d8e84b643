//! `recompute = auto`: the least recomputation with which a run fits its memory.

use zeropp_core::files::in_words;
use zeropp_core::layer::Model;
use zeropp_plan::recompute::least;

use crate::Error;
use crate::config::{Config, Recompute};
use crate::own::CustomParts;
use crate::plan::blueprint::Blueprint;
use crate::plan::{memory, slice_number};

/// The run, with `recompute = auto` with the least recomputation that fits; where none does, with
/// all that there is. A note says which, where it is any.
///
/// # Errors
/// What is wrong with the settings.
pub(crate) fn planned(
    config: &Config,
    model: Model,
    own: &CustomParts,
) -> Result<Blueprint, Error> {
    if config.recompute != Recompute::Auto {
        return slice_number::planned(config, model, own);
    }
    let mut short = None;
    let made = |(recompute, recompute_first)| {
        let config = Config { recompute, recompute_first, ..config.clone() };
        let made = slice_number::planned(&config, model.clone(), own);
        if recompute == Recompute::None {
            short = made.as_ref().ok().and_then(|made| memory::shortage(&made.needs()));
        }
        made
    };
    let fits = |made: &Blueprint| !memory::is_short(&made.needs());
    // The program of a file recomputes what it says.
    let unit = |made: &Blueprint| match made.config.schedule_file() {
        None if made.slices.is_none() => made.config.unit(),
        _ => 1,
    };
    let mut chosen = least(unit, made, fits)?;
    chosen.recompute_chosen = true;
    if chosen.config.recompute != Recompute::None {
        let first = chosen.config.recompute_first.map(|first| format!(":first={first}"));
        let why = short.map_or_else(String::new, |memory::Shortage { needed, room, source }| {
            let (needed, room) = (in_words(needed), in_words(room));
            format!(", as {needed} would be needed without, and {source} is {room}")
        });
        let word = chosen.config.recompute;
        let first = first.unwrap_or_default();
        chosen.plan.notes.push(format!("recompute = auto: {word}{first}{why}"));
    }
    Ok(chosen)
}
