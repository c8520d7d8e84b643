//! W that run layer by layer, or a backward with its W, each layer's reduction behind them; F that
//! wait for each layer as they come to it.

use std::time::Instant;

use burn::tensor::Tensor;

use super::error::StepError;
use super::flight::{Flight, RunByLayer, RunningOperation};
use super::{ComputeOutput, Executor, LayerWaits, Worker};
use crate::ir::{Action, Compute, LayerRun, first_forward};

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
            let run = LayerRun::at(&self.program, at).filter(|run| !run.backward)?;
            self.status.set_computing(self.world_rank, true);
            let mut progress = self.begin_layers(f, run, at);
            for layer in (0..self.worker.layers(run.stage)).rev() {
                progress.passed(&mut self.worker, layer);
            }
            f.run = Some(progress.ended());
            self.status.set_computing(self.world_rank, false);
        }
        f.run.as_mut()?.told()
    }

    /// The run of a backward and its W, layer by layer, that the action at `at` begins.
    pub(super) fn backward_by_layer(&self, at: usize) -> Option<LayerRun> {
        let run = LayerRun::at(&self.program, at).filter(|run| run.backward)?;
        // A split head's messages are passed on between a B and its W.
        (self.head.is_none() && self.worker.layers(run.stage) > 1).then_some(run)
    }

    /// Runs it, from the gradient `dy`: what its B gives.
    pub(super) fn run_backward(
        &mut self,
        f: &mut Flight,
        run: LayerRun,
        at: usize,
        dy: Option<Tensor<1>>,
    ) -> Result<ComputeOutput, StepError> {
        let mut progress = self.begin_layers(f, run, at);
        let micro_batch = progress.micro_batches[0];
        let dx =
            self.worker.backward_by_layer(run.stage, micro_batch, dy, &mut |worker, layer| {
                progress.passed(worker, layer);
            })?;
        f.run = Some(progress.ended());
        Ok(dx.map_or(ComputeOutput::Nothing, ComputeOutput::Message))
    }

    /// When a compute ended that has just been run: of a backward with its W, as it is told.
    pub(super) fn has_computed(&self, f: &mut Flight) -> u64 {
        let told = f.run.as_mut().and_then(RunByLayer::told);
        told.map_or_else(|| self.now(), |(_, end)| end)
    }

    fn begin_layers(&mut self, f: &Flight, run: LayerRun, at: usize) -> LayersProgress {
        let adds = |action: &&Action| !matches!(action, Action::Compute { kind: Compute::B, .. });
        let computes = || run.computes(&self.program, at);
        let mut progress = LayersProgress {
            micro_batches: computes().filter(adds).filter_map(Action::micro_batch).collect(),
            took: vec![0; computes().count()],
            run,
            before: f.reduces.iter().map(|(stage, _)| *stage).collect(),
            epoch: self.epoch,
            start: self.now(),
            from: 0,
            reduced_from: None,
        };
        self.worker.begin_reduce(run.stage, progress.micro_batches[0]);
        if run.sums {
            self.worker.request_replica_reduce(run.stage);
        }
        progress.from = self.now();
        progress
    }
}

/// Computes that run layer by layer, on their way.
struct LayersProgress {
    run: LayerRun,
    /// Of their W.
    micro_batches: Vec<usize>,
    /// Stages whose reductions are under way from before.
    before: Vec<usize>,
    epoch: Instant,
    start: u64,
    /// When what is not counted yet began.
    from: u64,
    /// How long each compute took so far.
    took: Vec<u64>,
    reduced_from: Option<u64>,
}

impl LayersProgress {
    fn count(&mut self, compute: usize) {
        let now = self.epoch.elapsed().as_nanos() as u64;
        self.took[compute] += now - std::mem::replace(&mut self.from, now);
    }

    /// Runs the W of a layer, past which a backward has come, and starts its reduction.
    fn passed<W: Worker>(&mut self, worker: &mut W, layer: usize) {
        let stage = self.run.stage;
        // A BW is one compute with its W.
        let first = usize::from(self.run.backward && self.took.len() > 1);
        if self.run.backward {
            self.count(0);
        }
        for at in 0..self.micro_batches.len() {
            worker.weight_of_layer(stage, self.micro_batches[at], layer);
            self.count(first + at);
        }
        self.reduced_from.get_or_insert(self.from);
        worker.start_reduce_layer(stage, layer);
        // Sums of layers that are reduced by now begin, those of the stage before first.
        if self.before.iter().all(|before| worker.is_reduced(*before)) {
            worker.is_reduced(stage);
        }
        self.from = self.epoch.elapsed().as_nanos() as u64;
    }

    /// The whole time is told as that of the computes, each with its share.
    fn ended(self) -> RunByLayer {
        let Self { run, took, start, from, reduced_from, .. } = self;
        let (whole, computed) = (from - start, took.iter().sum::<u64>().max(1));
        let ends = took.iter().scan(0, |sum, took| {
            *sum += took;
            Some(start + (u128::from(whole) * u128::from(*sum) / u128::from(computed)) as u64)
        });
        let ends = ends.collect();
        RunByLayer { ends, start, reduced_from: reduced_from.unwrap_or(start), sums: run.sums }
    }
}
