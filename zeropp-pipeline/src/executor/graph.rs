//! The graph of one stage and micro-batch between F (or R) and B.

use std::ops::Range;

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
    /// The places of its layers in the stage.
    layers: Range<usize>,
}

enum RecordedStage {
    Hidden(Recorded<3, 3>),
    Loss(Recorded<3, 1>),
}

impl Graph {
    /// Ends a recording of a forward of `input` through these layers; the output is given back
    /// plain.
    pub(super) fn new(
        recording: Recording<3>,
        input: Option<Saved<3>>,
        output: StageOutput,
        layers: Range<usize>,
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
        (Graph { input, recorded, layers }, plain)
    }

    /// Walks back from dY, or from the gradient that the loss is given: dX of stages with an input.
    /// `passed` is told each layer, by its place in the stage, from the last to the first, as the
    /// walk has come past it; of what is in Burn's graph, when that has been walked.
    pub(super) fn backward(
        self,
        dy: Option<Tensor<3>>,
        loss_gradient: impl FnOnce() -> Tensor<1>,
        mut passed: impl FnMut(usize),
    ) -> Option<Tensor<3>> {
        let Graph { input, recorded, layers } = self;
        let has_input = input.is_some();
        // From here on it is there as long as the first operation keeps it.
        drop(input);
        let mut left = layers.clone();
        let mut on_tape = |layer: usize| {
            left.end = layers.start + layer;
            passed(left.end);
        };
        let dx = match recorded {
            RecordedStage::Hidden(recorded) => {
                let dy = dy.expect("every stage but the last receives a gradient");
                recorded.backward_by_layer(dy, &mut on_tape)
            }
            RecordedStage::Loss(recorded) => {
                recorded.backward_by_layer(loss_gradient(), &mut on_tape)
            }
        };
        left.rev().for_each(passed);
        assert_eq!(dx.is_some(), has_input, "an output depends on its stage's input");
        dx
    }
}
