//! The command `zeropp`: arguments in, calls out, nothing else.
//!
//! Exit codes: 0 done, 2 bad input (before any rank starts), 1 a run that failed, 128 and its
//! number a run that a signal has stopped. `supervise` ends with the code of what it started.

mod allocator;
mod args;
mod check;
mod choose;
mod command;
mod compare;
mod emulate;
mod eval;
mod export;
mod figures;
mod find_lr;
mod fit;
mod generate;
mod inspect;
mod large;
mod log;
mod log_file;
mod measure;
mod output;
mod pace;
mod pages;
mod paper;
mod plan;
mod planning;
mod playground;
mod plot;
mod progress;
mod ranks;
mod run;
mod samples;
mod schedule;
mod shell;
mod signals;
mod stderr;
mod stdout;
mod summary;
mod supervise;
mod switches;
mod tokenize;
mod trial;
mod values;
mod version;
mod why;

use std::process::ExitCode;

use tracing::Level;
use zeropp_core::files::escaped;

#[global_allocator]
static ALLOCATOR: allocator::Allocator = allocator::Allocator;

/// Why a command ends early: the message for standard error, if it is not said yet, and the exit
/// code.
struct Failure {
    message: String,
    code: u8,
}

impl Failure {
    /// Input that would have to change; nothing was started.
    fn bad_input(message: impl ToString) -> Failure {
        Failure { message: message.to_string(), code: 2 }
    }

    /// A run that a signal has stopped, as it should.
    fn stopped_by(signal: i32) -> Failure {
        Failure { message: String::new(), code: u8::try_from(128 + signal).unwrap_or(1) }
    }

    /// A run that was started and did not end well.
    fn failed_run(message: impl ToString) -> Failure {
        Failure { message: message.to_string(), code: 1 }
    }
}

impl From<zeropp::Error> for Failure {
    fn from(error: zeropp::Error) -> Failure {
        if error.is_bad_input() { Failure::bad_input(error) } else { Failure::failed_run(error) }
    }
}

/// Of a command whose words did not all reach their reader.
fn incomplete(error: &std::io::Error) -> Failure {
    Failure::failed_run(format!("standard output cannot be written ({error}): it is incomplete"))
}

fn main() -> ExitCode {
    allocator::keep_pages();
    signals::prepare();
    let command = command::command();
    let words = switches::joined(&command, std::env::args_os());
    let matches =
        command.try_get_matches_from(words).unwrap_or_else(|e| command::helpful(e).exit());
    let voice = log::start(&matches);
    let result = match matches.subcommand() {
        Some(("run", matches)) => {
            args::run(matches).and_then(|run| run::run(run, choose::RunToPlan::new(matches), voice))
        }
        Some(("supervise", matches)) => supervise::run(matches),
        Some(("ranks", matches)) => ranks::run(matches),
        Some(("schedule", matches)) => schedule::run(matches),
        Some(("plan", matches)) => planning::run(matches),
        Some(("measure", matches)) => measure::run(matches),
        Some(("playground", matches)) => playground::run(matches),
        Some(("plot", matches)) => plot::run(matches),
        Some(("paper", matches)) => paper::run(matches),
        Some(("check", matches)) => check::run(matches),
        Some(("compare", matches)) => compare::run(matches),
        Some(("why", matches)) => why::run(matches),
        Some(("inspect", matches)) => inspect::run(matches),
        Some(("eval", matches)) => eval::run(matches),
        Some(("export", matches)) => export::run(matches),
        Some(("generate", matches)) => generate::run(matches),
        Some(("tokenize", matches)) => tokenize::run(matches),
        Some(("version", _)) => version::run(),
        Some(("completions", matches)) => shell::completions(matches, command::command()),
        Some(("man", matches)) => shell::manual(matches, command::command()),
        _ => unreachable!("clap asks for a subcommand and knows no other"),
    };
    let result = result.and_then(|()| stdout::lost().map_or(Ok(()), |e| Err(incomplete(&e))));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            match &failure.message {
                message if message.is_empty() => {}
                message if voice.json => tracing::error!(code = failure.code, "{message}"),
                // It may quote a file, which is not to command the terminal.
                message => {
                    log_file::write(format!("error: {}\n", escaped(message)).as_bytes());
                    stderr::report_labelled(&log::label(Level::ERROR), message);
                }
            }
            ExitCode::from(failure.code)
        }
    }
}
