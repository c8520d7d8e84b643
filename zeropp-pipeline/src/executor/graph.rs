//! The graph of one stage and micro-batch between F (or R) and B.

use burn::tensor::Tensor;
use zeropp_core::split::{Recorded, Recording, Saved};

/// The output of a stage.
pub(super) enum StageOutput {
    /// `[b, s, h]`.
    Hidden(Tensor<3>),
    /// Of the last stage: `[1]`.
    Loss(Tensor<1>),
}

/// The part of a forward that B needs, besides what operations keep.
pub(super) struct Graph {
    input: Option<Saved<3>>,
    recorded: RecordedStage,
}

enum RecordedStage {
    Hidden(Recorded<3, 3>),
    Loss(Recorded<3, 1>),
}

impl Graph {
    /// Ends a recording of a forward of `input`; the output is given back plain.
    pub(super) fn new(
        recording: Recording<3>,
        input: Option<Saved<3>>,
        output: StageOutput,
    ) -> (Graph, StageOutput) {
        let (recorded, plain) = match output {
            StageOutput::Hidden(y) => {
                let (y, recorded) = recording.finish(y);
                (RecordedStage::Hidden(recorded), StageOutput::Hidden(y))
            }
            StageOutput::Loss(loss) => {
                let (loss, recorded) = recording.finish(loss);
                (RecordedStage::Loss(recorded), StageOutput::Loss(loss))
            }
        };
        (Graph { input, recorded }, plain)
    }

    /// Walks back from dY, or from the gradient that the loss is given: dX of stages with an input.
    pub(super) fn backward(
        self,
        dy: Option<Tensor<3>>,
        loss_gradient: impl FnOnce() -> Tensor<1>,
    ) -> Option<Tensor<3>> {
        let Graph { input, recorded } = self;
        let has_input = input.is_some();
        // From here on it is there as long as the first operation keeps it.
        drop(input);
        let dx = match recorded {
            RecordedStage::Hidden(recorded) => {
                recorded.backward(dy.expect("every stage but the last receives a gradient"))
            }
            RecordedStage::Loss(recorded) => recorded.backward(loss_gradient()),
        };
        assert_eq!(dx.is_some(), has_input, "an output depends on its stage's input");
        dx
    }
}
