//! The events that a rank reports while it runs, and what it leaves behind at its end.

use std::sync::Arc;

use zeropp_core::metrics::{Evaluation, StepMetrics, Stopped};
use zeropp_pipeline::timeline::{SaveSpan, Span};
use zeropp_zero3::ParamExport;

use crate::checkpoint::resume::Resumed;
use crate::plan::blueprint::Blueprint;
use crate::run::diagnose::Diverged;
use crate::run::figures::StageTimes;
use crate::run::reschedule::NumberedProgram;

/// The results that a rank leaves behind.
#[derive(Default)]
pub(crate) struct RankResult {
    /// Times by rank 0's clock.
    pub(crate) spans: Vec<Span>,
    /// Saves of the steps that a trace holds.
    pub(crate) saves: Vec<SaveSpan>,
    /// How far from rank 0's clock that may be.
    pub(crate) clock_error_ns: u64,
    pub(crate) exported: Vec<ParamExport>,
    /// Of rank 0, where programs are exchanged: those of the steps in `spans`, with the number of
    /// the first step of each.
    pub(crate) programs: Vec<(u64, NumberedProgram)>,
}

/// How a rank's part of the run ended, where nothing failed.
#[derive(Default)]
pub(crate) struct RankEnd {
    /// The results of this rank; where there are several processes, those of all ranks on rank 0.
    pub(crate) results: Vec<RankResult>,
    pub(crate) stopped: Option<Stopped>,
    pub(crate) diverged: Option<Diverged>,
    /// Step of the newest checkpoint that was written.
    pub(crate) saved: Option<u64>,
}

impl RankEnd {
    /// Those of this rank and of `next`, which comes after it.
    pub(crate) fn and(mut self, next: RankEnd) -> RankEnd {
        self.results.extend(next.results);
        RankEnd {
            results: self.results,
            stopped: next.stopped.or(self.stopped),
            diverged: next.diverged.or(self.diverged),
            saved: next.saved.or(self.saved),
        }
    }
}

/// A state that is ready.
pub(crate) struct Ready {
    /// Since when, in seconds since 1970.
    pub(crate) at: f64,
    /// Read from here.
    pub(crate) resumed: Option<Resumed>,
    /// How many validation losses in a row were no lower, where the settings wait for no more: no
    /// step is left to do.
    pub(crate) no_lower: Option<u64>,
}

/// An event that a rank reports to its process while it runs.
pub(crate) enum RankEvent {
    /// Its state is ready for the first step, which rank 0 begins when its trainer says so.
    Ready(Ready),
    /// A step is done; and whether all ranks wait at its end for what is to follow.
    Step(StepMetrics, StageTimes, bool),
    /// The run is cut into other stages from now on.
    Recut(Arc<Blueprint>),
    /// The validation loss that was asked for.
    Evaluated(Evaluation),
    /// The weights that were asked for: of all ranks where rank 0 is, and none elsewhere.
    Weights(Vec<RankResult>),
}
