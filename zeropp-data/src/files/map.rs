//! Files as memory: what is never looked at is never read, and the system may drop what was.

use std::fs::File;
use std::io;
use std::ops::Deref;

/// A file's bytes, read from it as they are looked at.
///
/// The file must keep its length for as long as this lives: where it is cut, looking at what is
/// gone ends the process with SIGBUS. Where its content changes, so does what is seen.
#[derive(Debug)]
pub struct Mapped(memmap2::Mmap);

impl Mapped {
    /// Maps all of a regular file, read only.
    ///
    /// # Errors
    /// The system's: no room for its addresses, too many mappings.
    pub fn new(file: &File) -> io::Result<Mapped> {
        // SAFETY: the mapping is shared and read only, so no write of this process goes through
        // it, and its bytes are only ever copied out as plain numbers, none of which is invalid:
        // a change by another process gives other numbers, and a cut ends this process, as the
        // type says. No reference into it outlives it: `deref` ties them to it.
        unsafe { memmap2::Mmap::map(file) }.map(Mapped)
    }
}

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}
