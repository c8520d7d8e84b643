//! Why a run did not start, or ended.

use std::fmt;
use std::path::PathBuf;

use crate::config::ConfigError;
use crate::refusal::TooLittleMemory;
use zeropp_comm::CommError;
use zeropp_comm::launch::{JobError, LaunchError};
use zeropp_comm::rendezvous::RendezvousError;
use zeropp_core::data::DataError;
use zeropp_core::field_error::FieldError;
use zeropp_core::metrics::{Stopped, Summary};
use zeropp_pipeline::executor::{ExecutorError, StepError};
use zeropp_pipeline::schedules::ScheduleError;
use zeropp_pipeline::verify::VerifyError;
use zeropp_plan::cut::TooFewLayers;
use zeropp_weights::WeightsError;
use zeropp_zero3::checkpoint::CheckpointError;

/// Everything that can go wrong with a run. Its `Debug` form is its message, which is what a `main`
/// that returns it prints.
#[derive(thiserror::Error)]
pub enum Error {
    /// A setting that cannot be.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Training data that cannot be used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Data for a validation loss that cannot be used.
    #[error("{0}")]
    EvaluationData(String),
    /// Weights to begin with that cannot be used.
    #[error("init-from = {0}")]
    Weights(#[from] WeightsError),
    /// A checkpoint that cannot be exported, or a place that cannot take it.
    #[error("{}: {problem}; {help}", path.display())]
    Export {
        /// The checkpoint, or what was to be read or written.
        path: PathBuf,
        /// The fault.
        problem: String,
        /// The way that would work.
        help: String,
    },
    /// A schedule that does not exist or does not suit the mesh.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// A schedule that would not run through; a generator's mistake, or a broken file's.
    #[error("schedule: {0}")]
    Verify(#[from] VerifyError),
    /// Fewer layers than stages.
    #[error("layers: {0}")]
    Layers(#[from] TooFewLayers),
    /// A run that is predicted to need more memory than there is.
    #[error(transparent)]
    Memory(Box<TooLittleMemory>),
    /// A model that its own parts contradict.
    #[error("model: {0}")]
    Model(String),
    /// A checkpoint that cannot be resumed from, or a folder that cannot take one.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A run before this one that still saves to the folder that this one is to go on from.
    #[error(
        "save = {}: another run is saving there{who}, still after {waited_s} s; raise \
         timeout-s:start to wait longer, or name another folder",
        folder.display()
    )]
    RunBefore {
        /// The folder.
        folder: PathBuf,
        /// The process that has it, in words, where that is known.
        who: String,
        /// Seconds waited.
        waited_s: f64,
    },
    /// Processes whose settings, data or programs do not go together.
    #[error("{0}")]
    Program(String),
    /// A rank that failed while the run was under way.
    #[error("rank {rank} failed: {message}")]
    Rank {
        /// World rank.
        rank: usize,
        /// Its work and what happened.
        message: String,
    },
    /// Gradients that were not finite in too many steps in a row; the run has ended, and no rank
    /// has failed.
    #[error("{message}")]
    NotFinite {
        /// The first of these steps.
        step: u64,
        /// World rank of the first gradient that was not finite, where one was found.
        rank: Option<usize>,
        /// Its layer.
        layer: Option<String>,
        /// All of it in words, with what may help.
        message: String,
    },
    /// An environment that does not say which rank this process is.
    #[error("environment: {0}")]
    Launch(#[from] LaunchError),
    /// The processes of the job did not meet, or one is gone.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// Ranks could not be brought together.
    #[error("starting the ranks: {0}")]
    Start(#[from] CommError),
    /// The run came to its end, but not every step of it could be written to a file of metrics.
    #[error("{}, but the metrics file {} is incomplete: {source}", end_of(summary), path.display())]
    Metrics {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
        /// The summary that the run returns otherwise.
        summary: Box<Summary>,
    },
    /// An output file that could not be written during the run.
    #[error("cannot write {}: {source}", path.display())]
    Output {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// How a run ended that did so well.
fn end_of(summary: &Summary) -> String {
    match &summary.stopped {
        None => "training finished".into(),
        Some(Stopped { step, no_lower: Some(_), .. }) => {
            format!("training ended after step {step}")
        }
        Some(Stopped { step, .. }) => format!("the run was stopped after step {step}"),
    }
}

impl Error {
    /// A failed rank's error with one more line.
    pub(crate) fn with_advice(self, advice: &str) -> Error {
        match self {
            Error::Rank { rank, message } => {
                Error::Rank { rank, message: format!("{message}\n{advice}") }
            }
            other => other,
        }
    }

    /// Whether the input was wrong (nothing has started), as opposed to a run that failed.
    pub fn is_bad_input(&self) -> bool {
        !matches!(
            self,
            Error::Rank { .. }
                | Error::NotFinite { .. }
                | Error::Start(_)
                | Error::RunBefore { .. }
                | Error::Output { .. }
                | Error::Metrics { .. }
                | Error::Rendezvous(RendezvousError::Lost { .. })
        )
    }
}

impl From<JobError> for Error {
    fn from(error: JobError) -> Error {
        match error {
            JobError::Setting(error) => error.into(),
            JobError::Launch(error) => error.into(),
        }
    }
}

impl From<FieldError> for Error {
    fn from(error: FieldError) -> Error {
        ConfigError::from(error).into()
    }
}

/// How a rank's part of the run ended early.
#[derive(Debug)]
pub(crate) enum RankError {
    Comm(CommError),
    Step(ExecutorError),
    Checkpoint(CheckpointError),
    /// Weights to begin with that turn out to be unusable as they are read.
    Weights(WeightsError),
    /// There is nothing to go on from: bad input, found by the ranks together.
    Resume(CheckpointError),
    /// Processes whose settings, data or programs differ: bad input, found by the ranks together.
    Program(String),
    /// The program that started the ranks wants no first step.
    NotBegun,
}

impl RankError {
    /// The fault between ranks, if that is what ended it.
    pub(crate) fn between_ranks(&self) -> Option<&CommError> {
        match self {
            RankError::Comm(e) => Some(e),
            RankError::Step(e) => e.source.between_ranks(),
            RankError::Checkpoint(_)
            | RankError::Weights(_)
            | RankError::Resume(_)
            | RankError::Program(_)
            | RankError::NotBegun => None,
        }
    }

    /// Whether it is what the run was given, data or a layer, and would come again.
    pub(crate) fn is_given(&self) -> bool {
        let RankError::Step(ExecutorError { source, .. }) = self else { return false };
        matches!(source, StepError::Data(_) | StepError::Shape { .. })
    }

    /// Whether it would come again: before the first step, or by what the run was given.
    pub(crate) fn is_begin(&self) -> bool {
        self.is_bad_input() || self.is_given() || matches!(self, RankError::Weights(_))
    }

    /// Whether all ranks end with these words, and none has begun.
    pub(crate) fn is_bad_input(&self) -> bool {
        matches!(self, RankError::Resume(_) | RankError::Program(_))
    }
}

impl fmt::Display for RankError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RankError::Comm(e) => e.fmt(f),
            RankError::Step(e) => e.fmt(f),
            RankError::Checkpoint(e) | RankError::Resume(e) => e.fmt(f),
            RankError::Weights(e) => write!(f, "init-from = {e}"),
            RankError::Program(text) => f.write_str(text),
            RankError::NotBegun => f.write_str("the run was ended before its first step"),
        }
    }
}

impl From<CheckpointError> for RankError {
    fn from(e: CheckpointError) -> Self {
        RankError::Checkpoint(e)
    }
}

impl From<WeightsError> for RankError {
    fn from(e: WeightsError) -> Self {
        RankError::Weights(e)
    }
}

impl From<CommError> for RankError {
    fn from(e: CommError) -> Self {
        RankError::Comm(e)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_main_returns_is_printed_as_its_message() {
        let error = ConfigError::value("pp", 0, "there is no rank", "use 1 or more");
        assert_eq!(format!("{:?}", Error::from(error)), "pp = 0: there is no rank; use 1 or more");
        let failed = Error::Rank { rank: 3, message: "a\nb".into() };
        assert_eq!(format!("{failed:?}"), "rank 3 failed: a\nb");
    }
}
