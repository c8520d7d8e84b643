//! The file that a run's words go to beside the terminal (`--log-file`).

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Mutex;

/// The file, where there is one.
static FILE: Mutex<Option<File>> = Mutex::new(None);
/// Why something is missing there: the first error.
static LOST: Mutex<Option<io::Error>> = Mutex::new(None);

/// From now on [`write`] writes to `path`: from its start, or where a run goes on at its end.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn open(path: &Path, goes_on: bool) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let file = options.create(true).append(true).open(path)?;
    // A pipe or a terminal has no length to cut.
    if !goes_on && file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    *FILE.lock().expect("nobody panics with it") = Some(file);
    Ok(())
}

/// Whether there is one.
pub(crate) fn is_open() -> bool {
    FILE.lock().expect("nobody panics with it").is_some()
}

/// Writes `text` to the file, if there is one. A full disk does not end a run; [`lost`] tells it.
pub(crate) fn write(text: &[u8]) {
    let written = match &mut *FILE.lock().expect("nobody panics with it") {
        Some(file) => file.write_all(text),
        None => return,
    };
    if let Err(error) = written {
        LOST.lock().expect("nobody panics with it").get_or_insert(error);
    }
}

/// The first error of the file, once: it is incomplete.
pub(crate) fn lost() -> Option<io::Error> {
    LOST.lock().expect("nobody panics with it").take()
}
