//! Writing text with a trained model: one rank, in fp32 on the CPU, with the keys and values of
//! all tokens kept.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use zeropp_core::layer::{Model, Part};
use zeropp_core::model::{self, Whole, hf_config};
use zeropp_core::sampling::Sampling;

use crate::Error;
use crate::checkpoint::described::belongings_of;
use crate::checkpoint::initial;
use crate::config::{Config, ConfigError, is_gguf};
use crate::error::RankError;
use crate::trainer::{NamedWeights, Trainer};

/// A model that writes.
pub struct Generator {
    whole: Whole,
    vocabulary: usize,
    /// Tokens of the longest text it can go on with.
    longest: usize,
    /// Tokens that end a text.
    ends: Vec<u32>,
}

impl Generator {
    /// The model that `config` describes with the weights that its `init-from` names: see
    /// [`config_of`](crate::config_of).
    ///
    /// # Errors
    /// Settings that name no model or no weights, and weights that are not the model's.
    pub fn new(config: &Config) -> Result<Generator, Error> {
        let missing = |field: &str, help: &str| {
            Error::from(ConfigError::value(field, "nothing", "a text needs it", help))
        };
        let known = config.vocab.ok_or_else(|| missing("vocab", "give the model's"))?;
        let path = config.init_from.as_ref();
        let path = path.ok_or_else(|| missing("init-from", "name the model's weights"))?;
        let decoder = config.decoder(known)?;
        let model = model::build_tuned(decoder, &config.tuning(&decoder)?);
        let weights = initial::open_for(path, &model, config.init_ema, config.seed)?;
        let mut whole = None;
        let read = weights.read(&mut |read| {
            whole = Some(Whole::new(&model, |name, _, out| read(name, 0, out))?);
            Ok(())
        });
        read.map_err(|error| match error {
            RankError::Checkpoint(error) => error.into(),
            error => Error::Export {
                path: path.clone(),
                problem: error.to_string(),
                help: "restore it, or name another".into(),
            },
        })?;
        Self::of(&model, whole.expect("read above"), belongings_of(path, config))
    }

    /// The model that `trainer` trains, with these weights of all its parameters, as
    /// [`Steps::weights`](crate::Steps::weights) gives them.
    ///
    /// # Errors
    /// Weights that are not the model's.
    pub fn with_weights(trainer: &Trainer, weights: &NamedWeights) -> Result<Generator, Error> {
        let (model, config) = (&trainer.blueprint.model, &trainer.blueprint.config);
        let whole = Whole::new(model, |name, shape, out| match weights.get(name) {
            Some(values) if values.len() == out.len() => {
                out.copy_from_slice(values);
                Ok(())
            }
            found => Err(Error::Model(format!(
                "the weights have {} elements of {name}, whose shape is {shape:?}; give those of \
                 this model",
                found.map_or(0, Vec::len)
            ))),
        })?;
        let beside = config.init_from.as_ref().or(config.save.as_ref());
        let places = beside.map(|beside| belongings_of(beside, config));
        Self::of(model, whole, places.unwrap_or_default())
    }

    /// `whole`, which is `model` with its weights; `places` may say which tokens end a text.
    fn of(model: &Model, whole: Whole, places: Vec<PathBuf>) -> Result<Generator, Error> {
        let limits = model.parts.iter().filter_map(Part::seq_max);
        let mut known_ends = Vec::new();
        for place in places {
            if known_ends.is_empty() {
                known_ends = ends(&place)?;
            }
        }
        Ok(Generator {
            whole,
            vocabulary: model.vocabulary,
            longest: limits.min().unwrap_or(usize::MAX),
            ends: known_ends,
        })
    }

    /// Positions of the model: with the prompt, a text has at most one token more. None where any
    /// text can go on.
    pub fn positions(&self) -> Option<usize> {
        Some(self.longest).filter(|longest| *longest < usize::MAX)
    }

    /// Token ids of the model.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// The tokens that end a text, as the folder or GGUF file of the weights says, or that which
    /// the checkpoint's run began with or took its model from.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// Up to `most` tokens that follow `prompt`; `on_token` sees each as soon as it is there, and
    /// ends the text with a [`ControlFlow::Break`], the token included. The text also ends where
    /// the model can take no more.
    ///
    /// # Errors
    /// A prompt that is empty, longer than the model can take, or has an id that it does not know;
    /// a model without logits.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        most: usize,
        sampling: &Sampling,
        mut on_token: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Vec<u32>, Error> {
        let refused = |problem: String, help: String| {
            Err(ConfigError::value("prompt", format!("{} tokens", prompt.len()), problem, help))
        };
        if prompt.is_empty() {
            refused("the prompt is empty".into(), "give at least one token".into())?;
        }
        if prompt.len() > self.longest {
            let problem = format!("the model takes {} at most", self.longest);
            refused(problem, "use a shorter one".into())?;
        }
        if let Some(id) = prompt.iter().find(|id| **id as usize >= self.vocabulary) {
            let problem = format!("it has token id {id}, and the model knows {}", self.vocabulary);
            refused(problem, "use the tokenizer that the model was trained with".into())?;
        }
        self.whole.restart();
        let mut written = Vec::new();
        let mut logits = self.extended(prompt)?;
        while written.len() < most {
            let next = sampling.pick(&logits, written.len() as u64);
            written.push(next);
            let is_full = prompt.len() + written.len() > self.longest;
            if on_token(next).is_break() || written.len() == most || is_full {
                break;
            }
            logits = self.extended(&[next])?;
        }
        Ok(written)
    }

    fn extended(&mut self, ids: &[u32]) -> Result<Vec<f32>, Error> {
        self.whole.extend(ids).map_err(|e| Error::Model(e.to_string()))
    }
}

/// Ids that end a text: of a GGUF file or of the files in a folder of weights.
fn ends(place: &Path) -> Result<Vec<u32>, Error> {
    if !is_gguf(place) {
        return hf_config::ends_in(place).map_err(|error| Error::Model(error.to_string()));
    }
    if !place.is_file() {
        return Ok(Vec::new());
    }
    let config = zeropp_weights::Weights::open(place)?.gguf_config()?;
    let id = config.as_ref().and_then(|config| config.get("eos_token_id")?.as_u64());
    Ok(id.and_then(|id| u32::try_from(id).ok()).into_iter().collect())
}
