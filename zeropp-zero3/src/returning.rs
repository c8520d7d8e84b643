//! Updated parameters on their way back to their layer.

use std::sync::Arc;

use burn::tensor::Tensor;
use zeropp_comm::{CommResult, Pending};
use zeropp_core::device;
use zeropp_core::meter::Meter;

use crate::stage::ShardedStage;

/// A rank's shard of a layer after its update.
pub(crate) enum Updated {
    Here(Tensor<1>),
    /// With ZeRO-1, so many elements while they are gathered from the replicas.
    Gathered(Pending<Tensor<1>>, usize),
}

/// The parameters of the layer that was updated last. With ZeRO-1 they are gathered
/// while the next layer is updated, one layer at a time: the part that is gathered and the one
/// that is updated take no more than a layer's part and its whole.
#[derive(Default)]
pub(crate) struct Returning(Option<(At, Pending<Tensor<1>>)>);

/// A stage among the rank's, and the layer in it.
type At = (usize, usize);

impl Returning {
    /// Puts layer `at` in its place, or leaves it under way, once what was so before is there.
    pub(crate) fn next(
        &mut self,
        stages: &mut [ShardedStage],
        meter: &Arc<Meter>,
        at: At,
        updated: Updated,
    ) -> CommResult<()> {
        self.finish(stages, meter)?;
        let layer = &mut stages[at.0].layers[at.1];
        match updated {
            Updated::Here(param) => layer.set_param(param, meter),
            Updated::Gathered(param, elements) => {
                layer.expect_param(elements, meter);
                self.0 = Some((at, param));
            }
        }
        Ok(())
    }

    /// Waits for what is under way.
    pub(crate) fn finish(
        &mut self,
        stages: &mut [ShardedStage],
        meter: &Arc<Meter>,
    ) -> CommResult<()> {
        let Some((at, param)) = self.0.take() else { return Ok(()) };
        // Gathered memory is shared, and parameters are written in place.
        let param = device::copy(&param.wait()?);
        stages[at.0].layers[at.1].set_param(param, meter);
        Ok(())
    }
}
