//! `zeropp check`: is a schedule in a file sound?

use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use zeropp::pipeline::check::{self, TextFault};
use zeropp::pipeline::exchange::json::Document;
use zeropp::pipeline::ir::{Action, Compute, Schedule};
use zeropp::pipeline::verify::{VerifyLimits, is_program};
use zeropp::schedule_text;
use zeropp_core::files::escaped_line;

use crate::failure::Failure;
use crate::figures::{count, say};
use crate::values::whole;

const ABOUT: &str = "Prove that a schedule in a file is sound\n\n\
Every F, B and W once for each stage and micro-batch, in an order that can run; no deadlock \
between ranks; sends and receives in pairs and in order; in a program also weights gathered before \
they are used and freed once, gradients reduced once per unit after its last W. The file is \
PyTorch's CSV, compute-only or with communication, or zeropp's own JSON.";

const EXAMPLES: &str = "\
Examples:
  zeropp schedule --kind zb-v --pp 4 -o zb-v.csv
  zeropp check zb-v.csv
  zeropp check --activations-max 8 zb-v.csv
  zeropp check --format json zb-v.csv

Exit codes: 0 sound, 2 not sound or not readable; every error has row and column (in a CSV the
cell, in JSON the character, from 1) and the action as the file spells it.";

/// The flags of `zeropp check`.
pub(crate) fn command() -> Command {
    let number = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name("N").value_parser(whole::<usize>(0)).help(help)
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
            Arg::new("format")
                .long("format")
                .value_name("FORMAT")
                .value_parser(["text", "json"])
                .default_value("text")
                .help("What to print"),
            Arg::new("any-w-order").long("any-w-order").action(ArgAction::SetTrue).help(
                "Let the W of a stage, and the forwards of the last one, run out of micro-batch \
                     order (zeropp does not run such schedules)",
            ),
        ])
}

/// Says in one line what the file holds, or in a line each what is wrong with it.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let path = matches.get_one::<PathBuf>("file").expect("required");
    let shown = path.display();
    let checked = check(path, matches)?;
    if matches.get_one::<String>("format").is_some_and(|format| format == "json") {
        say(json(path, &checked));
    } else if let Ok(facts) = &checked {
        say(format_args!("{shown}: sound: {facts}"));
    }
    match checked.as_ref().map_err(Vec::as_slice) {
        Ok(_) => Ok(()),
        Err([only]) => Err(Failure::bad_input(format!("{shown}: {}", only.message))),
        Err(all) => {
            let lines: Vec<_> = all.iter().map(|error| format!("\n  {}", error.message)).collect();
            let more = if all.len() == ERRORS_MAX { ", and maybe more" } else { "" };
            let n = count(all.len(), "error");
            Err(Failure::bad_input(format!("{shown}: {n}{more}{}", lines.concat())))
        }
    }
}

/// More than anyone reads at once.
const ERRORS_MAX: usize = 100;

/// Content of the file in a line, or all that is wrong with it.
fn check(path: &Path, matches: &ArgMatches) -> Result<Result<String, Vec<TextFault>>, Failure> {
    let (text, format) = schedule_text(path).map_err(Failure::bad_input)?;
    let limits = VerifyLimits {
        w_in_order: !matches.get_flag("any-w-order"),
        gathered_max: matches.get_one("gathered-max").copied(),
        activations_max: matches.get_one("activations-max").copied(),
        ..VerifyLimits::default()
    };
    Ok(match check::check(&text, format, &limits, ERRORS_MAX) {
        Ok(Document { mut schedule, .. }) => {
            schedule.kind = escaped_line(&schedule.kind).into();
            Ok(facts(&schedule))
        }
        Err(faults) => Err(faults.into_iter().map(printable).collect()),
    })
}

/// A fault that a terminal does not obey.
fn printable(fault: TextFault) -> TextFault {
    let [problem, message] =
        [&fault.problem, &fault.message].map(|text| escaped_line(text).into_owned());
    TextFault { problem, message, ..fault }
}

fn json(path: &Path, checked: &Result<String, Vec<TextFault>>) -> String {
    let (facts, errors) = match checked {
        Ok(facts) => (Some(facts), [].as_slice()),
        Err(errors) => (None, errors.as_slice()),
    };
    let file = path.display().to_string();
    let sound = facts.is_some();
    let value = serde_json::json!({"file": file, "sound": sound, "facts": facts, "errors": errors});
    serde_json::to_string_pretty(&value).expect("plain data")
}

fn facts(schedule: &Schedule) -> String {
    let actions: usize = schedule.ranks.iter().map(Vec::len).sum();
    let has = |of: fn(&Action) -> bool| schedule.ranks.iter().flatten().filter(|a| of(a)).count();
    let split = has(|a| a.computes().any(|t| t.kind == Compute::B)) > 0;
    let mut facts = vec![
        schedule.kind.clone(),
        count(schedule.pp(), "rank"),
        count(schedule.stages(), "stage"),
        batches(schedule),
        match split {
            true => "B and W split".to_string(),
            false if schedule.is_forward_only() => "forwards alone".to_string(),
            false => "whole backwards".to_string(),
        },
        count(actions, "action"),
    ];
    facts.push(if is_program(schedule) {
        format!(
            "a program with {} and {}",
            count(has(|a| matches!(a, Action::AllGather { .. })), "all-gather"),
            count(has(|a| matches!(a, Action::ReduceScatter { .. })), "reduce-scatter"),
        )
    } else {
        match has(|a| matches!(a, Action::AllGather { .. })) {
            0 => "compute only".to_string(),
            gathers => format!("compute only, with {}", count(gathers, "all-gather")),
        }
    });
    facts.join(", ")
}

fn batches(schedule: &Schedule) -> String {
    let n = schedule.micro_batches();
    let noun = if n == 1 { "micro-batch" } else { "micro-batches" };
    let units = schedule.units.len();
    if units == 1 { format!("{n} {noun}") } else { format!("{n} {noun} in {units} units") }
}
