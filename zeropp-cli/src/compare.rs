//! `zeropp compare`: two runs side by side, simulated or measured.

use std::path::{Path, PathBuf};

use clap::{Arg, ArgMatches, Command, value_parser};
use zeropp::pipeline::draw::chrome_read;
use zeropp::pipeline::draw::html::{self, ratio};
use zeropp::pipeline::exchange::json::Document;
use zeropp::pipeline::ir::Schedule;
use zeropp::pipeline::report::{communication_ns, first_pipeline, makespan_ns, step, steps};
use zeropp::pipeline::timeline::{MemoryUnit, RankTimeline, Timeline};
use zeropp::read_schedule;
use zeropp_core::files::{escaped_line, read_text};

use crate::failure::Failure;
use crate::figures::{count, say, table};
use crate::output::{keep_inputs, write};
use crate::schedule::{CostFlags, cost_args, made_by};
use crate::values::whole;

mod plan;

use plan::{ComparedRun, ComparedSchedule};

const ABOUT: &str = "Compare two runs, simulated or measured\n\n\
A and B are schedules (.csv, .json), which are simulated, or traces that `zeropp run --trace` or \
`zeropp schedule --format chrome` wrote, in any mix. Prints a table of both, and with -o writes \
one page with both on one time axis.";

const EXAMPLES: &str = "\
A schedule is simulated with --costs or the cost flags if any are given, else with the costs in its
file; two without any run the same model, F, B and W of each layer in 1 us. When it is compared with
a trace and has no costs of its own, or costs of another scale (less than a tenth or more than ten
times the run's work), it is simulated with the times of the trace; where the two have different
stages, its times are scaled to the run's work. The titles say what was done.
A schedule's bubble_rate is counted as the paper of its kind does; below it stands the least that it
can be, for those costs, in any order that holds no more activations and no more gathered stages.
Of a trace of several steps one is compared, the last unless --step names another. Where one of the
runs has more ranks than the other, as a measured run with ZeRO-3 has, its first pipeline is
compared.

Examples:
  Two schedules with the same costs:
      zeropp schedule --kind 1f1b --pp 4 --micro-batches 8 -o a.csv
      zeropp schedule --kind zb-h1 --pp 4 --micro-batches 8 -o b.csv
      zeropp compare a.csv b.csv --t-f 5 --t-b 6 --t-w 4 -o page.html
  What was planned and what was measured:
      zeropp run --pp 2 --unit 3 --trace measured.json
      zeropp schedule --kind zeropp --pp 2 --unit 3 --lower -o planned.json
      zeropp compare planned.json measured.json -o page.html

Exit codes: 0 done, 2 bad input (nothing was written).";

/// Largest trace, in bytes.
const TRACE_BYTES_MAX: u64 = 1 << 30;

/// The flags of `zeropp compare`.
pub(crate) fn command() -> Command {
    let file = |name: &'static str| {
        Arg::new(name)
            .value_name(name)
            .required(true)
            .value_parser(value_parser!(PathBuf))
            .help("A schedule (.csv, .json) or a trace (.json)")
    };
    Command::new("compare")
        .about("Compare two runs, simulated or measured")
        .long_about(ABOUT)
        .after_help(EXAMPLES)
        .args([file("A"), file("B")])
        .arg(
            Arg::new("out")
                .short('o')
                .long("out")
                .value_name("PAGE.html")
                .value_parser(value_parser!(PathBuf))
                .help("Write a page with both runs"),
        )
        .arg(
            Arg::new("step")
                .long("step")
                .value_name("N")
                .value_parser(whole::<u64>(1))
                .help("The step of a trace, from 1 [default: its last]"),
        )
        .args(cost_args())
}

/// Reads both, prints the table, writes the page.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let path = |name| matches.get_one::<PathBuf>(name).expect("required");
    if let Some(out) = matches.get_one::<PathBuf>("out") {
        keep_inputs(out, [path("A"), path("B")])?;
    }
    let (mut a, mut b) = simulated(read(path("A"), matches)?, read(path("B"), matches)?, matches)?;
    if a.timeline.ranks.len() != b.timeline.ranks.len() {
        a.timeline = one_pipeline(a.timeline);
        b.timeline = one_pipeline(b.timeline);
    }
    let note = unlike(&a, &b);
    if let Some(out) = matches.get_one::<PathBuf>("out") {
        in_one_unit([&mut a.timeline, &mut b.timeline]);
        b.timeline.facts.extend(note.clone());
        b.timeline.facts.extend(made_by());
        let mut page = Vec::new();
        html::compare(&a.timeline, &b.timeline, &mut page).map_err(Failure::failed_run)?;
        write(out, &page)?;
    }
    let note = note.map_or(String::new(), |note| format!("\n\n{note}"));
    say(format_args!("{}{note}", text(&a, &b).trim_end()));
    Ok(())
}

/// The content of a file.
enum ComparedInput {
    /// One step of a run.
    Trace(Timeline),
    Plan(ComparedSchedule),
}

/// Both as runs; a schedule beside a trace may take that one's times.
fn simulated(
    a: ComparedInput,
    b: ComparedInput,
    matches: &ArgMatches,
) -> Result<(ComparedRun, ComparedRun), Failure> {
    let flags = CostFlags::new(matches);
    Ok(match (a, b) {
        (ComparedInput::Trace(a), ComparedInput::Trace(b)) => {
            (ComparedRun::measured(a), ComparedRun::measured(b))
        }
        (ComparedInput::Plan(a), ComparedInput::Trace(b)) => {
            (a.beside(&b, &flags)?, ComparedRun::measured(b))
        }
        (ComparedInput::Trace(a), ComparedInput::Plan(b)) => {
            let b = b.beside(&a, &flags)?;
            (ComparedRun::measured(a), b)
        }
        (ComparedInput::Plan(a), ComparedInput::Plan(b)) => {
            // The same model for both, where no costs are given.
            let flags = match a.costs.is_none() && b.costs.is_none() {
                true => flags.or_of_layers(common_multiple(&a.schedule, &b.schedule)),
                false => flags,
            };
            (a.alone(&flags)?, b.alone(&flags)?)
        }
    })
}

/// The fewest layers that the stages of both share evenly.
fn common_multiple(a: &Schedule, b: &Schedule) -> usize {
    let (a, b) = (a.stages().max(1), b.stages().max(1));
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    (a / x).saturating_mul(b)
}

/// A warning where the two do not do the same work, so that their times say nothing of the kinds.
fn unlike(a: &ComparedRun, b: &ComparedRun) -> Option<String> {
    if a.rate.is_none() || b.rate.is_none() {
        return None;
    }
    let work =
        |run: &ComparedRun| run.timeline.ranks.iter().map(RankTimeline::busy_ns).sum::<u64>();
    let change = ratio(work(a), work(b))?;
    let same = work(a).abs_diff(work(b)) * 20 <= work(a);
    (!same).then(|| {
        format!(
            "note: B computes {change} against A: the two do not run the same model; --layers N \
             --layer-f T, -b, -w prices the same one for both"
        )
    })
}

/// Memory in units and memory in bytes cannot be set side by side: that in units is left out.
fn in_one_unit(runs: [&mut Timeline; 2]) {
    if runs[0].memory_unit == runs[1].memory_unit {
        return;
    }
    for run in runs.into_iter().filter(|run| run.memory_unit == MemoryUnit::Units) {
        run.ranks.iter_mut().for_each(|rank| rank.memory.clear());
        run.memory_unit = MemoryUnit::Bytes;
        run.facts.push("memory: in no unit of the other run, and left out".into());
    }
}

/// A run from a file; its title starts with the file's name.
fn read(path: &Path, matches: &ArgMatches) -> Result<ComparedInput, Failure> {
    let wrong = |e: &dyn std::fmt::Display| Failure::bad_input(format!("{}: {e}", path.display()));
    let is_json = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json"));
    let text = match is_json {
        true => read_text(path, TRACE_BYTES_MAX).map_err(|e| wrong(&e))?,
        false => String::new(),
    };
    let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    if chrome_read::is_trace(&text) {
        let trace = printable(chrome_read::read(&text).map_err(|e| wrong(&e))?);
        let wanted = matches.get_one::<u64>("step").copied();
        let mut step = one_step(trace, wanted).map_err(|e| wrong(&e))?;
        step.title = format!("{name} ({})", step.title);
        return Ok(ComparedInput::Trace(step));
    }
    let Document { schedule, costs, .. } = read_schedule(path).map_err(Failure::bad_input)?;
    // Costs that know the size of weights are of a model, in bytes; others are in any unit.
    let of_model = costs.as_ref().is_some_and(|costs| !costs.mem_weights.is_empty());
    let memory_unit = if of_model { MemoryUnit::Bytes } else { MemoryUnit::Units };
    let costs = costs.map(|costs| costs.for_simulator(schedule.cost_entries()));
    Ok(ComparedInput::Plan(ComparedSchedule {
        name,
        path: path.into(),
        schedule,
        costs,
        memory_unit,
    }))
}

/// A trace of a file, its names without what a terminal would obey.
fn printable(mut trace: Timeline) -> Timeline {
    trace.title = escaped_line(&trace.title).into();
    trace.facts.iter_mut().for_each(|fact| *fact = escaped_line(fact).into());
    for rank in &mut trace.ranks {
        rank.name = escaped_line(&rank.name).into();
    }
    trace
}

/// One step of a trace. A trace without an optimizer step is one step.
fn one_step(trace: Timeline, wanted: Option<u64>) -> Result<Timeline, String> {
    let number = steps(&trace);
    if number == 0 {
        return Ok(trace);
    }
    let wanted = wanted.unwrap_or(number as u64);
    let index = usize::try_from(wanted - 1).ok().filter(|i| *i < number);
    let index = index.ok_or_else(|| {
        format!("step = {wanted}: the trace has {}; use 1 to {number}", count(number, "step"))
    })?;
    let mut one = step(&trace, index);
    if number > 1 {
        one.title = format!("{}, step {wanted} of {number}", one.title);
    }
    Ok(one)
}

fn one_pipeline(timeline: Timeline) -> Timeline {
    let mut first = first_pipeline(&timeline);
    if first.ranks.len() < timeline.ranks.len() {
        let pipelines = timeline.ranks.len() / first.ranks.len().max(1);
        first.title = format!("{}, first of {pipelines} pipelines", timeline.title);
    }
    first
}

/// Both runs and their difference as a table.
fn text(of_a: &ComparedRun, of_b: &ComparedRun) -> String {
    let (a, b) = (&of_a.timeline, &of_b.timeline);
    let mut rows = vec![["", "A", "B", "B - A"].map(String::from).to_vec()];
    let mut micros = |name: &str, of: &dyn Fn(&Timeline) -> u64| {
        let (a, b) = (of(a), of(b));
        let change = b as i128 - a as i128;
        let sign = if change > 0 { "+" } else { "" };
        let percent = match ratio(a, b) {
            None => String::new(),
            Some(ratio) => format!(" ({ratio})"),
        };
        let shown = |ns: i128| format!("{} us", ns as f64 / 1000.0);
        rows.push(vec![
            name.into(),
            shown(a.into()),
            shown(b.into()),
            format!("{sign}{}{percent}", shown(change)),
        ]);
    };
    micros("makespan", &makespan_ns);
    let most = |of: fn(&RankTimeline) -> u64| {
        move |t: &Timeline| t.ranks.iter().map(of).max().unwrap_or(0)
    };
    micros("largest own span", &most(|r| r.own_span().map_or(0, |(start, end)| end - start)));
    micros("busiest rank", &most(RankTimeline::busy_ns));
    micros("most communication", &most(communication_ns));
    let mut share = |name: String, a: Option<f64>, b: Option<f64>| {
        let shown = |x: Option<f64>| x.map_or("-".into(), |x| format!("{:.2} %", 100.0 * x));
        let change = a.zip(b).map_or("-".into(), |(a, b)| {
            // Rounded before it is written, so that no -0.00 appears.
            format!("{:+.2} points", (1e4 * (b - a)).round() / 1e2 + 0.0)
        });
        rows.push(vec![name, shown(a), shown(b), change]);
    };
    let own = [a, b].map(|t| Some(t.bubble_own_span()));
    share("bubble_own_span".into(), own[0], own[1]);
    share("bubble".into(), Some(a.bubble()), Some(b.bubble()));
    if of_a.rate.or(of_b.rate).is_some() {
        share("bubble_rate".into(), of_a.rate, of_b.rate);
        let name = "bubble_rate, at least".into();
        share(name, of_a.rate_at_least, of_b.rate_at_least);
    }
    if html::is_even(a) && html::is_even(b) {
        return format!("A: {}\nB: {}\n\n{}", a.title, b.title, table(&rows));
    }
    let (of_a, of_b) = (a.bubbles(), b.bubbles());
    for rank in 0..of_a.len().max(of_b.len()) {
        let name = format!("bubble, {}", name_of(a, b, rank));
        share(name, of_a.get(rank).copied(), of_b.get(rank).copied());
    }
    format!("A: {}\nB: {}\n\n{}", a.title, b.title, table(&rows))
}

/// The name that both give a rank, or its number.
fn name_of(a: &Timeline, b: &Timeline, rank: usize) -> String {
    let name = |t: &Timeline| t.ranks.get(rank).map(|r| r.name.clone()).unwrap_or_default();
    let (a, b) = (name(a), name(b));
    if a == b && !a.is_empty() { a } else { format!("rank {rank}") }
}
