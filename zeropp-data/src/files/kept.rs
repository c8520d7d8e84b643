//! Files that a run writes from their start, or goes on with.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;

use super::open_output;
use super::output::is_special;

/// Opens `path` to write at its end, made where it is not there, with as many of its first bytes as
/// `kept` finds to keep. A pipe or a terminal has no length to cut; a pipe must have a reader.
///
/// # Errors
/// The file cannot be opened or cut, or what `kept` says.
pub fn open_kept(path: &Path, kept: impl FnOnce(&mut File) -> io::Result<u64>) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.create(true).append(true);
    if is_special(path) {
        return open_output(path, &mut options);
    }
    let mut file = open_output(path, options.read(true))?;
    let kept = kept(&mut file)?;
    file.set_len(kept)?;
    Ok(file)
}
