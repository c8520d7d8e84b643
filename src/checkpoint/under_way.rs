//! A save under way, as rank 0's process sees it: whose part is written, and what came of it.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use zeropp_zero3::checkpoint::{CheckpointError, Plateau};

use crate::checkpoint::writer::Report;

/// What is to be saved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Save {
    /// Steps behind it.
    pub(crate) step: u64,
    /// Updates behind it.
    pub(crate) updates: u64,
    /// Whether older checkpoints go for it.
    pub(crate) rotates: bool,
    /// The validation loss, if it was measured.
    pub(crate) loss: Option<f64>,
    /// Step of the lowest validation loss so far, whose checkpoint stays.
    pub(crate) best: Option<u64>,
    /// How validation losses have gone so far.
    pub(crate) plateau: Option<Plateau>,
}

/// How a save ended.
pub(crate) struct Outcome {
    pub(crate) step: u64,
    /// Whether the checkpoint is complete.
    pub(crate) result: Result<(), CheckpointError>,
    /// What could not be removed.
    pub(crate) left: Vec<CheckpointError>,
}

/// Who waits for a save whose files are all written, so that only its name is missing.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Completing {
    /// The end of a step, after which the next save is due.
    AtStepEnd,
    /// Ranks that are about to go on from the newest checkpoint.
    InRecovery,
}

impl Completing {
    /// For how long: a step is soon done again, what a recovery goes back is not.
    fn limit(self) -> Duration {
        match self {
            Completing::AtStepEnd => Duration::from_millis(100),
            Completing::InRecovery => Duration::from_millis(500),
        }
    }
}

/// What the saves of a run came to; rank 0's process knows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct SaveTotals {
    /// Checkpoints that are complete.
    pub(crate) saves: u64,
    /// Seconds of CPU of all writers.
    pub(crate) cpu_s: f64,
}

struct State {
    save: Save,
    reports: BTreeMap<usize, Report>,
    /// All ranks have reported.
    completing: bool,
    outcome: Option<Outcome>,
}

/// The save under way, if there is one.
#[derive(Default)]
pub(crate) struct UnderWay {
    state: Mutex<Option<State>>,
    ended: Condvar,
}

impl UnderWay {
    /// Begins a save. There is no other.
    pub(crate) fn begin(&self, save: Save) {
        let state = State { save, reports: BTreeMap::new(), completing: false, outcome: None };
        let before = self.state.lock().replace(state);
        debug_assert!(before.is_none(), "a save is begun once the one before has ended");
    }

    /// The step of the save that has begun and whose outcome nobody has taken.
    pub(crate) fn step(&self) -> Option<u64> {
        self.state.lock().as_ref().map(|state| state.save.step)
    }

    /// Notes a rank's report; where it is the last of `world` ranks, the save and all reports.
    pub(crate) fn note(&self, report: Report, world: usize) -> Option<(Save, Vec<Report>)> {
        let mut state = self.state.lock();
        let state = state.as_mut()?;
        state.reports.insert(report.rank, report);
        state.completing = state.reports.len() == world;
        state
            .completing
            .then(|| (state.save, std::mem::take(&mut state.reports).into_values().collect()))
    }

    /// Notes how the save ended.
    pub(crate) fn end(&self, outcome: Outcome) {
        if let Some(state) = &mut *self.state.lock() {
            state.outcome = Some(outcome);
        }
        self.ended.notify_all();
    }

    /// How the save ended, once: it is not under way any more.
    pub(crate) fn take(&self) -> Option<Outcome> {
        take(&mut self.state.lock())
    }

    /// Waits a little for a save of which all ranks have written their parts.
    pub(crate) fn await_completion(&self, who: Completing) {
        let going = |state: &mut Option<State>| {
            state.as_ref().is_some_and(|s| s.completing && s.outcome.is_none())
        };
        self.ended.wait_while_for(&mut self.state.lock(), going, who.limit());
    }

    /// Waits up to `limit` for the end of the save under way, if there is one.
    pub(crate) fn wait(&self, limit: Duration) -> Option<Outcome> {
        let mut state = self.state.lock();
        let going = |state: &mut Option<State>| state.as_ref().is_some_and(|s| s.outcome.is_none());
        self.ended.wait_while_for(&mut state, going, limit);
        take(&mut state)
    }
}

fn take(state: &mut Option<State>) -> Option<Outcome> {
    let outcome = state.as_mut()?.outcome.take()?;
    *state = None;
    Some(outcome)
}
