//! The trainer: checks everything and starts the ranks.

mod between;
pub(crate) mod builder;
mod costs;
mod epoch;
mod health;
pub(crate) mod recovery;
pub(crate) mod signals;
pub(crate) mod steps;
mod survivors;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use zeropp_comm::Communicator;
use zeropp_core::data::{Dataset, Sampler};
use zeropp_core::device::Devices;
use zeropp_core::layer::{Model, Part};
use zeropp_core::meter::MemoryBytes;
use zeropp_core::metrics::{Evaluation, Plan, StepMetrics, Summary};
use zeropp_core::params::FlatLayout;
use zeropp_pipeline::ir::Schedule;
use zeropp_pipeline::timeline::{RankTimeline, Timeline};
use zeropp_zero3::ParamExport;

use crate::Error;
use crate::checkpoint::described::is_model;
use crate::checkpoint::initial::{self, Initial};
use crate::checkpoint::resume::{self, FoundState, Resumed};
use crate::checkpoint::saved_cut;
use crate::config::{Config, ConfigError, EngineKind};
use crate::own::CustomParts;
use crate::plan::blueprint::Blueprint;
use crate::plan::copies;
use crate::plan::memory::MemoryCheck;
use crate::run::evaluation::EvaluationSet;
use crate::run::rank::{Export, RankResult, StageTimes};
use crate::run::stop::Stopper;
use crate::run::totals::Totals;
use crate::run::trace;
use crate::trainer::builder::TrainerBuilder;
use crate::trainer::steps::Steps;
use crate::world::{World, cores};

/// A checked run, ready to start.
pub struct Trainer {
    pub(crate) blueprint: Arc<Blueprint>,
    pub(crate) data: Arc<(Dataset, Sampler)>,
    pub(crate) found: FoundState,
    /// The weights that the run begins with, unless it goes on.
    pub(crate) initial: Option<Arc<Initial>>,
    pub(crate) stopper: Stopper,
    /// The data of the validation loss.
    pub(crate) evaluation: Option<Arc<EvaluationSet>>,
}

/// The end of a run.
struct TrainingEnd {
    summary: Summary,
    /// The results of this process's ranks; on rank 0's those of all.
    results: Vec<RankResult>,
    /// The blueprint that they were built from: that of the last replicas, where some were lost.
    blueprint: Arc<Blueprint>,
}

/// Final weights by parameter name, each in row-major order.
pub type NamedWeights = BTreeMap<String, Vec<f32>>;

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
    /// A trainer of these settings, to which a program may add what is its own: a model, data, a
    /// loss, an optimizer, a learning rate, a schedule, weights.
    pub fn builder(config: Config) -> TrainerBuilder {
        TrainerBuilder::new(config)
    }

    /// A trainer of what the settings name, and nothing else.
    ///
    /// # Errors
    /// As [`TrainerBuilder::build`].
    pub fn new(config: Config) -> Result<Trainer, Error> {
        Self::builder(config).build()
    }

    fn build(
        config: Config,
        model: Model,
        dataset: Dataset,
        own: CustomParts,
        weights: Option<NamedWeights>,
    ) -> Result<Trainer, Error> {
        let config = saved_cut::take_over(config);
        let mut blueprint = Blueprint::new(&config, model, &own)?;
        blueprint.plan.notes.extend(dataset.doubt());
        let trained_on = blueprint.own.data.is_none().then_some(&dataset);
        let doubt = trained_on.and_then(|dataset| bytes_for_ids(&blueprint, dataset));
        blueprint.plan.notes.extend(doubt);
        let copies = copies::note(&blueprint.needs());
        blueprint.plan.notes.extend(copies);
        blueprint.plan.notes.extend(cores::note(&blueprint.config));
        blueprint.base = initial::base(&blueprint, weights.is_some())?;
        let evaluation = EvaluationSet::new(&blueprint, trained_on)?.map(Arc::new);
        if let Some(set) = &evaluation {
            blueprint.plan.evaluation = blueprint.evaluation_plan(set.batches, set.tokens);
            if blueprint.own.eval_data.is_none() {
                blueprint.plan.notes.extend(notes_of_evaluation(&config, set));
            }
        }
        let blueprint = Arc::new(blueprint);
        let sampler = blueprint.config.sampler();
        let found = resume::find(&blueprint, &dataset)?;
        let initial = match found.resumed {
            Some(_) if blueprint.base.is_none() => None,
            _ => initial::open(&blueprint, weights)?.map(Arc::new),
        };
        let (data, stopper) = (Arc::new((dataset, sampler)), Stopper::default());
        Ok(Trainer { blueprint, data, found, initial, stopper, evaluation })
    }

    /// The shapes of the parameters by name, in the order of which [`NamedWeights`] has their
    /// elements.
    pub fn shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let all = self.blueprint.model.parts.iter().flat_map(Part::parameters);
        all.map(|parameter| (parameter.name, parameter.shape)).collect()
    }

    /// The checkpoint that the run goes on from, if it is a resumed one. Where its step is the
    /// last, nothing is left to do and training ends at once. Its files are read, and checked, by
    /// the ranks as they start; where one is damaged they may take an older one
    /// ([`Steps::resumed`]).
    pub fn resumed(&self) -> Option<&Resumed> {
        self.found.resumed.as_ref()
    }

    /// Stops the runs of this trainer from another thread.
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Whether the run writes checkpoints.
    pub fn saves(&self) -> bool {
        self.blueprint.config.save.is_some()
    }

    /// The facts that are known before the run: mesh, schedule, predicted memory and bubble.
    pub fn plan(&self) -> &Plan {
        &self.blueprint.plan
    }

    /// The predicted need of this machine's ranks beside its memory. Training refuses to
    /// start where that is too little; the plan does not.
    pub fn memory(&self) -> MemoryCheck {
        MemoryCheck::of(&self.blueprint.needs())
    }

    /// The devices of this process's ranks, of which there are enough. The plan takes none.
    ///
    /// # Errors
    /// The part that is missing, and where it was looked for.
    pub(crate) fn devices(&self) -> Result<Devices, Error> {
        let config = &self.blueprint.config;
        let devices = config.devices()?;
        World::check(config, &devices)?;
        Ok(devices)
    }

    /// The lowered schedule that the ranks will run.
    pub fn schedule(&self) -> &Schedule {
        self.blueprint.schedule()
    }

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
    fn check_evaluates(&self) -> Result<(), ConfigError> {
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

    pub(crate) fn summary(&self, totals: &Totals, times: &StageTimes, total_s: f64) -> Summary {
        let plan = &self.blueprint.plan;
        let memory = plan.ranks.iter().map(|rank| &rank.held.peaks);
        let at_once = plan.ranks.iter().map(|rank| rank.held.at_once.total());
        let stages = self.blueprint.stages.len();
        Summary {
            predicted_bubble: plan.bubble,
            timed_bubble: self.blueprint.timed_bubble(times.costs(stages)),
            predicted_bytes: memory.fold(MemoryBytes::default(), |all, one| all.max(one)),
            predicted_at_once_bytes: at_once.max().unwrap_or(0),
            predicted_copy_bytes: copies::predicted(&self.blueprint.needs()),
            total_s,
            ..totals.summary()
        }
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

/// The actions of every rank with their times, of a run of `bp`.
pub(crate) fn timeline(bp: &Blueprint, results: &[RankResult]) -> Timeline {
    let title = match results.iter().map(|r| r.clock_error_ns).max() {
        None | Some(0) => format!("{} · {}", bp.schedule().kind, bp.mesh),
        Some(ns) => {
            let us = ns.div_ceil(1000);
            format!("{} · {} · clocks within {us} µs", bp.schedule().kind, bp.mesh)
        }
    };
    let spans = results.iter().map(|result| result.spans.clone());
    let mut timeline = trace::timeline(title, bp.mesh, &bp.schedule().placement, spans);
    for (rank, result) in timeline.ranks.iter_mut().zip(results) {
        rank.saves = result.saves.clone();
    }
    let programs =
        |rank: &RankTimeline| &bp.programs.of(rank.group / bp.mesh.zero3).ranks[rank.pp][..];
    trace::follow_memory(&mut timeline, programs, &bp.all_bytes());
    timeline.facts = facts(bp);
    timeline
}

/// Puts the pieces of all ranks together and cuts the buffers into parameters.
fn assemble(bp: &Blueprint, results: Vec<RankResult>, pieces: usize) -> NamedWeights {
    let mut found: BTreeMap<(String, bool, usize), Vec<f32>> = BTreeMap::new();
    for export in results.into_iter().flat_map(|r| r.exported) {
        let ParamExport { layer, frozen, shard, values } = export;
        found.insert((layer, frozen, shard), values);
    }
    let mut weights = NamedWeights::new();
    if found.is_empty() {
        return weights;
    }
    for part in &bp.model.parts {
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
                let values = flat[place.offset..][..place.spec.len()].to_vec();
                weights.insert(place.spec.name.clone(), values);
            }
        }
    }
    weights
}

/// Notes on data that is only measured on.
fn notes_of_evaluation(config: &Config, set: &EvaluationSet) -> Vec<String> {
    let data = set.data();
    let own = config.eval_data.is_some() && config.eval_data != config.data;
    let notes = data.doubt().into_iter().chain(data.beside(config.loss_mask)).filter(|_| own);
    notes.map(|note| note.replacen("data =", "eval-data =", 1)).collect()
}

/// Text as bytes for a model whose weights know it as other tokens is hardly what anyone wants.
fn bytes_for_ids(bp: &Blueprint, dataset: &Dataset) -> Option<String> {
    let (knows, init_from) = (bp.model.vocabulary, bp.config.init_from.as_ref()?);
    (is_model(init_from) && dataset.is_bytes() && knows > 256).then(|| {
        format!(
            "data = {}: its tokens are bytes, and the model of init-from = {} knows {knows} ids; \
             turn text into its tokens with zeropp tokenize",
            dataset.origin(),
            init_from.display()
        )
    })
}

/// The facts that a trace has of its run.
fn facts(bp: &Blueprint) -> Vec<String> {
    let (plan, deal) = (&bp.plan, bp.config.deal());
    let batches = match deal.fewer() {
        Some(fewer) => format!("{} or {fewer}", deal.most),
        None => deal.most.to_string(),
    };
    let world = bp.mesh.world();
    let cores = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
    let of_threads = bp.config.engine == EngineKind::Threads;
    let shared = (of_threads && world > cores).then(|| {
        format!("{world} ranks share {cores} cores: what a rank computes takes longer than alone")
    });
    let mut facts = vec![
        format!(
            "{}; {} stages on each rank, {batches} micro-batches in {} units; times measured, \
             memory of activations and weight stashes as predicted",
            bp.mesh,
            plan.virtual_stages,
            bp.schedule().units.len(),
        ),
        format!("zeropp {}", env!("CARGO_PKG_VERSION")),
    ];
    facts.extend(shared);
    facts
}
