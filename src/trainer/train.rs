//! The ways to run a trainer: to the end, step by step, to weights, gradients or a timeline.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use zeropp_comm::Communicator;
use zeropp_core::layer::Part;
use zeropp_core::metrics::{Evaluation, StepMetrics, Summary};
use zeropp_core::params::FlatLayout;
use zeropp_pipeline::timeline::Timeline;
use zeropp_zero3::ParamExport;

use crate::Error;
use crate::config::ConfigError;
use crate::plan::blueprint::Blueprint;
use crate::run::results::RankResult;
use crate::run::shared::Export;
use crate::trainer::steps::Steps;
use crate::trainer::timeline::timeline;
use crate::trainer::{NamedWeights, Trainer};

/// The end of a run.
struct TrainingEnd {
    summary: Summary,
    /// The results of this process's ranks; on rank 0's those of all.
    results: Vec<RankResult>,
    /// The blueprint that they were built from: that of the last replicas, where some were lost.
    blueprint: Arc<Blueprint>,
}

/// The result of a function that is called after each step: `()` to go on, or a [`ControlFlow`], of
/// which `Break` stops the run there.
pub trait StepFlow {
    /// Whether the run goes on.
    fn flow(self) -> ControlFlow<()>;
}

impl StepFlow for () {
    fn flow(self) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

impl StepFlow for ControlFlow<()> {
    fn flow(self) -> ControlFlow<()> {
        self
    }
}

impl Trainer {
    /// Trains; `on_step` sees every step as soon as it is complete, and the next one begins when it
    /// returns: a [`ControlFlow::Break`] ends the run there, saved if it saves. A panic in it ends
    /// all ranks, too. Where the ranks are in several processes, each process trains its own,
    /// `on_step` is called in rank 0's process alone, which also writes the metrics and the trace,
    /// and the summary is every process's.
    ///
    /// # Errors
    /// The first rank that failed, with what it was doing; gradients that stay not finite
    /// ([`Error::NotFinite`]). Before the first step: a folder of checkpoints that cannot be
    /// written, or that another run uses; a checkpoint that is damaged.
    pub fn train<F: StepFlow>(
        &self,
        mut on_step: impl FnMut(&StepMetrics) -> F,
    ) -> Result<Summary, Error> {
        self.run(on_rank_0(&mut on_step), Export::Nothing).map(|end| end.summary)
    }

    /// Starts the ranks; the iterator gives every step of the run as soon as it is complete, and
    /// the next one begins when it is asked for. Dropping it ends the ranks, saved if the run
    /// saves.
    ///
    /// # Errors
    /// As [`train`](Self::train), as far as known before the first step.
    pub fn steps(&self) -> Result<Steps<'_>, Error> {
        Steps::start(self, None, Export::Nothing)
    }

    /// Trains over communicators of your own: those of all ranks of the mesh that this process
    /// runs, in the order of their ranks. The setting `engine` is not looked at.
    ///
    /// # Errors
    /// As [`train`](Self::train); a rank fails where its communicator's world is not the mesh's.
    pub fn train_over<F: StepFlow>(
        &self,
        communicators: Vec<Arc<dyn Communicator>>,
        mut on_step: impl FnMut(&StepMetrics) -> F,
    ) -> Result<Summary, Error> {
        let on_step = on_rank_0(&mut on_step);
        Ok(self.run_over(Some(communicators), on_step, Export::Nothing)?.summary)
    }

    /// Trains and returns the final weights as well, whole, for models that fit in one memory. Of
    /// several processes rank 0's has them; the others return none.
    ///
    /// # Errors
    /// As [`train`](Self::train).
    pub fn train_to_weights<F: StepFlow>(
        &self,
        mut on_step: impl FnMut(&StepMetrics) -> F,
    ) -> Result<(Summary, NamedWeights), Error> {
        let end = self.run(on_rank_0(&mut on_step), Export::Weights)?;
        let weights = assemble(&end.blueprint, end.results, self.blueprint.mesh.zero3);
        Ok((end.summary, weights))
    }

    /// Runs one step and returns its figures and the whole batch's gradients, before clipping, by
    /// parameter name: for checking a model against another implementation. Of several processes
    /// rank 0's has the gradients.
    ///
    /// # Errors
    /// As [`train`](Self::train).
    pub fn first_gradients(&self) -> Result<(StepMetrics, NamedWeights), Error> {
        let mut metrics = StepMetrics::default();
        let on_step = |m: &StepMetrics, _| {
            metrics = m.clone();
            ControlFlow::Continue(())
        };
        let TrainingEnd { blueprint, results, .. } = self.run(on_step, Export::Gradients)?;
        let owners = if self.blueprint.config.zero1 { self.blueprint.mesh.dp } else { 1 };
        Ok((metrics, assemble(&blueprint, results, blueprint.mesh.zero3 * owners)))
    }

    /// The loss, on the validation data of the settings, of the weights that the run begins with or
    /// goes on from: nothing is trained, and nothing written. Every process has it.
    ///
    /// # Errors
    /// As [`train`](Self::train); settings that ask for no validation loss.
    pub fn evaluate(&self) -> Result<Evaluation, Error> {
        self.check_evaluates()?;
        Steps::start(self, None, Export::Evaluation)?.evaluation()
    }

    /// Refuses to measure where there is nothing to measure on.
    pub(super) fn check_evaluates(&self) -> Result<(), ConfigError> {
        match self.evaluation {
            Some(_) => Ok(()),
            None => {
                let help = "use 1 or more, and name the data with eval-data or split, or give \
                            samples of the program's own to its builder";
                Err(ConfigError::value("eval-every", 0, "nothing is measured", help))
            }
        }
    }

    /// Trains and returns what every rank did when, in the first few steps: one span an action.
    /// Of several processes rank 0's has all ranks, with times by its clock; the title says how
    /// far the others' may be from it. The others return a timeline without ranks.
    ///
    /// # Errors
    /// As [`train`](Self::train).
    pub fn train_to_timeline<F: StepFlow>(
        &self,
        mut on_step: impl FnMut(&StepMetrics) -> F,
    ) -> Result<(Summary, Timeline), Error> {
        let end = self.run(on_rank_0(&mut on_step), Export::Timeline)?;
        Ok((end.summary, timeline(&end.blueprint, &end.results)))
    }

    /// Runs this process's ranks; `on_step` also hears whether rank 0 is one of them.
    fn run(
        &self,
        on_step: impl FnMut(&StepMetrics, bool) -> ControlFlow<()>,
        export: Export,
    ) -> Result<TrainingEnd, Error> {
        self.run_over(None, on_step, export)
    }

    /// Runs over a given world, or over one that is started with the engine of the settings.
    fn run_over(
        &self,
        given: Option<Vec<Arc<dyn Communicator>>>,
        mut on_step: impl FnMut(&StepMetrics, bool) -> ControlFlow<()>,
        export: Export,
    ) -> Result<TrainingEnd, Error> {
        let mut steps = Steps::start(self, given, export)?;
        while let Some(metrics) = steps.next_step() {
            if on_step(&metrics, steps.has_rank_0()).is_break() {
                steps.stop();
            }
        }
        let (summary, results) = steps.conclude()?;
        Ok(TrainingEnd { summary, results, blueprint: steps.blueprint().clone() })
    }
}

/// For a run that only rank 0's process shows.
fn on_rank_0<F: StepFlow>(
    on_step: &mut impl FnMut(&StepMetrics) -> F,
) -> impl FnMut(&StepMetrics, bool) -> ControlFlow<()> {
    |metrics, is_rank_0| {
        if is_rank_0 { on_step(metrics).flow() } else { ControlFlow::Continue(()) }
    }
}

/// Puts the pieces of all ranks together and cuts the buffers into parameters.
pub(super) fn assemble(bp: &Blueprint, results: Vec<RankResult>, pieces: usize) -> NamedWeights {
    let mut found: BTreeMap<(String, bool, usize), Vec<f32>> = BTreeMap::new();
    for export in results.into_iter().flat_map(|r| r.exported) {
        let ParamExport { layer, frozen, shard, values } = export;
        found.insert((layer, frozen, shard), values);
    }
    let mut weights = NamedWeights::new();
    if found.is_empty() {
        return weights;
    }
    let whole = bp.model.parts.len() - usize::from(bp.head.is_some());
    let slices = bp.head.iter().flat_map(|head| head.slices.iter().flatten());
    let slices = slices.map(|slice| Part::Slice(slice.clone()));
    for part in bp.model.parts[..whole].iter().cloned().chain(slices) {
        let layouts = [FlatLayout::trained, FlatLayout::frozen];
        for (layout, frozen) in layouts.into_iter().zip([false, true]) {
            let layout = layout(part.parameters(), bp.layout_pieces());
            let key = |i| (part.name().to_string(), frozen, i);
            // What does not train has no gradient.
            if !found.contains_key(&key(0)) {
                continue;
            }
            let piece = |i| found.remove(&key(i)).expect("every piece");
            let flat: Vec<f32> = (0..pieces).flat_map(piece).collect();
            for place in &layout.params {
                let spec = &place.spec;
                let all = spec.whole_shape().iter().product();
                let values = weights.entry(spec.name.clone()).or_insert_with(|| vec![0.0; all]);
                values[spec.first_element()..][..spec.len()]
                    .copy_from_slice(&flat[place.offset..][..spec.len()]);
            }
        }
    }
    weights
}
