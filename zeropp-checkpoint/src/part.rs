//! A rank's part of a checkpoint: its file, tried again where the file system refuses.

use std::path::Path;
use std::time::Duration;

use crate::error::Checked;
use crate::store::Store;

/// Waits before a write that failed is tried again: a folder over the network may be away a while.
const RETRIES: [Duration; 3] =
    [Duration::from_millis(100), Duration::from_millis(500), Duration::from_secs(2)];

/// The name of a rank's file.
fn file_of(rank: usize) -> String {
    format!("rank-{rank:05}.safetensors")
}

/// Writes the file of `rank` into the folder of the checkpoint after `step` steps, which `run`
/// saves, by calling `once` with the folder and the file's name. Where that fails, it is tried
/// again after each `pause` that says so.
///
/// # Errors
/// Of the last try.
pub fn write<T>(
    store: &Store,
    step: u64,
    run: &str,
    rank: usize,
    mut pause: impl FnMut(Duration) -> bool,
    mut once: impl FnMut(&Path, &str) -> Checked<T>,
) -> Checked<T> {
    let file = file_of(rank);
    let mut attempt = || {
        let folder = store.begin(step, run)?;
        // A try before this one may have left it.
        let _ = store.disk().remove_file(&folder.join(&file));
        once(&folder, &file)
    };
    let mut waits = RETRIES.into_iter();
    loop {
        match attempt() {
            Err(error) if !waits.next().is_some_and(&mut pause) => return Err(error),
            Err(_) => {}
            written => return written,
        }
    }
}
