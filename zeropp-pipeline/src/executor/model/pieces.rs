//! Forwards that keep what B needs: of whole stages, and of pieces of those that are done again.

use std::ops::Range;

use zeropp_core::split::{Recording, Saved};

use super::super::error::StepError;
use super::super::graph::{Graph, StageOutput};
use super::ModelWorker;

impl ModelWorker {
    /// Builds the graph of a piece of one stage and micro-batch from its plain input.
    pub(super) fn build(
        &mut self,
        stage: usize,
        micro_batch: usize,
        piece: Range<usize>,
        input: Option<Saved<3>>,
        output_wanted: bool,
    ) -> Result<StageOutput, StepError> {
        let queue = self.queues.entry((stage, micro_batch)).or_default().clone();
        let is_last = piece.end == self.stages[&stage].parts.len();
        let forward_grads = if is_last { self.forward_grads(stage, micro_batch) } else { None };
        let x = input.as_ref().map(Saved::get);
        let by = self.stages[&stage].recorded_by;
        let recording = Recording::start(x, self.gradients_on(), by);
        let op = self.op_cx(stage, micro_batch, queue, forward_grads, recording.token())?;
        let x = recording.input();
        let output = self.run_layers(stage, micro_batch, piece.clone(), x, &op, output_wanted)?;
        let (graph, plain) = Graph::new(recording, input, output, piece);
        self.graphs.insert((stage, micro_batch), graph);
        Ok(plain)
    }

    /// Runs the stage and keeps the inputs of its pieces alone.
    pub(super) fn forward_in_pieces(
        &mut self,
        at: (usize, usize),
        input: Option<Saved<3>>,
    ) -> Result<StageOutput, StepError> {
        let op = self.untracked(at.0, at.1)?;
        let mut x = input.as_ref().map(Saved::get);
        let mut inputs = vec![input];
        let pieces = self.stages[&at.0].pieces.clone();
        let last = pieces.len() - 1;
        for piece in &pieces[..last] {
            let output = self.run_layers(at.0, at.1, piece.clone(), x, &op, true)?;
            let StageOutput::Hidden(y) = output else {
                unreachable!("the head is in the last piece");
            };
            inputs.push(Some(self.keep(at, y.clone())));
            x = Some(y);
        }
        self.inputs.insert(at, inputs);
        self.run_layers(at.0, at.1, pieces[last].clone(), x, &op, true)
    }

    /// Redoes the last piece of a stage that is not yet redone, if there is one. Its output is not
    /// wanted.
    pub(super) fn redo(&mut self, at: (usize, usize)) -> Result<bool, StepError> {
        let Some(inputs) = self.inputs.get_mut(&at) else { return Ok(false) };
        let input = inputs.pop().expect("emptied ones are removed");
        let left = inputs.len();
        if left == 0 {
            self.inputs.remove(&at);
        }
        let piece = self.stages[&at.0].pieces[left].clone();
        // Its forward's outputs were seen.
        let watched = self.watched.take();
        let built = self.build(at.0, at.1, piece, input, false);
        self.watched = watched;
        built.map(|_| true)
    }
}
