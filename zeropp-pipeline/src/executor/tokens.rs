//! Where a worker gets what its micro-batches are of.

use std::sync::Arc;

use burn::tensor::{Int, Tensor};
use zeropp_core::data::DataError;
use zeropp_core::split::{Documents, Dropout, Masks};

/// Token ids and targets, each `[b, s]`, of one micro-batch.
pub type Tokens = (Tensor<2, Int>, Tensor<2, Int>);

/// A function of a step and a micro-batch of this rank in it.
type OfMicroBatch<T> = Arc<dyn Fn(u64, usize) -> Result<T, DataError> + Send + Sync>;

/// A function of a step, of all ranks together.
type OfStep<T> = Arc<dyn Fn(u64) -> Result<T, DataError> + Send + Sync>;

/// The micro-batches of a rank, each a function of step and number.
#[derive(Clone)]
pub struct TokenSource {
    /// Ids and targets.
    pub tokens: OfMicroBatch<Tokens>,
    /// The documents of its samples, where attention stays inside of them.
    pub documents: Option<OfMicroBatch<Documents>>,
    /// The divisor of the loss of each micro-batch of a step, where not all tokens are scored: see
    /// [`Masks::scored`].
    pub scored: Option<OfStep<f64>>,
    /// The dropout of its samples, where the model trains with dropout.
    pub dropout: Option<OfMicroBatch<Dropout>>,
}

impl TokenSource {
    /// The masks and dropout of a micro-batch, for a stage with or without the head.
    pub(super) fn masks(
        &self,
        step: u64,
        micro_batch: usize,
        has_head: bool,
    ) -> Result<Masks, DataError> {
        let documents = self.documents.as_ref().map(|of| of(step, micro_batch)).transpose()?;
        let scored = self.scored.as_ref().filter(|_| has_head).map(|of| of(step)).transpose()?;
        let dropout = self.dropout.as_ref().map(|of| of(step, micro_batch)).transpose()?;
        Ok(Masks { documents: documents.map(Arc::new), scored, dropout })
    }
}
