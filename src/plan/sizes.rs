//! Sizes whose products no machine holds, refused before anything multiplies them.

use zeropp_core::layer::{BatchShape, Model, Part};
use zeropp_plan::sizes::{
    Sizes, keeps_too_much, largest, too_many_activations, too_many_parameters,
};

use crate::Error;
use crate::config::{Config, ConfigError};

/// Refuses a model or a batch that is beyond any machine.
///
/// # Errors
/// What is too large, with the settings it is the product of.
pub(crate) fn check(config: &Config, model: &Model, batch: BatchShape) -> Result<(), Error> {
    let all: Vec<_> = model.parts.iter().flat_map(Part::parameters).collect();
    if let Some(parameters) = too_many_parameters(all.iter()) {
        let problem = format!(
            "with {} layers and a vocabulary of {} it makes a model of {parameters:.1e} \
             parameters, more than any machine holds",
            config.layers, model.vocabulary
        );
        let help = "use a smaller hidden size or fewer layers";
        return Err(ConfigError::value("hidden", config.hidden, problem, help).into());
    }
    let sizes = Sizes {
        hidden: config.hidden,
        heads: config.heads,
        parts: model.parts.len(),
        vocabulary: model.vocabulary,
        seq: config.seq,
        micro_batch_size: config.micro_batch_size,
        micro_batches: config.micro_batches(),
        ranks: config.zero3.saturating_mul(config.dp),
    };
    let blocks = model.parts.iter().filter(|part| part.is_block()).flat_map(Part::parameters);
    if let Some(kept) = too_many_activations(&sizes, blocks.collect::<Vec<_>>().iter()) {
        let (field, value) = largest(&sizes);
        let problem = format!(
            "a step's activations of {} x {} micro-batches of {} x {} tokens take {kept:.1e} \
             bytes, more than all machines hold",
            sizes.ranks, sizes.micro_batches, sizes.micro_batch_size, sizes.seq,
        );
        let help = format!("use a smaller {field}");
        return Err(ConfigError::value(field, value, problem, help).into());
    }
    // Layers may be anybody's.
    match model.parts.iter().find(|part| keeps_too_much(&sizes, &part.cost(batch))) {
        None => Ok(()),
        Some(part) => Err(Error::Model(format!(
            "layer {} says that it keeps {:?} of a micro-batch, more than all machines hold",
            part.name(),
            part.cost(batch)
        ))),
    }
}
