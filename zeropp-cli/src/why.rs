//! `zeropp why`: which rank broke a run.

mod killed;

use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use zeropp::failures::{
    Cause, Doing, EndKind, Entry, ExchangedProgram, ExpertLoad, FailureMoment, FlightError, Record,
    Run, Verdict, judge, signal_name,
};

use crate::failure::Failure;
use crate::figures::{count, say};
use crate::values::whole;

const ABOUT: &str = "Find the rank that broke a run\n\n\
When a run fails, every rank writes what it did last to a file in the folder of `flight-dir`. This \
command lines these records up and names the rank that failed, hung or is missing, its stage and \
action, the operation that others waited for in vain, and the evidence. A rank that was killed or \
frozen leaves no file; the other ranks' records identify it. Where a whole run was killed at once, \
its folder of checkpoints and its metrics file show how far it came, and together whether it was \
killed at all.";

/// How many times as long a stage takes, at least, that is said to be slower.
const SLOWER_MIN: f64 = 1.25;

const EXAMPLES: &str = "\
Examples:
  zeropp why zeropp-failed
  zeropp why zeropp-failed --last 40       # more of what the ranks did last, lined up
  zeropp why node0/failed node1/failed     # hosts without a common folder
  zeropp why checkpoints metrics.jsonl     # a single process that vanished

Exit codes: 0 the cause is found, 1 the records do not show it, 2 no records.";

/// The flags of `zeropp why`.
pub(crate) fn command() -> Command {
    Command::new("why")
        .about("Find the rank that broke a run")
        .long_about(ABOUT)
        .after_help(EXAMPLES)
        .arg(
            Arg::new("folders")
                .value_name("PATH")
                .required(true)
                .num_args(1..)
                .value_parser(value_parser!(PathBuf))
                .help(
                    "The folder that the failed run named; several where each host has its own. \
                     If there is none, its folder of checkpoints or its metrics file",
                ),
        )
        .arg(
            Arg::new("run")
                .long("run")
                .value_name("ID")
                .help("Which run, where the folder holds several [default: the newest]"),
        )
        .arg(
            Arg::new("last")
                .long("last")
                .value_name("N")
                .value_parser(whole::<usize>(0))
                .default_value("10")
                .help("How many of the last actions and operations of all ranks to show"),
        )
        .arg(
            Arg::new("json")
                .long("json")
                .action(ArgAction::SetTrue)
                .help("Print the verdict as JSON"),
        )
}

/// Says who broke the run.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let folders: Vec<PathBuf> = matches.get_many("folders").expect("required").cloned().collect();
    let wanted = matches.get_one::<String>("run").map(String::as_str);
    let run = match Run::read(&folders, wanted) {
        Ok(run) => run,
        Err(error @ FlightError::NoSuchRun { .. }) => return Err(Failure::bad_input(error)),
        Err(error) => return killed::explain(&folders, &error),
    };
    let verdict = judge(&run);
    if matches.get_flag("json") {
        say(serde_json::to_string_pretty(&json(&run, &verdict)).expect("plain data"));
    } else {
        explain(&run, &verdict, *matches.get_one("last").expect("has a default"));
    }
    match verdict.cause {
        Cause::Unknown => Err(Failure::failed_run(verdict.summary)),
        _ => Ok(()),
    }
}

fn json(run: &Run, verdict: &Verdict) -> serde_json::Value {
    let records = &run.records;
    let ends =
        records.iter().map(|r| serde_json::json!({"rank": r.header.rank, "end": r.header.end}));
    serde_json::json!({
        "verdict": verdict,
        "missing": missing(run),
        "damaged": run.damaged,
        "ends": ends.collect::<Vec<_>>(),
        "experts": load(run),
        "other_runs": run.others,
    })
}

fn missing(run: &Run) -> Vec<usize> {
    let world = run.records.first().map_or(0, |r| r.header.processes.len());
    (0..world).filter(|rank| run.records.iter().all(|r| r.header.rank != *rank)).collect()
}

fn explain(run: &Run, verdict: &Verdict, last: usize) {
    let world = run.records.len() + missing(run).len();
    say(format_args!(
        "run {}: {} of {} left a record",
        run.name,
        run.records.len(),
        count(world, "rank")
    ));
    for problem in &run.damaged {
        say(format_args!("damaged: {problem}"));
    }
    if !run.others.is_empty() {
        say(format_args!("other runs here: {} (--run)", run.others.join(", ")));
    }
    if let Some(exchanged) = exchanged(&run.records) {
        say(exchanged);
    }
    if let Some(load) = load(run) {
        say(format_args!("step {}: {}", load.step, of_experts(load)));
    }
    say(format_args!("\n{}", verdict.summary));
    for reason in &verdict.reasons {
        say(format_args!("  - {}", reason.replace('\n', "\n    ")));
    }
    let Some(moment) = FailureMoment::first_failure(&run.records) else { return };
    say(format_args!(
        "\n{:>4}  {:<12}{:<14}{:<18}{}",
        "rank", "pp,zero3,dp", "end", "step, action", "as it began to fail"
    ));
    for rank in 0..world {
        say(row(&moment, rank));
    }
    if last > 0 {
        say("\nwhat the ranks did last, by the time before that");
        timeline(&moment, last).iter().for_each(say);
    }
}

/// The order of actions that the ranks ran at last, where it was exchanged in the run. A rank that
/// failed as others took another one still had the one before.
fn exchanged(records: &[Record]) -> Option<String> {
    let all = records.iter().filter_map(|record| record.header.exchanged.as_ref());
    all.max_by_key(|exchanged| exchanged.step).map(order)
}

/// An order of actions that took another one's place, in words.
fn order(exchanged: &ExchangedProgram) -> String {
    let ExchangedProgram { number, kind, step } = exchanged;
    match number {
        0 => format!("from step {step} on the ranks ran the planned order again ({kind})"),
        _ => format!("from step {step} on the ranks ran order {number}, found in the run ({kind})"),
    }
}

/// How the last step that was seen whole spread tokens over experts.
fn load(run: &Run) -> Option<&ExpertLoad> {
    run.records.iter().find_map(|record| record.header.experts.as_ref())
}

/// The same in words, with what it cost its stage.
fn of_experts(load: &ExpertLoad) -> String {
    let ExpertLoad { fullest, layer, idle, slower, .. } = load;
    let slower = slower.filter(|slower| *slower >= SLOWER_MIN).map(|slower| {
        format!(
            "; in that step its stage took {slower:.1} times as long as the others for as many \
             operations: where ranks have several threads, --balance may help"
        )
    });
    format!("{}{}", spread(*fullest, layer, *idle), slower.unwrap_or_default())
}

/// How a step spread tokens over experts, in words.
fn spread(fullest: f64, layer: &str, idle: usize) -> String {
    let idle = match idle {
        0 => "no expert was without a token".into(),
        n => format!("{} without a token", count(n, "expert")),
    };
    let unbalanced = ExpertLoad::is_unbalanced(fullest);
    let unbalanced = if unbalanced { "experts are unbalanced: " } else { "" };
    format!(
        "{unbalanced}the fullest expert had {fullest:.2} times the mean of its layer ({layer}), \
         {idle}"
    )
}

fn row(moment: &FailureMoment, rank: usize) -> String {
    let Some(record) = moment.record(rank) else {
        return format!("{rank:>4}  {:<12}no record", "");
    };
    let c = record.header.coords;
    let at = moment.action(rank).map(|a| format!("{}, {}", a.step, a.action)).unwrap_or_default();
    let time = seconds(moment.doing_for_ns(rank));
    let doing = match moment.doing(rank) {
        Some(Doing::Waiting(op)) => format!("waiting for {time} for {}", op.describe()),
        Some(Doing::Computing(_)) => format!("computing for {time}"),
        _ => format!("neither computing nor waiting for {time}"),
    };
    let coords = format!("{},{},{}", c.pp, c.zero3, c.dp);
    format!("{rank:>4}  {coords:<12}{:<14}{at:<18}{doing}", end(record))
}

fn end(record: &Record) -> String {
    match record.header.end.kind {
        EndKind::Timeout => "timed out".into(),
        EndKind::Error => "error".into(),
        EndKind::Panic => "panic".into(),
        EndKind::Signal(number) => signal_name(number),
        EndKind::Peer => "by another".into(),
        EndKind::AtWork => "at work".into(),
    }
}

/// The last entries of all ranks that began before the failure, in the order in which they began.
fn timeline(moment: &FailureMoment, last: usize) -> Vec<String> {
    let mut all: Vec<(u64, usize, &Entry)> = Vec::new();
    for (rank, record) in moment.records() {
        let before = |entry: &Entry| moment.before_ns(record, entry.begin_ns());
        all.extend(record.entries.iter().filter_map(|e| Some((before(e)?, rank, e))));
    }
    all.sort_by_key(|(before, rank, _)| (u64::MAX - before, *rank));
    let show = |(before, rank, entry): &(u64, usize, &Entry)| {
        let what = match entry {
            Entry::Action(action) => format!("step {} action {}", action.step, action.action),
            Entry::Operation(op) if op.tag.is_some() => {
                format!("{}: {}", op.operation, op.describe())
            }
            Entry::Operation(op) => op.describe(),
        };
        format!("{:>10} s  rank {rank:<4} {what}", format!("-{:.4}", *before as f64 / 1e9))
    };
    all[all.len().saturating_sub(last)..].iter().map(show).collect()
}

fn seconds(ns: u64) -> String {
    format!("{:.3} s", ns as f64 / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_that_ran_at_last_is_named_with_its_first_step() {
        let of = |number| order(&ExchangedProgram { number, kind: "auto".into(), step: 37 });
        assert_eq!(of(2), "from step 37 on the ranks ran order 2, found in the run (auto)");
        assert_eq!(of(0), "from step 37 on the ranks ran the planned order again (auto)");
    }

    #[test]
    fn unbalanced_experts_are_named_with_what_they_cost() {
        let of = |fullest, slower| {
            let layer = "model.layers.3".into();
            of_experts(&ExpertLoad { step: 9, fullest, layer, idle: 5, slower })
        };
        let mean = "the fullest expert had 1.90 times the mean of its layer (model.layers.3), 5 \
                    experts without a token";
        assert_eq!(of(1.9, None), mean);
        assert!(of(4.0, None).starts_with("experts are unbalanced: the fullest expert had 4.00 "));
        assert!(of(4.0, Some(1.2)).ends_with("5 experts without a token"));
        // One step's times on a machine with other work tell no cause.
        let said = "; in that step its stage took 1.8 times as long as the others for as many \
                    operations: where ranks have several threads, --balance may help";
        assert!(of(4.0, Some(1.8)).contains(said), "{}", of(4.0, Some(1.8)));
    }
}
