//! A run that goes on without a replica that has failed: the same steps, of the same samples, by
//! the replicas that are left (ADR 71).

use std::sync::Arc;

use crate::Error;
use crate::config::{Config, ConfigError};
use crate::plan::blueprint::Blueprint;
use crate::plan::{fits, slice_number};
use crate::trainer::Trainer;

impl Trainer {
    /// The trainer of the same run with a replica fewer; none where only one is left.
    ///
    /// # Errors
    /// The schedule cannot deal the step's samples to them, or they need more memory than there is.
    pub(crate) fn with_fewer_replicas(&self) -> Result<Option<Trainer>, Error> {
        let bp = &self.blueprint;
        let dp = bp.config.dp - 1;
        if dp == 0 {
            return Ok(None);
        }
        let samples = bp.config.samples_per_step();
        let fewer = Config { dp, ..slice_number::reopened(bp) };
        let config = fewer.with_samples(samples).ok_or_else(|| {
            let problem = format!("the {samples} samples of a step cannot be dealt to dp {dp}");
            ConfigError::value("on-loss", bp.config.on_loss, problem, "use restart")
        })?;
        let mut blueprint = slice_number::planned(&config, bp.model.clone(), &bp.own)?;
        fits::check(&blueprint)?;
        blueprint.base = bp.base.clone();
        Ok(Some(self.with(Arc::new(blueprint))))
    }

    /// The trainer of the same run by another blueprint.
    pub(crate) fn with(&self, blueprint: Arc<Blueprint>) -> Trainer {
        Trainer {
            blueprint,
            data: self.data.clone(),
            found: self.found.clone(),
            initial: self.initial.clone(),
            stopper: self.stopper.clone(),
            // It is of the same samples, batch by batch.
            evaluation: self.evaluation.clone(),
        }
    }
}
