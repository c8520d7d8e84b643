//! Which checkpoint a run goes on from, and what it does about one that is damaged.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::{Checked, CheckpointError};
use crate::places::StateLocation;
use crate::store::Store;

/// The state that a run is to go on from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The newest; it begins where nothing was ever saved.
    Newest,
    /// The newest, which has to be there.
    Must,
    /// That of a step.
    Step(u64),
}

/// Why there is nothing to go on from.
#[derive(Debug)]
pub enum NoCandidate {
    /// The wanted step has no complete checkpoint; those that there are.
    NoSuchStep(Vec<u64>),
    /// None is complete, or the folder cannot be read.
    Checkpoint(CheckpointError),
}

impl From<CheckpointError> for NoCandidate {
    fn from(error: CheckpointError) -> NoCandidate {
        NoCandidate::Checkpoint(error)
    }
}

/// Steps of the checkpoints that a run may go on from, the wanted one last; none where it begins.
///
/// # Errors
/// There is nothing to go on from, and there should be.
pub fn candidates(store: &Store, choice: Choice) -> Result<Vec<u64>, NoCandidate> {
    let mut steps = store.steps()?;
    if let Choice::Step(wanted) = choice {
        if !steps.contains(&wanted) {
            return Err(NoCandidate::NoSuchStep(steps));
        }
        steps.retain(|step| *step <= wanted);
        return Ok(steps);
    }
    // One that has lost its manifest is damaged, and not to be passed over in silence.
    let named = store.named_steps()?;
    let begins = named.is_empty() && choice == Choice::Newest;
    if steps.is_empty() && !begins {
        store.newest()?;
    }
    Ok(named)
}

/// The newest checkpoint of `steps`, which are in order, that `open` does not find damaged, and
/// what was passed over for it, in words.
///
/// # Errors
/// That of `open`; of the newest already, unless the run may `fall_back` to an older one.
pub fn first_usable<T>(
    steps: &[u64],
    fall_back: bool,
    mut open: impl FnMut(u64) -> Checked<T>,
) -> Checked<(Option<T>, Vec<String>)> {
    let mut passed_over = Vec::new();
    for (i, step) in steps.iter().enumerate().rev() {
        match open(*step) {
            Ok(opened) => return Ok((Some(opened), passed_over)),
            Err(error @ CheckpointError::Damaged { .. }) => {
                let before = &steps[..i];
                match before.last().filter(|_| fall_back) {
                    Some(older) => {
                        let error = offering(error, Some(*older));
                        passed_over.push(passing_over(&error, *older, true));
                    }
                    None => {
                        let whole = before.iter().rev().find(|step| open(**step).is_ok());
                        return Err(offering(error, whole.copied()));
                    }
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok((None, passed_over))
}

/// The damage in words that name the checkpoint before it.
fn offering(error: CheckpointError, older: Option<u64>) -> CheckpointError {
    match error {
        CheckpointError::Damaged { path, problem, .. } => {
            let help = match older {
                Some(step) => format!(
                    "restore it, or go on from step {step} with resume = {step}, which \
                     resume = \"true:fallback\" does by itself"
                ),
                None => "restore it; there is no older checkpoint that is whole".into(),
            };
            CheckpointError::Damaged { path, problem, help }
        }
        other => other,
    }
}

fn passing_over(error: &CheckpointError, older: u64, by_setting: bool) -> String {
    let text = error.to_string();
    let damage = text.rsplit_once("; restore it").map_or(text.as_str(), |(damage, _)| damage);
    let setting = if by_setting { " (resume:fallback)" } else { "" };
    format!("{damage}; going on from step {older}{setting}")
}

/// The newest checkpoint must be the one that was `seen` when the run was set up; `resumes` says
/// that it goes on from one.
///
/// # Errors
/// Another one is there.
pub fn check_unchanged(store: &Store, resumes: bool, seen: Option<u64>) -> Checked<()> {
    let newest = store.steps()?.last().copied();
    let Some(step) = newest.filter(|_| newest != seen) else { return Ok(()) };
    let problem = match resumes {
        false => format!(
            "there is a checkpoint of step {step}; go on from it with resume, or name \
             another folder"
        ),
        true => format!(
            "a checkpoint of step {step} has come since this run was set up; start it again"
        ),
    };
    Err(CheckpointError::Folder { folder: store.folder().to_path_buf(), problem })
}

/// A rank's result of checking a checkpoint, as sent to the others.
#[derive(Debug, Serialize, Deserialize)]
pub struct CheckFailure {
    path: PathBuf,
    problem: String,
    /// Whole, but of another run: no other checkpoint of this one will do.
    is_mismatch: bool,
}

impl CheckFailure {
    /// Of an error of the checkpoint at `path`.
    pub fn of(error: CheckpointError, path: PathBuf) -> CheckFailure {
        match error {
            CheckpointError::Damaged { path, problem, .. } => {
                CheckFailure { path, problem, is_mismatch: false }
            }
            CheckpointError::Mismatch { path, problem } => {
                CheckFailure { path, problem, is_mismatch: true }
            }
            other => CheckFailure { path, problem: other.to_string(), is_mismatch: false },
        }
    }

    fn into_error(self, older: Option<u64>) -> CheckpointError {
        let CheckFailure { path, problem, is_mismatch } = self;
        match is_mismatch {
            true => CheckpointError::Mismatch { path, problem },
            false => {
                offering(CheckpointError::Damaged { path, problem, help: String::new() }, older)
            }
        }
    }

    /// The state before it that all ranks take in the place of the one at `read`, and the message
    /// about that: an older checkpoint where they `may` fall back; whatever there is where a copy
    /// in memory was read, which is beside the checkpoints and not one of them. All ranks come to
    /// the same.
    ///
    /// # Errors
    /// They may not, or there is none; or it is of another run, and so are the others.
    pub fn fall_back(
        self,
        read: StateLocation,
        before: Option<StateLocation>,
        may: bool,
    ) -> Checked<(StateLocation, String)> {
        let is_mismatch = self.is_mismatch;
        let error = self.into_error(before.map(|place| place.step));
        match before.filter(|_| read.in_memory || may && !is_mismatch) {
            Some(before) => {
                let reported = passing_over(&error, before.step, !read.in_memory);
                Ok((before, reported))
            }
            None => Err(error),
        }
    }
}
