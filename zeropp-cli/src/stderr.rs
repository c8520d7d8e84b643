//! Standard error.

use std::io::Write;

/// Writes a line there. Where that fails, as on a full disk or a terminal that was closed, nobody
/// is left who could be told: it is no reason to end a run, or what supervises one.
pub(crate) fn tell(line: &str) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}
