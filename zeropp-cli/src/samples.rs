//! Text that a model writes while it is trained (`--sample-every`).

use zeropp::config::Config;
use zeropp::{Sampling, config_of};
use zeropp_zero3::checkpoint::Store;

use crate::Failure;
use crate::generate::{Vocabulary, written};

/// Tokens of a text.
const TOKENS: usize = 64;

/// The texts of a run, each written from the checkpoint of its step, once that is whole.
pub(crate) struct Samples {
    store: Store,
    words: Vocabulary,
    prompt: String,
    every: u64,
    /// The step whose checkpoint is waited for.
    waiting: Option<u64>,
}

impl Samples {
    /// Those that the settings ask for, if they do.
    ///
    /// # Errors
    /// A model whose tokens are no bytes, without a tokenizer beside it.
    pub(crate) fn new(config: &Config) -> Result<Option<Samples>, Failure> {
        let (Some(prompt), Some(folder)) = (&config.prompt, &config.save) else { return Ok(None) };
        let beside = config.init_from.as_ref().unwrap_or(folder);
        Ok(Some(Samples {
            store: Store::new(folder),
            words: Vocabulary::find(None, beside, config)?,
            prompt: prompt.clone(),
            every: config.sample_every,
            waiting: None,
        }))
    }

    /// After `step`: the text that has become possible, with its step.
    ///
    /// # Errors
    /// The checkpoint cannot be read, or the model writes nothing.
    pub(crate) fn after(&mut self, step: u64) -> Result<Option<(u64, String)>, Failure> {
        let ready = self.ready()?;
        if step.is_multiple_of(self.every) {
            self.waiting = Some(step);
        }
        // One that is overtaken by the next is left out.
        Ok(ready.or(self.ready()?))
    }

    /// The text of the checkpoint that is waited for, if that is whole.
    ///
    /// # Errors
    /// As [`after`](Self::after).
    pub(crate) fn ready(&mut self) -> Result<Option<(u64, String)>, Failure> {
        let is_whole = |step: &u64| self.store.path(*step).is_dir();
        let Some(step) = self.waiting.take_if(|step| is_whole(step)) else { return Ok(None) };
        let config = config_of(&self.store.path(step))?;
        let how = (TOKENS, &Sampling::default());
        Ok(Some((step, written(&config, &self.words, &self.prompt, how, |_| ())?)))
    }
}
