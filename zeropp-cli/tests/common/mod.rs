//! Running the built command.

use std::path::Path;
use std::process::{Command, Output};

/// Exit code and output of a command.
#[allow(dead_code, reason = "not every test file runs a command to its end at once")]
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// `zeropp` with the words of `line`, to be run in `dir`.
pub(crate) fn command(dir: &Path, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_zeropp"));
    command.args(line.split_whitespace()).current_dir(dir);
    command
}

#[allow(dead_code, reason = "not every test file runs a command to its end at once")]
/// Runs `zeropp` with the words of `line` in `dir`.
pub(crate) fn zeropp(dir: &Path, line: &str) -> Outcome {
    let Output { status, stdout, stderr } =
        command(dir, line).output().expect("the command can be started");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    Outcome { code: status.code(), out: text(stdout), err: text(stderr) }
}
