//! The command `zeropp`: arguments in, calls out, nothing else.
//!
//! Exit codes: 0 done, 2 bad input (before any rank starts), 1 a run that failed, 128 and its
//! number a run that a signal has stopped. `supervise` ends with the code of what it started.

mod args;
mod check;
mod choose;
mod command;
mod compare;
mod emulate;
mod eval;
mod export;
mod failure;
mod figures;
mod find_lr;
mod fit;
mod generate;
mod inspect;
mod kernels;
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

use std::io::Write;
use std::process::ExitCode;

use tracing::Level;
use zeropp_allocator::Allocator;
use zeropp_core::files::escaped;

use failure::incomplete;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator::new(|bytes| zeropp::end_out_of_memory(bytes, say));

/// Writes to standard error, without allocating anything.
fn say(text: &str) {
    // What cannot be written cannot be helped.
    let _ = std::io::stderr().write_all(text.as_bytes());
}

fn main() -> ExitCode {
    zeropp_allocator::keep_pages();
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
