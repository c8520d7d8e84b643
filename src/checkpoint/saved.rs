//! The facts that a folder of checkpoints has about the run that wrote it, also where nothing else
//! is left.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use zeropp_zero3::checkpoint::{Checkpoint, CheckpointError, Store};

/// The traces of a run in its folder of checkpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedRun {
    /// Its newest complete checkpoint.
    pub newest: Option<SavedStep>,
    /// Names of saves that were begun and not completed.
    pub half_written: Vec<String>,
    /// Whether a run is saving there now.
    pub in_use: bool,
}

/// A complete checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedStep {
    /// Its folder.
    pub path: PathBuf,
    /// Steps behind it.
    pub step: u64,
    /// The steps that the run was to have, where it can be read.
    pub of: Option<u64>,
    /// When it was completed.
    pub at: Option<SystemTime>,
}

/// Looks into a folder of checkpoints; none where nothing in it is one.
///
/// # Errors
/// The folder cannot be read.
pub fn saved(folder: &Path) -> Result<Option<SavedRun>, CheckpointError> {
    let store = Store::new(folder);
    let half_written = store.half_written()?;
    let newest = store.steps()?.last().map(|step| {
        let path = store.path(*step);
        let steps = |c: Checkpoint| c.manifest().settings.get("steps")?.parse().ok();
        let of = Checkpoint::open(&path).ok().and_then(steps);
        let at = path.metadata().and_then(|meta| meta.modified()).ok();
        SavedStep { path, step: *step, of, at }
    });
    if newest.is_none() && half_written.is_empty() {
        return Ok(None);
    }
    Ok(Some(SavedRun { newest, half_written, in_use: store.check_free().is_err() }))
}
