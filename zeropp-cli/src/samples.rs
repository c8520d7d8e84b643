//! Text that a model writes while it is trained (`--sample-every`).

use std::path::Path;

use zeropp::config::Config;
use zeropp::{Generator, Sampling, Steps, Trainer};

use crate::failure::Failure;
use crate::generate::{Vocabulary, written};

/// Tokens of a text.
const TOKENS: usize = 64;

/// The texts of a run, each written with the weights of its step.
pub(crate) struct SampleTexts {
    words: Vocabulary,
    prompt: String,
    every: u64,
    sampling: Sampling,
}

impl SampleTexts {
    /// Those that the settings ask for, if they do.
    ///
    /// # Errors
    /// A model whose tokens are no bytes, without a tokenizer beside it.
    pub(crate) fn new(config: &Config) -> Result<Option<SampleTexts>, Failure> {
        let Some(prompt) = &config.prompt else { return Ok(None) };
        let beside = config.init_from.as_deref().or(config.save.as_deref());
        let place = beside.unwrap_or(Path::new(&config.model));
        Ok(Some(SampleTexts {
            words: Vocabulary::find(None, place, config)?,
            prompt: prompt.clone(),
            every: config.sample_every,
            sampling: Sampling {
                temperature: config.sample_temperature,
                seed: config.seed,
                ..Sampling::default()
            },
        }))
    }

    /// After `step` of `steps`, which was the last: the text that is due then, if one is.
    ///
    /// # Errors
    /// The weights cannot be had, or the model writes nothing.
    pub(crate) fn after(
        &self,
        step: u64,
        trainer: &Trainer,
        steps: &mut Steps<'_>,
    ) -> Result<Option<String>, Failure> {
        if !step.is_multiple_of(self.every) {
            return Ok(None);
        }
        let mut generator = Generator::with_weights(trainer, &steps.weights()?)?;
        let (words, prompt, sampling) = (&self.words, &self.prompt, &self.sampling);
        Ok(Some(written(&mut generator, words, prompt, TOKENS, sampling, |_| ())?.text))
    }
}
