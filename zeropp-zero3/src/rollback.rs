//! The exact state before an update that is done before it is known to be right. Going back takes
//! copies, as arithmetic undone loses bits (ADR 58).

use std::sync::Arc;

use burn::tensor::Tensor;
use zeropp_core::meter::{Hold, MemoryKind, Meter};

use crate::layer_state::LayerState;
use crate::words::Words;

/// The start of a layer's update: this rank's part of the parameters and of the gradient.
#[derive(Clone)]
pub(crate) struct UpdateInput {
    pub(crate) param: Tensor<1>,
    pub(crate) grad: Tensor<1>,
}

/// This rank's part of a layer, as it was before an update.
pub(crate) struct LayerBefore {
    /// The stage's place in those of the rank, and the layer's place in the stage.
    pub(crate) at: (usize, usize),
    pub(crate) input: UpdateInput,
    pub(crate) state: StateBefore,
    holds: Vec<Hold>,
}

/// The optimizer's state of a layer before the update.
pub(crate) struct StateBefore {
    words: Vec<Words>,
    ema: Option<Words>,
}

impl LayerBefore {
    /// Keeps these. The tensors are shared, so the next update writes to others.
    pub(crate) fn new(
        at: (usize, usize),
        input: &UpdateInput,
        state: &LayerState,
        meter: &Arc<Meter>,
    ) -> LayerBefore {
        let tensors = [&input.param, &input.grad].into_iter().chain(state.tensors());
        let holds = tensors.map(|t| meter.hold_tensor(MemoryKind::Rollback, t)).collect();
        let state = StateBefore { words: state.words.clone(), ema: state.ema.clone() };
        LayerBefore { at, input: input.clone(), state, holds }
    }

    /// They count as what they were again.
    pub(crate) fn release(&mut self) {
        self.holds.clear();
    }
}

impl StateBefore {
    /// Puts it back.
    pub(crate) fn restore(self, state: &mut LayerState) {
        (state.words, state.ema) = (self.words, self.ema);
    }
}
