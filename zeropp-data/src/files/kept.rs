//! Files that a run writes from their start, or goes on with.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;

/// Opens `path` to write at its end, made where it is not there, with as many of its first bytes as
/// `kept` finds to keep. A pipe or a terminal has no length to cut.
///
/// # Errors
/// The file cannot be opened or cut, or what `kept` says.
pub fn open_kept(path: &Path, kept: impl FnOnce(&mut File) -> io::Result<u64>) -> io::Result<File> {
    let mut file = OpenOptions::new().create(true).read(true).append(true).open(path)?;
    let kept = kept(&mut file)?;
    if file.metadata()?.is_file() {
        file.set_len(kept)?;
    }
    Ok(file)
}
