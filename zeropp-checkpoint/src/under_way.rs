//! A save under way, as rank 0's process sees it: whose part is written, and what came of it.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::CheckpointError;
use crate::manifest::Plateau;
use crate::sync::{Condvar, Mutex};
use crate::written::WrittenState;

/// One save as it was decided on: the step, and what its manifest and the others' removal need.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Save {
    /// Steps behind it.
    pub step: u64,
    /// Updates behind it.
    pub updates: u64,
    /// Whether older checkpoints go for it.
    pub rotates: bool,
    /// The validation loss, if it was measured.
    pub loss: Option<f64>,
    /// Step of the lowest validation loss so far, whose checkpoint stays.
    pub best: Option<u64>,
    /// How validation losses have gone so far.
    pub plateau: Option<Plateau>,
}

/// The result of a rank's writer.
#[derive(Debug, Serialize, Deserialize)]
pub struct WriterReport {
    /// World rank.
    pub rank: usize,
    /// The state that it wrote, if this rank is to write anything; or why it could not.
    pub written: Result<Option<WrittenState>, String>,
    /// Seconds of CPU that it took.
    pub cpu_s: f64,
}

/// How one save ended, to be reported once.
pub struct SaveOutcome {
    /// Steps behind it.
    pub step: u64,
    /// Whether the checkpoint is complete.
    pub result: Result<(), CheckpointError>,
    /// The errors of folders that could not be removed.
    pub left: Vec<CheckpointError>,
}

impl SaveOutcome {
    /// Whether the run ends with it: it has failed, and has to be there or there is no other one.
    pub fn is_fatal(&self, must: bool, has_any: impl FnOnce() -> bool) -> bool {
        match &self.result {
            Ok(()) => false,
            // Whatever is there is another run's.
            Err(CheckpointError::Replaced { .. }) => true,
            Err(_) => must || !has_any(),
        }
    }
}

/// Who waits for a save whose files are all written, so that only its name is missing.
#[derive(Clone, Copy, Debug)]
pub enum Completing {
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

/// Counts and times of a run's saves; rank 0's process has them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SaveTotals {
    /// Checkpoints that are complete.
    pub saves: u64,
    /// Bytes of the files of the largest.
    pub bytes: u64,
    /// Seconds of CPU of all writers.
    pub cpu_s: f64,
}

struct SaveState {
    save: Save,
    reports: BTreeMap<usize, WriterReport>,
    /// All ranks have reported.
    completing: bool,
    outcome: Option<SaveOutcome>,
}

/// The save under way, if there is one, of ranks that are still those of the run or are not.
#[derive(Default)]
pub struct UnderWay {
    state: Mutex<Option<SaveState>>,
    ended: Condvar,
    closed: Mutex<bool>,
}

impl UnderWay {
    /// Begins a save. There is no other.
    pub fn begin(&self, save: Save) {
        let state = SaveState { save, reports: BTreeMap::new(), completing: false, outcome: None };
        let before = self.state.lock().replace(state);
        debug_assert!(before.is_none(), "a save is begun once the one before has ended");
    }

    /// The ranks are gone, others come in their place: no checkpoint of theirs gets its name any
    /// more, and none is removed for one. Waits for what is about to.
    pub fn close(&self) {
        *self.closed.lock() = true;
    }

    /// Does `act` unless the ranks are gone, which then waits for it.
    pub(crate) fn while_open<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        let closed = self.closed.lock();
        (!*closed).then(act)
    }

    /// The step of the save that has begun and whose outcome has not been taken.
    pub fn step(&self) -> Option<u64> {
        self.state.lock().as_ref().map(|state| state.save.step)
    }

    /// Notes a rank's report; where it is the last of `world` ranks, the save and all reports.
    pub fn note(&self, report: WriterReport, world: usize) -> Option<(Save, Vec<WriterReport>)> {
        let mut state = self.state.lock();
        let state = state.as_mut()?;
        state.reports.insert(report.rank, report);
        state.completing = state.reports.len() == world;
        state
            .completing
            .then(|| (state.save, std::mem::take(&mut state.reports).into_values().collect()))
    }

    /// Notes how the save ended.
    pub fn end(&self, outcome: SaveOutcome) {
        if let Some(state) = &mut *self.state.lock() {
            state.outcome = Some(outcome);
        }
        self.ended.notify_all();
    }

    /// How the save ended, once: it is not under way any more.
    pub fn take(&self) -> Option<SaveOutcome> {
        take(&mut self.state.lock())
    }

    /// Waits a little for a save of which all ranks have written their parts.
    pub fn await_completion(&self, who: Completing) {
        let going = |state: &mut Option<SaveState>| {
            state.as_ref().is_some_and(|s| s.completing && s.outcome.is_none())
        };
        self.ended.wait_while_for(&mut self.state.lock(), going, who.limit());
    }

    /// Waits up to `limit` for the end of the save under way, if there is one.
    pub fn wait(&self, limit: Duration) -> Option<SaveOutcome> {
        let mut state = self.state.lock();
        let going =
            |state: &mut Option<SaveState>| state.as_ref().is_some_and(|s| s.outcome.is_none());
        self.ended.wait_while_for(&mut state, going, limit);
        take(&mut state)
    }
}

fn take(state: &mut Option<SaveState>) -> Option<SaveOutcome> {
    let outcome = state.as_mut()?.outcome.take()?;
    *state = None;
    Some(outcome)
}
