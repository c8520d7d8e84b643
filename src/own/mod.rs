//! Parts that a program brings itself, in place of those that the settings name.

pub(crate) mod loss;
pub(crate) mod samples;

use std::sync::Arc;

use zeropp_pipeline::ir::Schedule;
use zeropp_zero3::optimizer::LearningRateFn;
use zeropp_zero3::rule::{ParameterGroups, UpdateRule};

use crate::config::Config;
use crate::own::samples::Samples;

/// An optimizer, a learning rate, data and a schedule of a program's own.
#[derive(Clone, Default)]
pub(crate) struct CustomParts {
    pub(crate) rule: Option<Arc<dyn UpdateRule>>,
    pub(crate) rate: Option<LearningRateFn>,
    pub(crate) data: Option<Arc<dyn Samples>>,
    /// The samples of the validation loss.
    pub(crate) eval_data: Option<Arc<dyn Samples>>,
    pub(crate) schedule: Option<Arc<Schedule>>,
    /// Whether the loss is the program's own, which does not know that a token is not scored.
    pub(crate) masks_nothing: bool,
}

impl CustomParts {
    /// How parameters are updated, with settings that have been checked.
    pub(crate) fn parameters(&self, config: &Config) -> ParameterGroups {
        ParameterGroups {
            rule: self
                .rule
                .clone()
                .map_or_else(|| config.update_rule(), |own| config.balanced(own)),
            no_decay: config.no_decay_groups().expect("checked before"),
            ema: config.ema,
        }
    }

    /// Whether a validation loss may be measured: the settings say when, or the program brings what
    /// it is of, and asks for it.
    pub(crate) fn measures(&self, config: &Config) -> bool {
        config.eval_every > 0 || self.eval_data.is_some()
    }

    /// The learning rate over the steps.
    pub(crate) fn rate(&self, config: &Config) -> LearningRateFn {
        let by_settings = || -> LearningRateFn {
            let rate = config.learning_rate();
            Arc::new(move |step| rate.at(step))
        };
        self.rate.clone().unwrap_or_else(by_settings)
    }
}
