//! Options of the parts of a run, from the settings.

use std::time::Duration;

use zeropp_comm::launch::{LaunchOptions, RankPart};
use zeropp_core::data::{DataError, Dataset, Hidden, Sampler, SplitPart};
use zeropp_core::device::Devices;
use zeropp_core::model::gpt::GptShape;
use zeropp_zero3::lr::LearningRate;

use super::validate::VOCAB_MAX;
use super::{Config, ConfigError, DeviceKind};

/// The first and the last rate of a test of rates.
const FIND_LR: (f64, f64) = (1e-7, 10.0);

/// How many times as long a rank may take for a first step in which kernels are compiled.
const FIRST_STEP_TIMES: u32 = 10;

impl Config {
    /// Threads that each of `ranks` ranks on a machine of `units` cores computes with.
    pub(crate) fn threads_of(&self, ranks: usize, units: usize) -> usize {
        match self.device {
            DeviceKind::Cpu => self.threads.unwrap_or((units / ranks.max(1)).max(1)),
            _ => 1,
        }
    }

    /// How long a rank waits for another one.
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs_f64(self.timeout_s)
    }

    /// The same in the first step, where that has a time of its own: on a GPU kernels are compiled
    /// in it.
    pub(crate) fn first_timeout(&self) -> Option<Duration> {
        let compiles = self.device != DeviceKind::Cpu;
        compiles.then(|| self.timeout().saturating_mul(FIRST_STEP_TIMES))
    }

    /// The learning rate of every step.
    pub fn learning_rate(&self) -> LearningRate {
        if self.find_lr > 0 {
            let (from, to) = FIND_LR;
            return LearningRate::range(from, to, self.find_lr);
        }
        LearningRate {
            peak: self.lr,
            min: self.min_lr(),
            warmup: self.warmup(),
            total: self.steps,
            decay: self.decay,
            grows_from: None,
        }
    }

    /// The data that the settings name, or the built-in text: the part of it to train on, long
    /// enough for one sample.
    ///
    /// # Errors
    /// Data that cannot be read, is empty, or is shorter than one sample and the token after it.
    pub fn dataset(&self) -> Result<Dataset, DataError> {
        self.part_of_data(SplitPart::Training)
    }

    /// The data to measure the validation loss on: that of `eval-data`, else the part that `split`
    /// keeps; none where there is neither.
    ///
    /// # Errors
    /// As [`dataset`](Self::dataset).
    pub fn validation_dataset(&self) -> Result<Option<Dataset>, DataError> {
        if let Some(path) = &self.eval_data {
            let dataset = Dataset::open(path, self.tokenizer)?;
            dataset.require(self.seq)?;
            return Ok(Some(dataset));
        }
        if let Some(part) = self.eval_part {
            return self.part_of_data(part).map(Some);
        }
        match self.split_shares() {
            Ok(Some((_, 1..))) => self.part_of_data(SplitPart::Validation).map(Some),
            _ => Ok(None),
        }
    }

    fn part_of_data(&self, part: SplitPart) -> Result<Dataset, DataError> {
        let malformed = |e: ConfigError| {
            let path = self.data_mix.clone().unwrap_or_default().into();
            DataError::Malformed { path, problem: e.to_string() }
        };
        let mut sources = Vec::new();
        for (path, weight) in self.sources().map_err(malformed)? {
            sources.push((Dataset::open(&path, self.tokenizer)?, weight));
        }
        let dataset = match (&self.data, sources.is_empty()) {
            (_, false) => Dataset::mixed(sources),
            (Some(path), true) => Dataset::open(path, self.tokenizer)?,
            (None, true) => Dataset::builtin(),
        };
        if let Some([bytes, ids]) = dataset.unlike() {
            let problem = format!(
                "{bytes} has bytes and {ids} token ids, and no model knows which is which; turn \
                 text into tokens with zeropp tokenize"
            );
            let path = self.data_mix.clone().unwrap_or_default().into();
            return Err(DataError::Malformed { path, problem });
        }
        let dataset = match self.split_shares().map_err(malformed)? {
            Some((training, validation)) => dataset.split(training, validation, part),
            None => dataset,
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

    /// Which tokens each sample of the run is, from its first step on.
    pub fn sampler(&self) -> Sampler {
        let sampler = Sampler::new(self.seed, self.order, self.seq, self.samples_per_step());
        sampler.hiding(self.hidden_of_samples())
    }

    /// The parts of samples that the model and the loss do not see.
    pub(crate) fn hidden_of_samples(&self) -> Hidden {
        Hidden {
            documents: self.document_mask,
            end: self.document_end.and_then(|id| u32::try_from(id).ok()),
            by_loss_mask: self.loss_mask,
        }
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
    /// The part that is missing and where it was looked for, or a precision that the device does
    /// not have.
    pub fn devices(&self) -> Result<Devices, ConfigError> {
        Ok(Devices::find(self.device, self.precision)?)
    }

    /// The options of the launch.
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
            part: RankPart::own()?,
        })
    }
}
