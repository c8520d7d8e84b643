//! Samples that are cut into slices: where, and which runs can have them.

use zeropp_core::head::blocks;
use zeropp_core::layer::{BatchShape, Model, Part};
use zeropp_core::params::ParamSpec;
use zeropp_pipeline::costs::SLICE_GRID;
use zeropp_plan::layout::LAST_MIN;
use zeropp_plan::parts::Parts;
use zeropp_plan::slices::SampleSlices;

use crate::config::{Config, ConfigError};

/// The fewest columns of such products.
const COLUMNS_MIN: usize = 3;

/// The slices of a run of `model`, whose parts for whole samples are `whole`; of a `given` cut, or
/// of the one of the settings. None where samples are whole.
///
/// # Errors
/// A model or a length that is not cut so.
pub(crate) fn of_run(
    config: &Config,
    given: &[u64],
    model: &Model,
    whole: &Parts,
    parts: impl Fn(BatchShape) -> Parts,
) -> Result<Option<SampleSlices>, ConfigError> {
    let n = config.slices();
    if n < 2 {
        return Ok(None);
    }
    let refused = |problem: String, help: &str| Err(ConfigError::value("slices", n, problem, help));
    if let Some(part) = model.parts.iter().find(|part| !part.takes_slices()) {
        let problem = format!("{} of this model computes on whole samples alone", Part::name(part));
        return refused(problem, "use 1");
    }
    if let Some(problem) = narrow(model) {
        return refused(problem, "use 1");
    }
    let seq = config.seq as u64;
    let batch = |seq| BatchShape { keeps_probabilities: false, ..config.sample_of(seq) };
    let half = parts(batch(config.seq / 2));
    let (cut, growth) = SampleSlices::cut(config.seq, n, config.slice_cut, [whole, &half]);
    let tokens = match (given.is_empty(), cut) {
        (false, _) => given.to_vec(),
        (true, Some(tokens)) => tokens,
        (true, None) => {
            let most = seq.div_ceil(SLICE_GRID);
            let problem = format!(
                "a sample of {seq} tokens has {most} blocks of {SLICE_GRID}, of which a slice has \
                 one at least"
            );
            return refused(problem, &format!("use 1 to {most}"));
        }
    };
    if tokens.iter().sum::<u64>() != seq {
        let sum: u64 = tokens.iter().sum();
        let problem = format!("its slices have {sum} tokens in all, and seq is {seq}");
        let help = "make it for samples of as many tokens";
        return Err(ConfigError::value("schedule", &config.schedule, problem, help));
    }
    let (last, others) = tokens.split_last().expect("two or more");
    if *last < LAST_MIN as u64 || others.iter().any(|tokens| tokens % SLICE_GRID != 0) {
        let problem = format!(
            "cuts samples of seq = {seq} tokens into slices of {tokens:?}; the last one has to \
             have {LAST_MIN} or more, the others multiples of {SLICE_GRID}"
        );
        return refused(problem, "use 1, or a seq that is a multiple of 256");
    }
    Ok(Some(SampleSlices::new(tokens, growth, batch, parts)))
}

/// What of the model is multiplied with fewer than [`COLUMNS_MIN`] columns.
fn narrow(model: &Model) -> Option<String> {
    let why = format!("products of fewer than {COLUMNS_MIN} columns have bits of their own");
    let of_map = |of: &ParamSpec| {
        let side = *of.shape.iter().min()?;
        let is_narrow = of.shape.len() > 1 && side < COLUMNS_MIN;
        is_narrow.then(|| format!("{} has a side of {side}, and {why}", of.name))
    };
    let ids = model.vocabulary;
    let last = blocks(ids).last().map_or(0, |block| block.len());
    let of_head = (last < COLUMNS_MIN)
        .then(|| format!("the head of {ids} token ids ends in a block of {last}, and {why}"));
    model.parts.iter().flat_map(Part::parameters).find_map(|of| of_map(&of)).or(of_head)
}
