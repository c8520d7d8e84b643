//! The state that the ranks of this process share in a run.

use std::sync::mpsc::Receiver;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::Mutex;
use zeropp_core::data::{Dataset, Sampler};
use zeropp_pipeline::executor::StatusBoard;

use crate::checkpoint::Saver;
use crate::checkpoint::initial::Initial;
use crate::checkpoint::resume::Loader;
use crate::config::{Config, StepRange};
use crate::plan::blueprint::Blueprint;
use crate::plan::peak::Peak;
use crate::recorder::FlightRecorder;
use crate::run::evaluation::EvaluationSet;
use crate::run::request::StepAnswer;
use crate::run::reschedule::Offered;
use crate::run::stop::Stopper;
use crate::world::hello::Roster;

/// Steps whose spans a trace keeps by default.
const TRACED_STEPS: u64 = 8;

/// The state that all ranks of the process share.
#[derive(Clone)]
pub(crate) struct RunShared {
    pub(crate) blueprint: Arc<Blueprint>,
    pub(crate) data: Arc<(Dataset, Sampler)>,
    pub(crate) status: Arc<StatusBoard>,
    pub(crate) epoch: Instant,
    /// A name for the run, given before its ranks start; rank 0's process's counts.
    pub(crate) run: Arc<str>,
    /// The descriptions of all processes, once they are known.
    pub(crate) roster: Arc<OnceLock<Arc<Roster>>>,
    /// The cores or GPUs of this machine, and their peak FLOP/s.
    pub(crate) peak: Peak,
    /// World ranks of this process.
    pub(crate) here: Arc<[usize]>,
    /// Name of this machine.
    pub(crate) host: String,
    pub(crate) export: Export,
    pub(crate) loader: Option<Arc<Loader>>,
    /// The weights that the run begins with, if it begins.
    pub(crate) initial: Option<Arc<Initial>>,
    pub(crate) saver: Option<Arc<Saver>>,
    /// The saver that makes the copies in memory, if the run makes any.
    pub(crate) copier: Option<Arc<Saver>>,
    /// The samples of the validation loss.
    pub(crate) evaluation: Option<Arc<EvaluationSet>>,
    pub(crate) stopper: Stopper,
    /// In rank 0's process, the trainer's answer to each reported step.
    pub(crate) answers: Option<Arc<Mutex<Receiver<StepAnswer>>>>,
    pub(crate) recorder: Option<Arc<FlightRecorder>>,
    /// Of this process's own settings and blueprint.
    pub(crate) digests: Arc<OnceLock<Digests>>,
    /// The blueprint that this process runs in place of its own, if it cannot run that, and in
    /// which settings it differs; or why it cannot run rank 0's either.
    pub(crate) agreed: Arc<OnceLock<Result<AgreedBlueprint, String>>>,
    /// The program that rank 0 has offered last.
    pub(crate) offered: Offered,
}

impl RunShared {
    /// Whether what the ranks do is kept.
    pub(crate) fn is_traced(&self) -> bool {
        let config = &self.blueprint.config;
        config.trace.is_some() || config.save_costs.is_some() || self.export == Export::Timeline
    }

    /// Whether what they do in `step` is kept, of a run that had `done` steps behind it.
    pub(crate) fn traces(&self, step: u64, done: u64) -> bool {
        let steps = traced_steps(&self.blueprint.config, done);
        self.is_traced() && (steps.first..=steps.last).contains(&step)
    }
}

/// The steps that a trace holds, of a run that had `done` steps behind it.
pub(crate) fn traced_steps(config: &Config, done: u64) -> StepRange {
    let first = StepRange { first: done + 1, last: done + TRACED_STEPS };
    config.trace_steps.unwrap_or(first)
}

/// The results that the ranks leave behind besides their figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Export {
    Nothing,
    Weights,
    /// The reduced gradients of one single step.
    Gradients,
    /// The validation loss of the weights as they are: no step is run.
    Evaluation,
    /// The spans of every rank, in the steps that a trace holds.
    Timeline,
}

/// The digests that a process compares with the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Digests {
    /// Of the settings that all must share, and of the data.
    pub(crate) settings: blake3::Hash,
    /// Of partition and program.
    pub(crate) program: blake3::Hash,
}

/// The blueprint that a process runs in place of its own.
#[derive(Clone)]
pub(crate) struct AgreedBlueprint {
    pub(crate) blueprint: Arc<Blueprint>,
    /// In which settings the process differs from rank 0's, in words.
    pub(crate) differs: String,
}
