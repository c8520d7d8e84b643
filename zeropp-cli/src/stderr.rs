//! Standard error.

use std::io::Write;

use zeropp_core::files::escaped;

/// Writes a line there. Where that fails, as on a full disk or a terminal that was closed, nobody
/// is left who could be told: it is no reason to end a run, or what supervises one.
/// A file's text that the line quotes cannot command the terminal.
pub(crate) fn tell(line: &str) {
    report_labelled("", line);
}

/// The same behind a label of our own, which may have a colour.
pub(crate) fn report_labelled(label: &str, line: &str) {
    let line = escaped(line);
    let _ = std::io::stderr().write_all(format!("{label}{line}\n").as_bytes());
}
