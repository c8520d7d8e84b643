//! W that run layer by layer, each layer's reduction behind them.

use super::flight::{Flight, LayerRun};
use super::{Executor, StepError, Worker};
use crate::ir::{Action, layer_run};

impl<W: Worker> Executor<W> {
    /// Where the action at `at` is a W that runs layer by layer with those behind it, runs all of
    /// them, or says when it has run. None where it is none.
    pub(super) fn run_by_layer(
        &mut self,
        f: &mut Flight,
        at: usize,
    ) -> Result<Option<(u64, u64)>, StepError> {
        if f.run.is_none() {
            let Some((stage, count)) = layer_run(&self.program, at) else { return Ok(None) };
            // One reduction at a time.
            self.retire_reduces(f)?;
            self.status.set_computing(self.world_rank, true);
            let run = self.run_layers(stage, at, count);
            self.status.set_computing(self.world_rank, false);
            f.run = Some(run);
        }
        let Some(run) = &mut f.run else { return Ok(None) };
        let Some(end) = run.ends.pop_front() else { return Ok(None) };
        Ok(Some((std::mem::replace(&mut run.start, end), end)))
    }

    fn run_layers(&mut self, stage: usize, at: usize, count: usize) -> LayerRun {
        let batches: Vec<usize> =
            self.program[at..at + count].iter().filter_map(Action::micro_batch).collect();
        let sums = self.program.get(at + count + 1) == Some(&Action::ReplicaReduce { stage });
        let start = self.now();
        self.worker.begin_reduce(stage, batches[0]);
        if sums {
            self.worker.request_replica_reduce(stage);
        }
        let mut took = vec![0; count];
        let mut reduced_from = None;
        for layer in (0..self.worker.layers(stage)).rev() {
            for (micro_batch, took) in batches.iter().zip(&mut took) {
                let begin = self.now();
                self.worker.weight_of_layer(stage, *micro_batch, layer);
                *took += self.now() - begin;
            }
            reduced_from.get_or_insert(self.now());
            self.worker.start_reduce_layer(stage, layer);
            // Sums of layers that are reduced by now begin.
            self.worker.is_reduced(stage);
        }
        let mut ends = took.iter().scan(start, |end, took| {
            *end += took;
            Some(*end)
        });
        let ends = ends.by_ref().collect();
        LayerRun { ends, start, reduced_from: reduced_from.unwrap_or(start), sums }
    }
}
