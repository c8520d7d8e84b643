//! W that run layer by layer, each layer's reduction behind them; F that wait for each layer as
//! they come to it.

use super::flight::{Flight, RunByLayer, RunningOperation};
use super::{Executor, LayerWaits, Worker};
use crate::ir::{Action, LayerRun, first_forward};

impl<W: Worker> Executor<W> {
    /// Starts a gather.
    pub(super) fn gather(&mut self, f: &mut Flight, stage: usize, span: usize) {
        self.worker.start_gather(stage);
        f.sent_bytes += self.worker.gather_bytes(stage);
        f.gathers.insert(stage, span);
        f.running.push((RunningOperation::Gather(stage), span));
        // A split head's messages are passed on while the rank waits, and not inside of an F.
        let has_layers = self.head.is_none() && self.worker.layers(stage) > 1;
        if has_layers && let Some(first) = first_forward(&self.program, span) {
            f.by_layer.insert((stage, first));
        }
    }

    /// The waits of an F for each layer, from now on the worker's.
    pub(super) fn wait_by_layer(&mut self) {
        self.worker.wait_by_layer(LayerWaits::new(&self.status, self.world_rank));
    }

    /// The F at `span` has waited for the layers: it is told as one that waits before it begins.
    pub(super) fn has_waited(&mut self, f: &mut Flight, stage: usize, span: usize) {
        let Some(waits) = self.worker.take_waits() else { return };
        let (waited_ns, end) = waits.ended();
        f.spans[span].start_ns += waited_ns;
        if let Some(gather) = f.gathers.remove(&stage) {
            f.end_running(gather, end.saturating_duration_since(self.epoch).as_nanos() as u64);
        }
    }

    /// Where the action at `at` is a W that runs layer by layer with those behind it, runs all of
    /// them, or says when it has run. None where it is none.
    pub(super) fn run_by_layer(&mut self, f: &mut Flight, at: usize) -> Option<(u64, u64)> {
        if f.run.is_none() {
            let run = LayerRun::at(&self.program, at)?;
            self.status.set_computing(self.world_rank, true);
            f.run = Some(self.run_layers(f, run, at));
            self.status.set_computing(self.world_rank, false);
        }
        let run = f.run.as_mut()?;
        let end = run.ends.pop_front()?;
        Some((std::mem::replace(&mut run.start, end), end))
    }

    fn run_layers(&mut self, f: &Flight, run: LayerRun, at: usize) -> RunByLayer {
        let LayerRun { stage, count, sums } = run;
        let batches: Vec<usize> =
            self.program[at..at + count].iter().filter_map(Action::micro_batch).collect();
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
            // Sums of layers that are reduced by now begin, those of the stage before first.
            if f.reduces.iter().all(|(before, _)| self.worker.is_reduced(*before)) {
                self.worker.is_reduced(stage);
            }
        }
        // The whole time is told as that of the W, each with its share.
        let (whole, computed) = (self.now() - start, took.iter().sum::<u64>().max(1));
        let ends = took.iter().scan(0, |sum, took| {
            *sum += took;
            Some(start + (u128::from(whole) * u128::from(*sum) / u128::from(computed)) as u64)
        });
        let ends = ends.collect();
        RunByLayer { ends, start, reduced_from: reduced_from.unwrap_or(start), sums }
    }
}
