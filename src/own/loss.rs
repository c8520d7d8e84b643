//! A loss of a program's own, of the logits of any head.

use std::sync::Arc;

use burn::tensor::{DType, Int, Tensor};

use zeropp_core::layer::{BatchShape, Head, LayerCost, LayerCx};
use zeropp_core::params::ParamSpec;

/// The function of a model's logits that it is trained by.
pub trait Loss: Send + Sync + 'static {
    /// The mean loss `[1]` over n tokens, from their logits `[n, V]` and targets `[n]`, by Burn's
    /// operations, through which it goes back. The logits are in fp32 or bf16, as the run computes;
    /// the loss may be in either.
    fn loss(&self, logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1>;
}

/// A head whose logits another loss is made of. They exist whole from F to B.
pub(crate) struct WithLoss {
    head: Arc<dyn Head>,
    loss: Arc<dyn Loss>,
    vocabulary: usize,
}

impl WithLoss {
    /// `head`, of a model with so many token ids, with `loss`.
    pub(crate) fn new(head: Arc<dyn Head>, loss: Arc<dyn Loss>, vocabulary: usize) -> WithLoss {
        WithLoss { head, loss, vocabulary }
    }
}

impl Head for WithLoss {
    fn name(&self) -> &str {
        self.head.name()
    }

    fn parameters(&self) -> Vec<ParamSpec> {
        self.head.parameters()
    }

    /// # Panics
    /// Panics if the head has no logits.
    fn loss(&self, x: Tensor<3>, targets: Tensor<2, Int>, cx: &LayerCx) -> Tensor<1> {
        let logits = self.head.logits(x, cx).expect("a head with logits");
        let [b, s, v] = logits.dims();
        let loss = self.loss.loss(logits.reshape([b * s, v]), targets.reshape([b * s]));
        // A run's losses, and where its gradients begin, are fp32.
        loss.cast(DType::F32)
    }

    fn logits(&self, x: Tensor<3>, cx: &LayerCx) -> Option<Tensor<3>> {
        self.head.logits(x, cx)
    }

    fn cost(&self, batch: BatchShape) -> LayerCost {
        let cost = self.head.cost(batch);
        let (tokens, bytes) = (batch.tokens() as u64, batch.element_bytes as u64);
        let logits = tokens * self.vocabulary as u64 * bytes;
        // Logits and their probabilities from F to B, the logits' gradient from B to W.
        LayerCost {
            activation_bytes: cost.activation_bytes + 2 * logits,
            activation_bytes_selective: cost.activation_bytes_selective + 2 * logits,
            stash_bytes: cost.stash_bytes + logits,
            gradients_in_forward: false,
            ..cost
        }
    }
}
