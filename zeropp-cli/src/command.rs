//! The whole command line.

use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use zeropp::config::flags_for;

use crate::{
    args, check, choose, compare, eval, export, generate, inspect, log, measure, paper, planning,
    playground, plot, ranks, schedule, shell, supervise, tokenize, values, version, why,
};

const ABOUT: &str = "Trains transformers that are too big for one node: pipeline parallelism \
between nodes, ZeRO-3 inside a node, without tensor parallelism";

/// The whole command line.
pub(crate) fn command() -> Command {
    let command = Command::new("zeropp")
        // Wider lines are hard to read.
        .max_term_width(100)
        .version(env!("CARGO_PKG_VERSION"))
        .long_version(version::short())
        .about(ABOUT)
        .after_help(args::FIRST_STEPS)
        .after_long_help(args::EXAMPLES)
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(args::run_command().args(choose::args()))
        .subcommand(supervise::command())
        .subcommand(ranks::command())
        .subcommand(schedule::command())
        .subcommand(planning::command())
        .subcommand(measure::command())
        .subcommand(playground::command())
        .subcommand(plot::command())
        .subcommand(paper::command())
        .subcommand(check::command())
        .subcommand(compare::command())
        .subcommand(why::command())
        .subcommand(inspect::command())
        .subcommand(eval::command())
        .subcommand(export::command())
        .subcommand(generate::command())
        .subcommand(tokenize::command())
        .subcommand(version::command())
        .subcommand(shell::completions_command())
        .subcommand(shell::manual_command());
    let names: Vec<String> = command.get_subcommands().map(|c| c.get_name().into()).collect();
    let command = names
        .into_iter()
        .fold(command, |command, name| command.mut_subcommand(name, values::read_negative_numbers));
    log::with_flags(command)
}

/// The error of a flag that other programs have, with what it is called here.
fn foreign(error: &clap::Error) -> Option<clap::Error> {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return None };
    let is_unknown = error.kind() == ErrorKind::UnknownArgument;
    let advice = flags_for(flag).filter(|_| is_unknown)?;
    let message = format!("{flag}: zeropp has no flag of this name; {advice}\n");
    Some(clap::Error::raw(ErrorKind::UnknownArgument, message))
}

/// How alike a flag and what was typed must be, of 1, for the flag to be what was meant.
const ALIKE: f64 = 0.6;

/// The error of a bad value in the form of all others; any other without a suggestion that is far
/// from what was typed.
pub(crate) fn helpful(mut error: clap::Error) -> clap::Error {
    if let Some(reported) = values::refused(&error) {
        return reported;
    }
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.trim_start_matches('-').to_owned()),
        _ => None,
    };
    if let Some(ours) = foreign(&error) {
        return ours;
    }
    let pair = text(ContextKind::InvalidArg).zip(text(ContextKind::SuggestedArg));
    let far = |(typed, suggested): (String, String)| {
        strsim::normalized_damerau_levenshtein(&typed, &suggested) < ALIKE
    };
    if pair.is_some_and(far) {
        error.remove(ContextKind::SuggestedArg);
    }
    error
}
