//! Whether a model from outside is the one that the settings and the data speak of.

use crate::config::{Config, ConfigError};
use zeropp_core::data::Dataset;
use zeropp_core::layer::{Model, Part};

use crate::Error;

/// Checks all that a model tells of itself before a rank starts, where it would be a panic.
///
/// # Errors
/// The first setting that says otherwise, or a model that is none.
pub(crate) fn check(config: &Config, model: &Model, data: &Dataset) -> Result<(), Error> {
    check_parts(&model.parts)?;
    let differs = |field: &str, value: usize, theirs: usize, what: &str| {
        let problem = format!("the model's {what} is {theirs}");
        let help = format!("use {theirs}, or another model");
        Err(ConfigError::value(field, value, problem, help).into())
    };
    if model.hidden != config.hidden {
        return differs("hidden", config.hidden, model.hidden, "hidden size");
    }
    let blocks = model.parts.iter().filter(|part| part.is_block()).count();
    if blocks != config.layers {
        return differs("layers", config.layers, blocks, "number of blocks");
    }
    let longest = model.parts.iter().filter_map(Part::seq_max).min();
    if let Some(longest) = longest.filter(|longest| config.seq > *longest) {
        let problem = format!("the model takes samples of at most {longest} tokens");
        let help = format!("use 1 to {longest}, or a model of more positions");
        return Err(ConfigError::value("seq", config.seq, problem, help).into());
    }
    if model.vocabulary < data.vocabulary() {
        return Err(Error::Model(format!(
            "vocabulary = {} is smaller than the data needs; it must be at least {}",
            model.vocabulary,
            data.vocabulary()
        )));
    }
    Ok(())
}

/// A program's own model says itself what of it trains.
///
/// # Errors
/// A setting that says it, too.
pub(crate) fn check_tuning(config: &Config) -> Result<(), ConfigError> {
    let rank = (config.lora_rank > 0).then(|| ("lora-rank", config.lora_rank.to_string()));
    let freeze = config.freeze.clone().map(|freeze| ("freeze", freeze));
    let Some((field, value)) = rank.or(freeze) else { return Ok(()) };
    let problem = "the program brings its own model, which says itself what trains";
    let help = "leave it out, and declare what does not train with ParamSpec::frozen";
    Err(ConfigError::value(field, value, problem, help))
}

/// An embedding first, a head last, layers between.
fn check_parts(parts: &[Part]) -> Result<(), Error> {
    let fits = |(i, part): (usize, &Part)| match part {
        Part::Embedding(_) => i == 0,
        Part::Head(_) => i + 1 == parts.len(),
        Part::Layer(_) => i > 0 && i + 1 < parts.len(),
        Part::Slice(_) => false,
    };
    if parts.len() < 2 {
        return Err(Error::Model("it needs an embedding, layers and a head".into()));
    }
    match parts.iter().enumerate().find(|part| !fits(*part)) {
        Some((i, part)) => Err(Error::Model(format!(
            "part {i} of {}, {}, is in the wrong place; an embedding comes first, a head last and \
             layers between them",
            parts.len(),
            part.name()
        ))),
        None => Ok(()),
    }
}
