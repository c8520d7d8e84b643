//! Standard output, and what of it could not be written.

use std::io::{self, ErrorKind, Write};
use std::sync::Mutex;

/// Why something is missing there: the first error.
static LOST: Mutex<Option<io::Error>> = Mutex::new(None);

/// Writes to standard output. A reader that has gone away has seen what it wanted; of any other
/// error [`lost`] knows.
pub(crate) fn print(text: &[u8]) {
    let mut out = io::stdout().lock();
    note(out.write_all(text).and_then(|()| out.flush()));
}

/// Takes note of what came of writing there; whether all was well.
pub(crate) fn note(result: io::Result<()>) -> bool {
    let Err(error) = result else { return true };
    if error.kind() != ErrorKind::BrokenPipe {
        LOST.lock().expect("nobody panics with it").get_or_insert(error);
    }
    false
}

/// The first error of standard output, once: what was to be there is not all there.
pub(crate) fn lost() -> Option<io::Error> {
    LOST.lock().expect("nobody panics with it").take()
}
