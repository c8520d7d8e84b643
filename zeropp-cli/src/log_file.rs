//! The file that a run's words go to beside the terminal (`--log-file`).

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Mutex;

use zeropp_core::files::open_output;

/// The file, where there is one.
static FILE: Mutex<Option<OpenLog>> = Mutex::new(None);
/// Why something is missing there: the first error.
static LOST: Mutex<Option<io::Error>> = Mutex::new(None);

struct OpenLog {
    file: File,
    /// Where the file is to be cut once the run begins: what this start has written so far.
    start: Option<Vec<u8>>,
}

/// From now on [`write`] writes at the end of `path`, and once the run begins from its start,
/// unless it goes on. A start that is refused cuts nothing off, which may be another run's.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn open(path: &Path, goes_on: bool) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let file = open_output(path, options.create(true).append(true))?;
    // A pipe or a terminal has no length to cut.
    let is_cut = !goes_on && file.metadata()?.is_file();
    let log = OpenLog { file, start: is_cut.then(Vec::new) };
    *FILE.lock().expect("nobody panics with it") = Some(log);
    Ok(())
}

/// The run begins: what the file had before this start is removed, unless the run goes on.
pub(crate) fn begin() {
    let mut log = FILE.lock().expect("nobody panics with it");
    let Some(log) = &mut *log else { return };
    let Some(text) = log.start.take() else { return };
    lose(log.file.set_len(0).and_then(|()| log.file.write_all(&text)));
}

/// Whether there is one.
pub(crate) fn is_open() -> bool {
    FILE.lock().expect("nobody panics with it").is_some()
}

/// Writes `text` to the file, if there is one. A full disk does not end a run; [`lost`] tells it.
pub(crate) fn write(text: &[u8]) {
    let mut log = FILE.lock().expect("nobody panics with it");
    let Some(log) = &mut *log else { return };
    if let Some(start) = &mut log.start {
        start.extend_from_slice(text);
    }
    lose(log.file.write_all(text));
}

fn lose(written: io::Result<()>) {
    if let Err(error) = written {
        LOST.lock().expect("nobody panics with it").get_or_insert(error);
    }
}

/// The first error of the file, once: it is incomplete.
pub(crate) fn lost() -> Option<io::Error> {
    LOST.lock().expect("nobody panics with it").take()
}
