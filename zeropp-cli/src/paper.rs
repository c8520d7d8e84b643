//! `zeropp paper`: the papers' tables beside what the planner's model gives for them.

use std::path::PathBuf;

use clap::{Arg, ArgMatches, Command, value_parser};

use crate::failure::Failure;
use crate::figures::say;
use crate::output::write;

const ABOUT: &str = "Show the papers' tables beside the planner's figures\n\n\
Prints published tables and, for each cell, what the planner's model of time and memory gives: \
Megatron's runs, ZeroPP's tables 2 and 4 and figures 1 and 4, Zero Bubble's bubble rates, the \
trade-offs between its schedules and its figure 7. It says what the model was fitted to, and what \
was assumed where a paper does not say.";

/// The command.
pub(crate) fn command() -> Command {
    let pictures = Arg::new("out")
        .short('o')
        .long("out")
        .value_name("FOLDER")
        .value_parser(value_parser!(PathBuf))
        .help("Also write the curves among the figures into this folder, made if need be, as SVG");
    Command::new("paper")
        .about("Show the papers' tables beside the planner's figures")
        .long_about(ABOUT)
        .arg(pictures)
}

/// Prints all tables, and writes the pictures where that is asked for.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    if let Some(folder) = matches.get_one::<PathBuf>("out") {
        std::fs::create_dir_all(folder).map_err(|e| {
            let folder = folder.display();
            Failure::bad_input(format!(
                "out = {folder}: cannot be made ({e}); choose another folder"
            ))
        })?;
        for (name, svg) in zeropp_papers::pictures().map_err(Failure::failed_run)? {
            write(&folder.join(name), svg.as_bytes())?;
        }
    }
    say(zeropp_papers::text().map_err(Failure::failed_run)?.trim_end());
    Ok(())
}
