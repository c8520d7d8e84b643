//! A trainer from its settings and from what a program brings of its own.

use std::sync::Arc;

use zeropp_core::layer::{Head, Model, Part};
use zeropp_core::model;
use zeropp_pipeline::ir::Schedule;
use zeropp_zero3::rule::UpdateRule;

use crate::Error;
use crate::config::Config;
use crate::own::CustomParts;
use crate::own::loss::{Loss, WithLoss};
use crate::own::samples::{Samples, stand_in};
use crate::plan::mask_check::{self, Owns};
use crate::plan::{hints, model_check};
use crate::trainer::{NamedWeights, Trainer};

/// The parts of a [`Trainer`]: [`Trainer::builder`].
///
/// A part that is not given is as the settings say. Where the ranks are in several processes, each
/// gives the same; that is for the program to see to, which no setting describes.
pub struct TrainerBuilder {
    config: Config,
    model: Option<Model>,
    loss: Option<Arc<dyn Loss>>,
    weights: Option<NamedWeights>,
    own: CustomParts,
    predicts: bool,
}

impl TrainerBuilder {
    fn new(config: Config) -> TrainerBuilder {
        let (own, predicts) = (CustomParts::default(), false);
        TrainerBuilder { config, model: None, loss: None, weights: None, own, predicts }
    }

    /// Makes a trainer for what is predicted alone: the build may lack the device or the engine,
    /// and the notes of [`Trainer::plan`] say which stages and kind of schedule would do better.
    pub fn for_prediction(self) -> Self {
        Self { predicts: true, ..self }
    }

    /// Trains this model. Settings of a model that it does not use (`heads`, say) are ignored.
    /// `hidden` and `layers` (the number of its blocks) must say what it has, and `seq` what it can
    /// take.
    pub fn model(self, model: Model) -> Self {
        Self { model: Some(model), ..self }
    }

    /// Trains on these samples, and not on the data of the settings.
    pub fn data(self, data: impl Samples) -> Self {
        Self { own: CustomParts { data: Some(Arc::new(data)), ..self.own }, ..self }
    }

    /// Measures the validation loss on the first of these samples, `eval-steps` batches of them,
    /// and not on the data of the settings: every `eval-every` steps, and where the program asks
    /// ([`Steps::evaluate`](crate::Steps::evaluate)).
    pub fn eval_data(self, data: impl Samples) -> Self {
        Self { own: CustomParts { eval_data: Some(Arc::new(data)), ..self.own }, ..self }
    }

    /// Runs this schedule, and not the one of `schedule`, as if it stood in a file: one that ends
    /// without updates gets gathers, reductions and messages, and every one is verified. Its sizes
    /// are the run's: `virtual`, `micro-batches` and `unit` may be left out. Settings and messages
    /// call it by its kind, as in `mine.json`.
    pub fn schedule(self, schedule: Schedule) -> Self {
        Self { own: CustomParts { schedule: Some(Arc::new(schedule)), ..self.own }, ..self }
    }

    /// Trains by this loss of the logits, and not by that of the model's head, which has to have
    /// logits. They are whole, and B does all of the head's backward but that of its weight.
    pub fn loss(self, loss: impl Loss) -> Self {
        Self { loss: Some(Arc::new(loss)), ..self }
    }

    /// Updates weights by this rule, and not by `optimizer`.
    pub fn optimizer(self, rule: impl UpdateRule) -> Self {
        Self { own: CustomParts { rule: Some(Arc::new(rule)), ..self.own }, ..self }
    }

    /// The learning rate of each step, counted from 1, in place of `lr`, `warmup` and `decay`.
    pub fn learning_rate(self, rate: impl Fn(u64) -> f64 + Send + Sync + 'static) -> Self {
        Self { own: CustomParts { rate: Some(Arc::new(rate)), ..self.own }, ..self }
    }

    /// Begins with these weights, by parameter name and in row-major order of its shape
    /// ([`Trainer::shapes`]), and not with those of the seed or of `init-from`.
    pub fn weights(self, weights: NamedWeights) -> Self {
        Self { weights: Some(weights), ..self }
    }

    /// Checks everything; starts nothing. Reads the data and the checkpoint to resume from.
    ///
    /// # Errors
    /// Whatever is wrong with the settings, the data, the schedule or the checkpoint, naming field
    /// and value; a model that contradicts the settings or the data, or whose parameter names are
    /// not unique; weights that are not the model's.
    pub fn build(self) -> Result<Trainer, Error> {
        let TrainerBuilder { config, model, loss, weights, own, predicts } = self;
        let config = match &own.schedule {
            Some(schedule) => Config { schedule: format!("{}.json", schedule.kind), ..config },
            None => config,
        };
        match predicts {
            true => config.validate_for_prediction()?,
            false => config.validate()?,
        }
        let data = match &own.data {
            Some(samples) => stand_in(&**samples)?,
            None => config.dataset()?,
        };
        let mut notes = Vec::new();
        let model = match model {
            Some(model) => {
                model_check::check(&config, &model, &data)?;
                model_check::check_tuning(&config)?;
                model
            }
            None => {
                notes = config.model_notes()?;
                let decoder = config.decoder(config.known_ids(&data)?)?;
                model::build_tuned(decoder, &config.tuning(&decoder)?)
            }
        };
        mask_check::check(
            &config,
            &data,
            Owns { samples: own.data.is_some(), loss: loss.is_some() },
        )?;
        if own.data.is_none() {
            if config.eval_part.is_none() {
                data.require_scored(config.hidden_of_samples())?;
            }
            notes.extend(data.beside(config.loss_mask));
        }
        let own = CustomParts { masks_nothing: loss.is_some(), ..own };
        let model = match loss {
            Some(loss) => with_loss(model, &loss),
            None => model,
        };
        let mut trainer = Trainer::build(config, model, data, own, weights)?;
        let blueprint = Arc::get_mut(&mut trainer.blueprint).expect("just made");
        blueprint.plan.notes.extend(notes);
        let hint = predicts.then(|| hints::note(blueprint)).flatten();
        blueprint.plan.notes.extend(hint);
        Ok(trainer)
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
}

/// `model` with this loss of its head's logits.
fn with_loss(model: Model, loss: &Arc<dyn Loss>) -> Model {
    let vocabulary = model.vocabulary;
    let of = |part: Part| match part {
        Part::Head(head) => {
            let head: Arc<dyn Head> = Arc::new(WithLoss::new(head, loss.clone(), vocabulary));
            Part::Head(head)
        }
        other => other,
    };
    Model { parts: model.parts.into_iter().map(of).collect(), ..model }
}
