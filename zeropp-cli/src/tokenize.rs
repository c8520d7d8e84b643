//! `zeropp tokenize`: calls the program that does it (ADR 27).

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::process;

use clap::{Arg, ArgMatches, Command, value_parser};

use crate::failure::Failure;

/// The program beside this one, or in `PATH`.
const PROGRAM: &str = "zeropp-tokenize";

/// Everything after the name is the program's, `--help` too.
pub(crate) fn command() -> Command {
    Command::new("tokenize")
        .about("Turn text into a file of tokens to train on")
        .disable_help_flag(true)
        .arg(
            Arg::new("args")
                .value_name("ARGS")
                .num_args(0..)
                .trailing_var_arg(true)
                .allow_hyphen_values(true)
                .value_parser(value_parser!(OsString))
                .help("Those of zeropp-tokenize: INPUT... --tokenizer FILE -o OUT"),
        )
}

/// Runs the program and ends as it ends.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let args = matches.get_many::<OsString>("args").into_iter().flatten();
    let status = process::Command::new(program()).args(args).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        // It has said why.
        Ok(status) => {
            let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
            Err(Failure { message: String::new(), code })
        }
        Err(e) => Err(absent(&e)),
    }
}

/// Why the program did not run.
pub(crate) fn absent(error: &std::io::Error) -> Failure {
    match error.kind() {
        ErrorKind::NotFound => Failure::bad_input(format!(
            "{PROGRAM} is neither beside zeropp nor in PATH; build it with cargo build --release \
             -p zeropp-tokens, or put it there"
        )),
        _ => Failure::bad_input(format!("{PROGRAM} cannot be started ({error})")),
    }
}

pub(crate) fn program() -> PathBuf {
    let name = format!("{PROGRAM}{}", std::env::consts::EXE_SUFFIX);
    let beside = std::env::current_exe().ok().map(|this| this.with_file_name(&name));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| name.into())
}
