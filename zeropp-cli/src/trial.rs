//! `--try N`: the best layouts of a plan run for some steps each on this machine, in turn, and are
//! ranked by what they took.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use clap::Arg;
use serde::Deserialize;
use zeropp::Config;
use zeropp::config::{EngineKind, OPTIONS, Reschedule, Resume, SliceCut, Table, Value};
use zeropp_plan::exact::Planned;
use zeropp_plan::layout::Job;
use zeropp_plan::plan::LayoutPlan;
use zeropp_plan::race::race;

use crate::failure::Failure;
use crate::values::whole;

/// Steps of a trial that do not count: a run's first ones map its memory.
const SKIPPED: u64 = 2;
/// Steps that count, at least and at most; in between as many as a plan says take [`TRIAL_S`].
const STEPS: (f64, f64) = (8.0, 50.0);
/// Layouts that are tried at most.
const LAYOUTS_MAX: usize = 256;
/// Seconds of a trial, about, beside its start.
const TRIAL_S: f64 = 0.5;

/// The flag, under this heading.
pub(crate) fn arg(heading: &'static str) -> Arg {
    Arg::new("try")
        .long("try")
        .value_name("N")
        .value_parser(whole::<usize>(2))
        .help_heading(heading)
        .help("Run the N best layouts for some steps each on this machine, and rank by that")
        .long_help(
            "Run the N best layouts for some steps each on this machine, and rank by that\n\n\
             A plan is a model: layouts that it tells within a few percent of each other may run \
             in another order. Each of the N fastest that differ in what their ranks do runs at \
             least 10 steps as a process of its own; those far behind are left out after each \
             round. Nothing is saved or logged. For ranks that are threads of one process (engine \
             threads).",
        )
}

/// The plan of a job; its best layouts were tried where so many `tries` are asked for, as runs of
/// `config`. `flags` are those that say which model it is.
///
/// # Errors
/// Settings that a plan refuses; too many tries, or an engine that needs a launcher; or trials of
/// which none runs to its end, with what the first one said.
pub(crate) fn plan(
    job: &Job,
    flags: &str,
    config: &Config,
    tries: Option<usize>,
) -> Result<LayoutPlan, Failure> {
    let Some(count) = tries else { return LayoutPlan::new(job, flags).map_err(Failure::bad_input) };
    let engine = config.engine;
    if count > LAYOUTS_MAX {
        return Err(Failure::bad_input(format!(
            "try = {count}: each layout runs several times; use 2 to {LAYOUTS_MAX}"
        )));
    }
    if engine != EngineKind::Threads {
        return Err(Failure::bad_input(format!(
            "try = {count}: with engine = {engine} ranks are processes that a launcher starts; try \
             layouts whose ranks are threads, or leave out --try"
        )));
    }
    let folder = Folder::new();
    let mut failed: Vec<(String, Failure)> = Vec::new();
    let trials = |layouts: &[Planned]| {
        tracing::info!("trying {} layouts in turn, up to seven times each", layouts.len());
        let mut number = 0;
        let took = race(layouts.len(), |round, candidate| {
            if round >= number {
                number = round + 1;
                tracing::info!("round {number} of trials");
            }
            let planned = &layouts[candidate];
            let took =
                with_layout(config, planned).and_then(|c| trial(&folder.short(c, planned.step_s)));
            took.map_err(|failure| failed.push((planned.layout.to_string(), failure))).ok()
        });
        if let Some((layout, failure)) = failed.first() {
            let (n, all) = (failed.len(), layouts.len());
            tracing::warn!("{n} of {all} layouts failed; {layout}: {}", failure.message);
        }
        took
    };
    let plan = LayoutPlan::tried(job, flags, count, trials).map_err(Failure::bad_input)?;
    match (failed.into_iter().next(), plan.layouts[0].tried) {
        (Some((_, failure)), None) => Err(failure),
        _ => Ok(plan),
    }
}

/// The settings with this layout, by the flags that a plan prints.
pub(crate) fn with_layout(config: &Config, planned: &Planned) -> Result<Config, Failure> {
    let mut table = Table::new();
    let of = |key: &str, value: &str| {
        let option = OPTIONS.iter().find(|o| o.key == key).expect("a setting of a run");
        option.kind.parse(value).expect("a layout's value")
    };
    // What a layout has no flag for stands over what a file says.
    for (key, value) in [("zero1", "false"), ("prefetch", "1"), ("recompute", "none")] {
        table.insert(key.into(), of(key, value));
    }
    for flag in planned.flags(false) {
        let (key, value) = flag.split_once(' ').unwrap_or((&flag, "true"));
        let key = key.trim_start_matches('-');
        table.insert(key.into(), of(key, value));
    }
    config.with(table).map_err(Failure::bad_input)
}

/// Where trials that fail leave what their ranks did last; gone with this.
struct Folder(PathBuf);

impl Folder {
    /// One that is not there yet: the first trial that fails makes it.
    fn new() -> Folder {
        Folder(std::env::temp_dir().join(format!("zeropp-try-{}", std::process::id())))
    }

    /// A run of some steps with these settings, of which a plan tells `reported_s`.
    fn short(&self, config: Config, reported_s: f64) -> Config {
        let counted = (TRIAL_S / reported_s.max(1e-6)).clamp(STEPS.0, STEPS.1) as u64;
        Config {
            steps: SKIPPED + counted,
            warmup: Some(0),
            flight_dir: Some(self.0.clone()),
            ..writing_nothing(config)
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The settings of a run that measures something: it begins anew, keeps its program,
/// and writes nothing.
pub(crate) fn writing_nothing(config: Config) -> Config {
    Config {
        eval_every: 0,
        eval_data: None,
        patience: 0,
        keep_best: false,
        sample_every: 0,
        prompt: None,
        save: None,
        save_every: 0,
        resume: Resume::No,
        metrics: None,
        tensorboard: None,
        log_file: None,
        trace: None,
        trace_steps: None,
        save_costs: None,
        // What is measured is the program of the plan, in its slices.
        slices: config.slices().into(),
        slice_cut: if config.slices() > 1 { config.slice_cut } else { SliceCut::default() },
        reschedule: Some(Reschedule::Off),
        ..config
    }
}

/// Seconds of a step of a run with these settings.
fn trial(config: &Config) -> Result<f64, Failure> {
    let this = std::env::current_exe().map_err(Failure::failed_run)?;
    // A process of its own has the memory that a run has, and what kills it does not kill this one.
    let run = Command::new(this)
        .args(["run", "--quiet", "--metrics=-"])
        .args(as_flags(config))
        .stdin(Stdio::null())
        .output()
        .map_err(Failure::failed_run)?;
    let steps = step_times(&String::from_utf8_lossy(&run.stdout));
    match run.status.success() && steps.len() as u64 > SKIPPED {
        true => Ok(median(steps[SKIPPED as usize..].to_vec())),
        false => {
            let said = String::from_utf8_lossy(&run.stderr);
            let error = said.lines().find_map(|line| line.strip_prefix("error: "));
            Err(Failure::failed_run(error.unwrap_or("the trial ended without a word")))
        }
    }
}

/// The flags of the settings that differ from those of `base`: several where one is a list.
pub(crate) fn flags(config: &Config, base: &Config) -> Vec<(&'static str, Value)> {
    // It was read from a file or a command line, and so can be written.
    let written = |config: &Config| config.written().unwrap_or_default();
    let base = written(base);
    let differing = written(config).into_iter().filter(|(option, value)| {
        !base.iter().any(|(other, usual)| other.key == option.key && usual == value)
    });
    let flags = differing.flat_map(|(option, value)| match value {
        Value::Array(all) => all.into_iter().map(|one| (option.key, one)).collect(),
        one => vec![(option.key, one)],
    });
    flags.collect()
}

/// The settings that differ from those of a run without flags, as words of a command line.
fn as_flags(config: &Config) -> Vec<String> {
    let word = |(key, value): (&str, Value)| match value.as_str() {
        Some(text) => format!("--{key}={text}"),
        None => format!("--{key}={value}"),
    };
    flags(config, &Config::default()).into_iter().map(word).collect()
}

/// Seconds of each step, of metrics as lines of JSON.
fn step_times(lines: &str) -> Vec<f64> {
    #[derive(Deserialize)]
    struct StepLine {
        step_s: Option<f64>,
    }
    let read = |line: &str| serde_json::from_str::<StepLine>(line).ok()?.step_s;
    lines.lines().filter_map(read).collect()
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    let n = all.len();
    (all[(n - 1) / 2] + all[n / 2]) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_survive_as_flags_and_nothing_is_written() {
        let line = "run --layers 3 --hidden 48 --heads 4 --tied --pp 2 --lr 1e-2 --dropout 0.1 \
                    --save /nowhere --save-every 3 --metrics /no/where.jsonl --stages 2,1 \
                    --optimizer lion:beta2=0.98 --weight-decay 0.1:except=norms,biases --data a=1 \
                    --data b=2 --vocab multiple=128 --rank-memory unchecked \
                    --reschedule auto";
        let read = |words: Vec<String>| {
            let words = std::iter::once("zeropp".to_string()).chain(words);
            let matches = crate::command::command().try_get_matches_from(words).unwrap();
            let run = crate::args::run(matches.subcommand_matches("run").unwrap());
            run.unwrap_or_else(|f| panic!("{}", f.message)).config
        };
        let asked = read(line.split_whitespace().map(str::to_string).collect());
        let short = writing_nothing(asked.clone());
        assert!(asked.save.is_some() && short.save.is_none() && short.metrics.is_none());
        assert_eq!(
            (asked.reschedule, short.reschedule),
            (Some(Reschedule::Auto), Some(Reschedule::Off))
        );
        let again = read(std::iter::once("run".to_string()).chain(as_flags(&short)).collect());
        for option in OPTIONS {
            assert_eq!(again.get(option.key), short.get(option.key), "{}", option.key);
        }
        assert_eq!((again.pp, again.layers, again.tied), (2, 3, true));
    }

    #[test]
    fn only_lines_of_steps_have_times() {
        let lines = "{\"run\":{}}\n{\"step\":1,\"step_s\":0.5}\nnonsense\n{\"step_s\":0.25}\n";
        assert_eq!(step_times(lines), [0.5, 0.25]);
        assert_eq!(median(vec![3.0, 1.0, 2.0, 9.0]), 2.5);
    }
}
