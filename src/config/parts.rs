//! What the parts of a run need of the settings.

use zeropp_comm::launch::LaunchOptions;
use zeropp_core::data::{DataError, Dataset, Sampler};
use zeropp_core::device::Devices;
use zeropp_core::model::gpt::GptShape;

use super::validate::VOCAB_MAX;
use super::{Config, ConfigError};

impl Config {
    /// The data that the settings name, or the built-in text, long enough for one sample.
    ///
    /// # Errors
    /// Data that cannot be read, is empty, or is shorter than one sample and the token after it.
    pub fn dataset(&self) -> Result<Dataset, DataError> {
        let dataset = match &self.data {
            Some(path) => Dataset::open(path, self.tokenizer)?,
            None => Dataset::builtin(),
        };
        dataset.require(self.seq)?;
        Ok(match self.vocab {
            Some(vocabulary) => dataset.with_vocabulary(vocabulary),
            None => dataset,
        })
    }

    /// Token ids of a model for this data.
    ///
    /// # Errors
    /// An id so large that it is hardly one.
    pub(crate) fn known_ids(&self, data: &Dataset) -> Result<usize, DataError> {
        let vocabulary = data.vocabulary();
        if vocabulary <= VOCAB_MAX {
            return Ok(vocabulary);
        }
        let problem = format!(
            "its largest token id is {}, and {VOCAB_MAX} ids are the most; is it a file of ids \
             that tokenizer = {} reads?",
            vocabulary - 1,
            self.tokenizer
        );
        Err(DataError::Malformed { path: data.origin().into(), problem })
    }

    /// Which tokens each sample of the run is.
    pub fn sampler(&self) -> Sampler {
        Sampler::new(self.seed, self.order, self.seq, self.samples_per_step())
    }

    /// Sizes of the built-in GPT over `vocabulary` token ids.
    pub fn gpt_shape(&self, vocabulary: usize) -> GptShape {
        GptShape {
            layers: self.layers,
            hidden: self.hidden,
            heads: self.heads,
            seq: self.seq,
            vocabulary,
            vocabulary_multiple: self.vocab_multiple,
            tied: self.tied,
            activation: self.activation,
        }
    }

    /// The devices that ranks of this process compute on.
    ///
    /// # Errors
    /// What is missing and where it was looked for, or a precision that the device does not have.
    pub fn devices(&self) -> Result<Devices, ConfigError> {
        Ok(Devices::find(self.device, self.precision)?)
    }

    /// What the launch is told.
    ///
    /// # Errors
    /// A rendezvous that is no `HOST:PORT`.
    pub(crate) fn launch_options(&self) -> Result<LaunchOptions, ConfigError> {
        Ok(LaunchOptions {
            mesh: self.mesh(),
            engine: self.engine,
            nodes: self.nodes,
            node_rank: self.node_rank,
            rendezvous: self.rendezvous()?,
        })
    }
}
