//! `zeropp check`: is a schedule in a file sound?

use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use zeropp::pipeline::exchange::{json::Document, spell};
use zeropp::pipeline::ir::{Action, Compute, Schedule};
use zeropp::pipeline::simulate::simulate;
use zeropp::pipeline::verify::{VerifyError, VerifyLimits, is_program, verify};
use zeropp::read_schedule;

use crate::Failure;
use crate::figures::{count, say};

const ABOUT: &str = "Prove that a schedule in a file is sound\n\n\
Every F, B and W once for each stage and micro-batch, in an order that can run; no deadlock between \
ranks; sends and receives in pairs and in order; in a program also weights gathered before they are \
used and freed once, gradients reduced once per unit after its last W. The file is PyTorch's CSV, \
compute-only or with communication, or zeropp's own JSON.";

const EXAMPLES: &str = "\
Examples:
  zeropp schedule --kind zb-v --pp 4 -o zb-v.csv
  zeropp check zb-v.csv
  zeropp check --activations-max 8 zb-v.csv

Exit codes: 0 sound, 2 not sound or not readable; the message names rank, index (from 0) and
action.";

/// The flags of `zeropp check`.
pub(crate) fn command() -> Command {
    let number = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name("N").value_parser(value_parser!(usize)).help(help)
    };
    Command::new("check")
        .about("Prove that a schedule in a file is sound")
        .long_about(ABOUT)
        .after_help(EXAMPLES)
        .arg(
            Arg::new("file")
                .value_name("FILE")
                .required(true)
                .value_parser(value_parser!(PathBuf))
                .help("A schedule, .csv or .json"),
        )
        .args([
            number("gathered-max", "The most stages whose weights a rank may hold at once"),
            number(
                "activations-max",
                "The most micro-batches, counted per stage, that a rank may keep from F to B",
            ),
            Arg::new("any-w-order")
                .long("any-w-order")
                .action(ArgAction::SetTrue)
                .help("Let the W of a stage run out of micro-batch order (zeropp runs none such)"),
        ])
}

/// Says in one line what the file holds, or what is wrong with it.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let path = matches.get_one::<PathBuf>("file").expect("required");
    let Document { schedule, costs, .. } = read_schedule(path).map_err(Failure::bad_input)?;
    let of_zeropp = schedule.ranks.iter().flatten().any(|action| *action == Action::OptimizerStep);
    let limits = VerifyLimits {
        w_in_order: !matches.get_flag("any-w-order"),
        // Programs of other tools have no such action; a program that has one needs it everywhere.
        optimizer_step: of_zeropp,
        gathered_max: matches.get_one("gathered-max").copied(),
        activations_max: matches.get_one("activations-max").copied(),
    };
    let shown = path.display();
    let wrong = |error| Failure::bad_input(format!("{shown}: {}", explained(&error)));
    verify(&schedule, &limits).map_err(wrong)?;
    if let Some(costs) = costs {
        simulate(&schedule, &costs.for_simulator(schedule.stages()))
            .map_err(|error| Failure::bad_input(format!("{shown}: {error}")))?;
    }
    say(format_args!("{shown}: sound: {}", facts(&schedule)));
    Ok(())
}

/// The verifier's message. It spells B and BW as zeropp does; the file says I and B.
fn explained(error: &VerifyError) -> String {
    match error {
        VerifyError::Action { place, .. } if spell(&place.action) != place.action.to_string() => {
            format!("{error} [in the file: {}]", spell(&place.action))
        }
        _ => error.to_string(),
    }
}

fn facts(schedule: &Schedule) -> String {
    let actions: usize = schedule.ranks.iter().map(Vec::len).sum();
    let has = |of: fn(&Action) -> bool| schedule.ranks.iter().flatten().filter(|a| of(a)).count();
    let split = has(|a| a.computes().any(|(kind, ..)| kind == Compute::B)) > 0;
    let mut facts = vec![
        schedule.kind.clone(),
        count(schedule.pp(), "rank"),
        count(schedule.stages(), "stage"),
        batches(schedule),
        if split { "B and W split" } else { "whole backwards" }.to_string(),
        count(actions, "action"),
    ];
    facts.push(if is_program(schedule) {
        format!(
            "a program with {} and {}",
            count(has(|a| matches!(a, Action::AllGather { .. })), "all-gather"),
            count(has(|a| matches!(a, Action::ReduceScatter { .. })), "reduce-scatter"),
        )
    } else {
        "compute only".to_string()
    });
    facts.join(", ")
}

fn batches(schedule: &Schedule) -> String {
    let n = schedule.micro_batches();
    let noun = if n == 1 { "micro-batch" } else { "micro-batches" };
    let units = schedule.units.len();
    if units == 1 { format!("{n} {noun}") } else { format!("{n} {noun} in {units} units") }
}
