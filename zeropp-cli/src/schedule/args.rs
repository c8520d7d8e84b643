//! The command line of `zeropp schedule`, and what it asks for.

use std::path::PathBuf;

use clap::builder::{IntoResettable, PossibleValuesParser, StyledStr};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use zeropp::config::Bytes;
use zeropp::pipeline::lower::{LowerOptions, OptimizerSync};
use zeropp::pipeline::schedules::{DEFAULT, FORWARD, KINDS, Kind, Limits, Rate, StepForm};

use super::cost_args::{CostFlags, MEMORY, cost_args};
use super::slice_args::{SliceArgs, slice_args};
use crate::values::whole;

const ABOUT: &str = "Generate, simulate and draw a schedule\n\n\
Makes the order of a pipeline schedule, proves it with the verifier, simulates it with the given \
costs and shows the result: as a chart with the numbers that schedules are compared by, as a file \
that `zeropp run --schedule FILE` and PyTorch can run, or as a picture.";

/// The help's end, behind the flags; `{own}` stands for the kinds with a rate of their own span.
const EXAMPLES: &str = "\
Costs:
  All times are those of one micro-batch on one stage, that is on one chunk where a rank has
  several, whatever the kind. They are in us (millionths of a second), may have a fraction, and are
  calculated with exactly, in a unit of a nanosecond or finer. A cost is one number for all
  stages, or one for each, with commas: --t-f 5,5,5,7. A whole backward takes t-b + t-w and sends
  its gradient at its end.
  Memory is in any whole unit, or in bytes: --mem-f 24MiB. F takes mem-f, B and W give back:
  mem-f + mem-b + mem-w = 0.
  --costs reads times and bytes from a file, such as one of `zeropp run --save-costs`, to the
  nanosecond; what is typed beside it wins.

Numbers (--format json has them all, times in us):
  makespan         from time 0 to the last end over all ranks
  own_span_max     the largest time between a rank's first start and its last end
  bubble           (on the terminal and in pictures) idle share of all ranks from the first start
                   to the last end of any
  bubble_own_span  (there, too) idle share between a rank's own first start and last end, averaged
  bubble_step      idle share of all ranks from the first action of a step to that of the next,
                   in a long run: with the optimizer and what ranks wait for around it
  bubble_rate      (cost - work) / cost as the papers count it: cost is the largest own span for
                   {own},
                   and the makespan for all others. For {printed} it follows the papers'
                   tables, which count P times t-comm less than any run takes; the makespan is
                   that of a run. \"at least\" is a bound: for these costs no order that holds no
                   more activations and no more gathered stages has a lower rate.
  idle, ends       per rank: idle time within its own span, and the end of its last action
  peak_activation  per rank: most activations and weight stashes at once
  all_gathers, reduce_scatters
                   over all pipeline ranks; 0 without --lower, which --all implies

Examples:
  See 1F1B on four ranks, then a schedule without a bubble:
      zeropp schedule --kind 1f1b --pp 4 --micro-batches 8
      zeropp schedule --kind zb-v --pp 4 --micro-batches 8 --width 250
  The Zero Bubble paper's 1.5B profile within twice the memory of 1F1B (a bubble of 4.33 %):
      zeropp schedule --kind zb-2p --pp 8 --micro-batches 24 \\
          --t-f 18522 --t-b 18086 --t-w 9337 --t-comm 601 --format json
  At most two of four stages gathered, twelve gathers a step and twice the memory of 1F1B:
      zeropp schedule --kind auto --pp 8 --virtual 4 --micro-batches 24 --mem-limit 2p \\
          --max-gathered 2 --max-gathers 12 --t-f 925 --t-b 900 --t-w 465 --t-comm 60 \\
          --evaluations 2000
  ZeroPP with units and warm-up chosen for real times and a memory limit:
      zeropp schedule --kind zeropp-auto --pp 4 --virtual 2 --micro-batches 48 --mem-limit 48 \\
          --t-f 11347 --t-b 11248 --t-w 8132 --t-comm 377
  With the times of a run:
      zeropp run --pp 2 --virtual 1 --steps 4 --save-costs measured.json
      zeropp schedule --kind zb-2p --pp 2 --micro-batches 8 --costs measured.json
  All kinds side by side, and as a page that sorts:
      zeropp schedule --all --pp 8 --micro-batches 24 --t-f 18522 --t-b 18086 --t-w 9337
      zeropp schedule --all --pp 8 --micro-batches 24 --sort peak -o kinds.html
  A model of 48 layers under all kinds (without costs all kinds run the same model, too; times of
  a stage, --t-f, make kinds with more stages run more layers):
      zeropp schedule --all --pp 4 --micro-batches 16 --layers 48 --layer-f 946 --layer-b 937 \\
          --layer-w 678
  The whole program with gathers, sends and reductions, as a page to zoom in:
      zeropp schedule --kind zeropp --pp 4 --virtual 2 --unit 8 --lower --recompute full \\
          --t-gather 0.5 --t-reduce 0.5 -o zeropp.html
  Three steps whose updates wait for no other rank:
      zeropp schedule --kind zb-2p --pp 8 --micro-batches 24 --lower --optimizer-sync late \
          --simulate-steps 3 -o late.svg
  A file for torch.distributed.pipelining:
      zeropp schedule --kind interleaved --pp 4 --micro-batches 8 --format torch -o torch.csv

Exit codes: 0 done, 2 bad input (nothing was written).";

const MESH: &str = "Shape";
const SEARCH: &str = "Search (kind auto)";
const PROGRAM: &str = "Program";
const OUTPUT: &str = "Output";

/// Values of `--format`.
pub(super) const FORMATS: [&str; 7] = ["ascii", "json", "csv", "torch", "svg", "html", "chrome"];

/// The columns that a table can be sorted by.
pub(super) const COLUMNS: [&str; 10] = [
    "kind",
    "virtual",
    "makespan",
    "own-span",
    "bubble",
    "bubble-own-span",
    "bubble-rate",
    "peak",
    "gathers",
    "reductions",
];

/// The most activation memory on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Limit {
    /// In the unit of the memory flags.
    Units(i64),
    /// That many times P whole micro-batches.
    TimesP(i64),
}

/// The request for a schedule.
#[derive(Clone, Debug)]
pub(crate) struct ScheduleRequest {
    pub(super) pp: usize,
    pub(super) virtual_stages: Option<usize>,
    pub(super) micro_batches: Option<usize>,
    pub(super) unit: Option<usize>,
    /// Blocks of a split head on each rank; none where it is whole.
    pub(super) head_blocks: Vec<usize>,
    /// Slices of each sample.
    pub(super) slices: Option<SliceArgs>,
    pub(super) costs: CostFlags,
    pub(super) limit: Option<Limit>,
    /// All kinds are wanted side by side: none searches for long.
    pub(super) all: bool,
    /// Limits that kind auto keeps to besides.
    pub(super) limits: Limits,
    /// Lower the compute actions to the whole program.
    pub(super) lower: Option<LowerOptions>,
    /// Steps in the timeline.
    pub(super) steps: usize,
}

/// The flags of `zeropp schedule`.
pub(crate) fn command() -> Command {
    let examples = EXAMPLES
        .replace("{own}", &Kind::names(|k| k.rate == Rate::OwnSpan))
        .replace("{printed}", &Kind::names(|k| k.rate == Rate::MakespanLessMessages));
    Command::new("schedule")
        .about("Generate, simulate and draw a schedule")
        .long_about(ABOUT)
        .after_help(examples)
        .next_help_heading(MESH)
        .arg(kind_arg())
        .args(all_args())
        .args([
            number("pp", "P", "Pipeline ranks").default_value("4"),
            number(
                "virtual",
                "V",
                "Stages on each rank [default: 2, or 1 where the kind wants it]",
            ),
            number(
                "micro-batches",
                "B",
                "Micro-batches of a step [default: 2U, or 4P without units]",
            ),
            number(
                "unit",
                "U",
                format!(
                    "Micro-batches of a unit, for {} [default: near 2P-1, to cut the \
                     step evenly; zeropp-auto with a --mem-limit chooses]",
                    Kind::names(|k| k.step == StepForm::Units)
                ),
            ),
        ])
        .arg(head_split_arg())
        .args(slice_args(&Kind::names(|k| k.in_slices.is_some())))
        .args(cost_args())
        .arg(
            Arg::new("mem-limit")
                .long("mem-limit")
                .value_name("X|1p|2p")
                .value_parser(limit)
                .allow_hyphen_values(true)
                .help_heading(MEMORY)
                .help("The most activation memory of a rank")
                .long_help(format!(
                    "The most activation memory of a rank: a number, one of bytes such as 24GiB, \
                     or 1p, 2p, .. for that many times P whole micro-batches. {} look for an order \
                     within it, in place of a limit of their own; any other kind is refused where \
                     it needs more.",
                    Kind::names(|k| k.obeys_limit)
                )),
        )
        .args(limit_args())
        .args(program_args())
        .args(output_args())
}

fn head_split_arg() -> Arg {
    let [kinds, in_slices] = [false, true].map(|cut| Kind::names(|k| k.splits_heads(cut)));
    Arg::new("head-split")
        .long("head-split")
        .value_name("N,N,..")
        .conflicts_with("all")
        .value_delimiter(',')
        .value_parser(whole::<usize>(0))
        .help("Split the head over ranks: its row blocks on each of them, 64 in all at most")
        .long_help(format!(
            "Split the head over ranks: its row blocks on each of them, 64 in all at most. It is a \
             stage of its own then, whose slices take together what the last stage takes. For \
             {kinds}, and with --slices for {in_slices}."
        ))
}

/// The flags for all kinds side by side.
fn all_args() -> [Arg; 2] {
    let all = Arg::new("all")
        .long("all")
        .action(ArgAction::SetTrue)
        .conflicts_with("kind")
        .help("A table of all kinds; those that do not fit the shape say why")
        .long_help(
            "A table of all kinds, and their bubble over their memory; those that do not fit the \
             shape say why. All run their whole program, with gathers, reductions and messages \
             (--lower). --format and -o take ascii, json, csv, svg and html.",
        );
    let sort = Arg::new("sort")
        .long("sort")
        .value_name("COLUMN")
        .requires("all")
        .value_parser(COLUMNS)
        .hide_possible_values(true)
        .help(format!("The column that --all is sorted by: {}", COLUMNS.join(", ")));
    [all, sort]
}

fn kind_arg() -> Arg {
    let trainless = line(&FORWARD);
    Arg::new("kind")
        .long("kind")
        .value_name("KIND")
        .default_value(DEFAULT)
        .help("The schedule, as in --help's list")
        .long_help(format!("The schedule:\n{}\nOr, which trains nothing:\n{trainless}\n", kinds()))
        .value_parser(PossibleValuesParser::new(KINDS.iter().chain([&FORWARD]).map(|k| k.name)))
        .hide_possible_values(true)
}

fn limit_args() -> [Arg; 3] {
    let evaluations =
        "Whole orders that the search may time [default: what takes some ten seconds]";
    [
        number("max-gathered", "N", "The most stages of a rank gathered at once [default: 2]"),
        number("max-gathers", "N", "The most gathers of a rank in a step [default: no limit]"),
        number("evaluations", "N", evaluations),
    ]
    .map(|arg| arg.help_heading(SEARCH))
}

/// Every kind with what it is, a line each.
pub(crate) fn kinds() -> String {
    KINDS.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn line(kind: &Kind) -> String {
    format!("{:14} {}", kind.name, kind.about)
}

fn program_args() -> [Arg; 6] {
    [
        Arg::new("lower")
            .long("lower")
            .action(ArgAction::SetTrue)
            .help("The whole program: gathers, frees, reductions, sends, receives, optimizer step"),
        Arg::new("prefetch")
            .long("prefetch")
            .allow_hyphen_values(true)
            .value_name("K")
            .default_value("1")
            .requires("lower")
            .value_parser(whole::<usize>(0))
            .help("Stages gathered ahead of the one in use, with --lower"),
        Arg::new("recompute")
            .long("recompute")
            .value_name("WHAT")
            .default_value("none")
            .requires("lower")
            .value_parser(["none", "full"])
            .help("Recompute activations before the backward, with --lower; R takes t-f"),
        Arg::new("copy-out")
            .long("copy-out")
            .value_name("N")
            .default_value("0")
            .requires("lower")
            .value_parser(whole::<usize>(0))
            .help(
                "Micro-batches of each unit whose activations are copied out and in, with --lower",
            ),
        Arg::new("optimizer-sync")
            .long("optimizer-sync")
            .value_name("WHEN")
            .default_value("barrier")
            .requires("lower")
            .value_parser(["barrier", "late"])
            .help("When ranks learn the global norm, with --lower: before their updates, or late")
            .long_help(
                "When ranks learn the global norm, with --lower: at a barrier before every update, \
                 or late, in the next step's warm-up (Zero Bubble's post-validation). Late is \
                 simulated where no update has to be taken back. Kinds that choose between orders \
                 take the one whose step is the shortest so; without --lower, the one with the \
                 smallest largest own span, as their papers count.",
            ),
        number("simulate-steps", "N", "Steps that are simulated and drawn, one after the other")
            .default_value("1"),
    ]
    .map(|arg| arg.help_heading(PROGRAM))
}

fn output_args() -> [Arg; 3] {
    [
        Arg::new("format")
            .long("format")
            .value_name("FORMAT")
            .value_parser(FORMATS)
            .hide_possible_values(true)
            .help(
                "ascii, json, csv, torch, svg, html or chrome [default: by the name of -o, or \
                 ascii]",
            )
            .long_help(
                "ascii   chart and numbers, for the terminal\n\
                 json    everything: schedule, costs and numbers\n\
                 csv     the schedule, with PyTorch's spelling of actions\n\
                 torch   the same without what torch.distributed.pipelining cannot read\n\
                 svg     a picture\n\
                 html    a page to zoom in, times on hover\n\
                 chrome  a trace for Perfetto\n\
                 [default: by the name of -o, or ascii]",
            ),
        Arg::new("out")
            .short('o')
            .long("out")
            .value_name("FILE")
            .value_parser(value_parser!(PathBuf))
            .help("Where to write [default: standard output]"),
        number("width", "COLUMNS", "Widest chart; longer schedules are scaled down")
            .default_value("160"),
    ]
    .map(|arg| arg.help_heading(OUTPUT))
}

fn number(name: &'static str, value: &'static str, help: impl IntoResettable<StyledStr>) -> Arg {
    Arg::new(name).long(name).value_name(value).value_parser(whole::<usize>(1)).help(help)
}

impl ScheduleRequest {
    /// The values of the flags.
    pub(super) fn new(matches: &ArgMatches) -> ScheduleRequest {
        let size = |name: &str| matches.get_one::<usize>(name).copied();
        let lower = matches.get_flag("lower").then(|| LowerOptions {
            prefetch: size("prefetch").expect("has a default"),
            recompute: matches.get_one::<String>("recompute").is_some_and(|what| what == "full"),
            out: size("copy-out").expect("has a default"),
            sync: match matches.get_one::<String>("optimizer-sync").map(String::as_str) {
                Some("late") => OptimizerSync::Late,
                _ => OptimizerSync::Barrier,
            },
            ..LowerOptions::default()
        });
        ScheduleRequest {
            pp: size("pp").expect("has a default"),
            virtual_stages: size("virtual"),
            micro_batches: size("micro-batches"),
            unit: size("unit"),
            head_blocks: matches
                .get_many::<usize>("head-split")
                .map(|blocks| blocks.copied().collect())
                .unwrap_or_default(),
            slices: SliceArgs::new(matches),
            costs: CostFlags::new(matches),
            limit: matches.get_one::<Limit>("mem-limit").copied(),
            all: matches.get_flag("all"),
            limits: Limits {
                gathered: size("max-gathered"),
                gathers: size("max-gathers"),
                evaluations: size("evaluations").map(|n| n as u64),
            },
            lower,
            steps: size("simulate-steps").expect("has a default"),
        }
    }
}

/// Sums of memory and limit stay far from the ends of 64 bits too.
const LIMIT_MAX: i64 = 1_000_000_000_000_000_000;

fn limit(text: &str) -> Result<Limit, String> {
    let number = |digits: &str| digits.parse().ok().filter(|n| (0..=LIMIT_MAX).contains(n));
    let found = match text.strip_suffix(['p', 'P']) {
        Some(fold) => number(fold).filter(|n| (1..=1000).contains(n)).map(Limit::TimesP),
        None => number(text).map(Limit::Units).or_else(|| {
            let bytes = Bytes::parse(text).and_then(|bytes| i64::try_from(bytes.0).ok());
            bytes.filter(|n| (0..=LIMIT_MAX).contains(n)).map(Limit::Units)
        }),
    };
    let works = "expected a whole number, or 1p, 2p, .. for multiples of P, or bytes such as 24GiB";
    found.ok_or_else(|| works.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_is_well_formed() {
        command().debug_assert();
    }

    #[test]
    fn limits_are_units_or_folds() {
        assert_eq!(limit("10"), Ok(Limit::Units(10)));
        assert_eq!(limit("2p"), Ok(Limit::TimesP(2)));
        assert_eq!(limit("2GiB"), Ok(Limit::Units(2 << 30)));
        for text in ["", "p", "-1", "0p", "1.5p", "2pp", "1q"] {
            assert!(limit(text).is_err(), "{text}");
        }
    }

    #[test]
    fn help_knows_every_kind() {
        let help = command().term_width(100).render_long_help().to_string();
        for kind in KINDS {
            assert!(help.contains(kind.about), "{} is not in:\n{help}", kind.name);
        }
    }
}
