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
mod timeline;
pub(crate) mod train;

use std::collections::BTreeMap;
use std::sync::Arc;

use zeropp_core::data::{Dataset, Sampler};
use zeropp_core::device::Devices;
use zeropp_core::layer::{Model, Part};
use zeropp_core::meter::MemoryBytes;
use zeropp_core::metrics::{Plan, Summary};
use zeropp_core::split::ops::products::made_by;
use zeropp_pipeline::ir::Schedule;

use crate::Error;
use crate::checkpoint::described::is_model;
use crate::checkpoint::initial::{self, Initial};
use crate::checkpoint::resume::{self, FoundState, Resumed};
use crate::checkpoint::saved_cut;
use crate::config::Config;
use crate::own::CustomParts;
use crate::plan::blueprint::Blueprint;
use crate::plan::copies;
use crate::plan::memory::MemoryCheck;
use crate::plan::recompute;
use crate::run::evaluation::EvaluationSet;
use crate::run::figures::StageTimes;
use crate::run::stop::Stopper;
use crate::run::totals::Totals;
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

/// Final weights by parameter name, each in row-major order.
pub type NamedWeights = BTreeMap<String, Vec<f32>>;

impl Trainer {
    fn build(
        config: Config,
        model: Model,
        dataset: Dataset,
        own: CustomParts,
        weights: Option<NamedWeights>,
    ) -> Result<Trainer, Error> {
        let config = saved_cut::take_over(config);
        let mut blueprint = recompute::planned(&config, model, &own)?;
        blueprint.plan.notes.extend(dataset.doubt());
        let trained_on = blueprint.own.data.is_none().then_some(&dataset);
        let doubt = trained_on.and_then(|dataset| bytes_for_ids(&blueprint, dataset));
        blueprint.plan.notes.extend(doubt);
        let copies = copies::note(&blueprint.needs());
        blueprint.plan.notes.extend(copies);
        blueprint.plan.notes.extend(cores::note(&blueprint.config));
        let products = made_by(config.device).map(|by| format!("products of matrices: {by}"));
        blueprint.plan.notes.extend(products);
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
    /// ([`Steps::resumed`](crate::Steps::resumed)).
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

    /// The highest peak of each kind that is predicted of a rank, and the most at once.
    pub(crate) fn predicted(&self) -> (MemoryBytes, u64) {
        let all = || self.blueprint.plan.ranks.iter().map(|rank| &rank.held);
        let peaks = all().fold(MemoryBytes::default(), |most, held| most.max(&held.peaks));
        (peaks, all().map(|held| held.at_once.total()).max().unwrap_or(0))
    }

    pub(crate) fn summary(&self, totals: &Totals, times: &StageTimes, total_s: f64) -> Summary {
        let plan = &self.blueprint.plan;
        let (predicted_bytes, predicted_at_once_bytes) = self.predicted();
        let split = usize::from(self.blueprint.head.is_some());
        let stages = self.blueprint.stages.len() + split;
        Summary {
            predicted_bubble: plan.bubble,
            timed_bubble: self.blueprint.timed_bubble(times.costs(stages)),
            predicted_bytes,
            predicted_at_once_bytes,
            predicted_copy_bytes: copies::predicted(&self.blueprint.needs()),
            total_s,
            ..totals.summary()
        }
    }
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
