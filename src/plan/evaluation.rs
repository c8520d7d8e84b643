//! The program of a validation loss: forwards alone, on the stages of the training program.

use zeropp_pipeline::ir::Schedule;
use zeropp_plan::programs::{Programs, forwards};

use crate::Error;
use crate::config::Config;

/// The verified programs of all pipeline ranks for one batch, which has the micro-batches and units
/// of a step of `training`; none where the run `measures` no validation loss.
///
/// # Errors
/// A program that would not run through.
pub(crate) fn programs(
    config: &Config,
    training: &Programs,
    measures: bool,
) -> Result<Option<Programs>, Error> {
    match measures {
        false => Ok(None),
        true => {
            let one_order = config.one_order();
            let of = |training: &Schedule| forwards(training, config.prefetch, one_order);
            Ok(Some(training.map(of)?))
        }
    }
}
