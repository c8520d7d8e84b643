//! Why a run did not start, or ended.

use std::fmt;
use std::path::PathBuf;

use crate::config::{Config, ConfigError};
use crate::refusal::TooLittleMemory;
use zeropp_comm::CommError;
use zeropp_comm::launch::{JobError, LaunchError};
use zeropp_comm::rendezvous::RendezvousError;
use zeropp_core::data::DataError;
use zeropp_core::field_error::FieldError;
use zeropp_core::metrics::{Stopped, Summary};
use zeropp_core::threads::REFUSED_HELP;
use zeropp_failures::{Cause, Verdict};
use zeropp_pipeline::executor::ExecutorError;
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
    #[error("rank {seen_by} failed: {}", in_lines(&explained(*seen_by, failure, verdict), advice))]
    Rank {
        /// World rank of the one that broke the run, as the judge of all records concludes from
        /// those of this process; where they do not show it, the one that failed.
        rank: usize,
        /// World rank of the failure: the one that broke the run, or, where that has none of its
        /// own, one that has waited for it.
        seen_by: usize,
        /// How that one failed.
        failure: Box<RankError>,
        /// The judge's conclusion.
        verdict: Box<Verdict>,
        /// What may help, and where to read more, a line each.
        advice: Vec<String>,
    },
    /// A run that has failed already, as one of its steps was asked for; that has given the error.
    #[error("the run has failed, as its last step has said")]
    FailedBefore,
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
            Error::Rank { rank, seen_by, failure, verdict, advice: mut lines } => {
                lines.push(advice.into());
                Error::Rank { rank, seen_by, failure, verdict, advice: lines }
            }
            other => other,
        }
    }

    /// The same, where ranks waited as long as a first step may take in which kernels are compiled.
    pub(crate) fn with_first_step(self, config: &Config) -> Error {
        let Error::Rank { failure, .. } = &self else { return self };
        let waited = match failure.between_ranks() {
            Some(CommError::Timeout { after_s, .. }) => *after_s,
            _ => return self,
        };
        match config.first_timeout().map(|first| first.as_secs_f64()) {
            Some(first) if waited >= first => self.with_advice(&format!(
                "{waited} s is {} times timeout-s: a rank may take so long for its first step, in \
                 which a GPU's kernels are compiled; docs/gpu.md says how they are kept",
                (first / config.timeout_s).round()
            )),
            _ => self,
        }
    }

    /// Whether the input was wrong (nothing has started), as opposed to a run that failed.
    pub fn is_bad_input(&self) -> bool {
        !matches!(
            self,
            Error::Rank { .. }
                | Error::FailedBefore
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

/// Advice where nothing is wrong but the time.
const MORE_TIME: &str = "raise timeout-s if a step takes that long";

/// The failure of rank `seen_by` in words, with who broke the run where that is another.
pub(crate) fn explained(seen_by: usize, failure: &RankError, verdict: &Verdict) -> String {
    let mut text = failure.to_string();
    if verdict.cause != Cause::Unknown && !verdict.ranks.contains(&seen_by) {
        text = format!("{text}; {}", verdict.summary);
    }
    match failure.between_ranks() {
        Some(CommError::Timeout { .. }) => format!("{text}; {MORE_TIME}"),
        _ => text,
    }
}

fn in_lines(text: &str, advice: &[String]) -> String {
    [text].into_iter().chain(advice.iter().map(String::as_str)).collect::<Vec<_>>().join("\n")
}

/// How a rank's part of a run ended early.
#[derive(Debug, thiserror::Error)]
pub enum RankError {
    /// Between ranks.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// In a step.
    #[error(transparent)]
    Step(ExecutorError),
    /// A checkpoint that could not be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Weights to begin with that turn out to be unusable as they are read.
    #[error("init-from = {0}")]
    Weights(#[from] WeightsError),
    /// A panic.
    #[error("panicked: {text} ({place})")]
    Panic {
        /// Its message.
        text: String,
        /// Where the rank was in the schedule.
        place: String,
    },
    /// The system grants no thread for the rank.
    #[error(
        "its thread with a stack of {stack_mib} MiB cannot be started ({source}); {REFUSED_HELP}"
    )]
    NotStarted {
        /// MiB of its stack.
        stack_mib: usize,
        /// Why.
        source: std::io::Error,
    },
    /// There is nothing to go on from: bad input, found by the ranks together.
    #[error(transparent)]
    Resume(CheckpointError),
    /// Processes whose settings, data or programs differ: bad input, found by the ranks together.
    #[error("{0}")]
    Program(String),
    /// The program that started the ranks wants no first step.
    #[error("the run was ended before its first step")]
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
            | RankError::Panic { .. }
            | RankError::NotStarted { .. }
            | RankError::Resume(_)
            | RankError::Program(_)
            | RankError::NotBegun => None,
        }
    }

    /// Whether the ranks would fail like this again, were they started again: a checkpoint that
    /// cannot be read or written would not be the next time either.
    pub(crate) fn comes_again(&self) -> bool {
        matches!(self, RankError::Checkpoint(_) | RankError::Weights(_)) || self.is_bad_input()
    }

    /// Whether all ranks end with these words, and none has begun.
    pub(crate) fn is_bad_input(&self) -> bool {
        matches!(self, RankError::Resume(_) | RankError::Program(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DeviceKind;

    #[test]
    fn an_error_that_main_returns_is_printed_as_its_message() {
        let error = ConfigError::value("pp", 0, "there is no rank", "use 1 or more");
        assert_eq!(format!("{:?}", Error::from(error)), "pp = 0: there is no rank; use 1 or more");
        let failure = Box::new(RankError::Panic { text: "a".into(), place: "before it".into() });
        let verdict = Box::new(Verdict::unknown("run".into()));
        let failed = Error::Rank { rank: 3, seen_by: 3, failure, verdict, advice: Vec::new() };
        let failed = failed.with_advice("b");
        assert_eq!(format!("{failed:?}"), "rank 3 failed: panicked: a (before it)\nb");
    }

    #[test]
    fn a_wait_for_a_first_step_that_compiles_is_named() {
        let after = |after_s: f64, device| {
            let (group, operation, missing) = ("world".into(), "recv".into(), vec![0]);
            let late = CommError::Timeout { group, operation, sequence: 1, after_s, missing };
            let (failure, verdict) = (Box::new(late.into()), Box::new(Verdict::unknown("".into())));
            let failed = Error::Rank { rank: 0, seen_by: 1, failure, verdict, advice: Vec::new() };
            let config = Config { device, timeout_s: 15.0, ..Config::default() };
            failed.with_first_step(&config).to_string()
        };
        let said = after(150.0, DeviceKind::Cuda);
        assert!(said.contains("150 s is 10 times timeout-s: a rank may take so long"), "{said}");
        for other in [after(15.0, DeviceKind::Cuda), after(150.0, DeviceKind::Cpu)] {
            assert!(!other.contains("kernels"), "{other}");
        }
    }
}
