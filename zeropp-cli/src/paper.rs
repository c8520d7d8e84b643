//! `zeropp paper`: the papers' tables beside what the planner's model gives for them.

use clap::Command;

use crate::Failure;
use crate::figures::say;

const ABOUT: &str = "The papers' tables beside ours\n\n\
Prints published tables and what the planner's one model of time and memory gives for each cell: \
Megatron's runs, ZeroPP's tables 2 and 4 and figure 1, Zero Bubble's bubble rates. It says what \
the model is fitted on, and what was assumed where a paper states nothing.";

/// The command, which has no flags.
pub(crate) fn command() -> Command {
    Command::new("paper").about("The papers' tables beside ours").long_about(ABOUT)
}

/// Prints all tables.
pub(crate) fn run() -> Result<(), Failure> {
    say(zeropp_plan::papers::text().map_err(Failure::failed_run)?.trim_end());
    Ok(())
}
