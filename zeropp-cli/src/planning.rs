//! `zeropp plan`: the best layouts for a model on a cluster.

mod job;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use zeropp::config::{Bytes, Config, EngineKind, OPTIONS, OptionInfo};
use zeropp_core::files::read_text;
use zeropp_plan::launch::{Launcher, nodes};
use zeropp_plan::plan::LayoutPlan;
use zeropp_plan::{PlanError, against, page, text};

use crate::failure::Failure;
use crate::figures::say;
use crate::output::{keep_inputs, write};
use crate::values::whole;
use crate::{args, trial};

use job::{PlanRequest, job, recompute, schedule};
pub(crate) use job::{flag, head_split, machine_called, moments, searched_slices, states_out};

const ABOUT: &str = "Plan before a run: the fastest layouts of a model on some machines\n\n\
Searches pipeline ranks, ZeRO-3 ranks, replicas, stages, units, micro-batches, recomputation, \
ZeRO-1, kinds of schedule, prefetch and the cut into stages; leaves out what does not fit into \
memory, simulates the best and prints them with what limits each and the command that runs it.";

const EXAMPLES: &str = "\
Examples:
  GPT-2 XL on four nodes of eight A100:
      zeropp plan --model gpt2-xl --gpus 32 --machine a100 --global-batch 192
  A model by its sizes, in at most 40 GiB a rank, with a page of pictures:
      zeropp plan --layers 48 --hidden 5120 --heads 40 --seq 1024 --vocab 51200 --gpus 32 \\
          --machine a800 --memory 40GiB --global-batch 192 -o plan.html
  The model, the data and the optimizer of a run's file:
      zeropp plan run.toml --gpus 16 --machine mine.toml
  What the third layout's step is made of:
      zeropp plan --model 14.6b --gpus 32 --machine a800 --global-batch 192 --explain 3
  After the run: predicted beside measured:
      zeropp plan --model gpt2 --gpus 8 --machine mine.toml --global-batch 64 --against run.jsonl
  A batch script for the first layout, to which more flags of `zeropp run` can be given:
      zeropp plan --model llama3-8b --gpus 64 --machine h100 --global-batch 256 \\
          --launch slurm > job.sbatch; sbatch job.sbatch --data tokens.bin

The machines that are known by name have public figures, not measurements. A file of your own has
flops_per_s, flops_share, memory_bytes, memory_bytes_per_s, per_node, zero3_bytes_per_s,
replica_bytes_per_s, bytes_per_s, t_comm and t_collective (docs/plan.md).

Exit codes: 0 done, 2 bad input, or no layout that fits.";

/// Largest file of a model, a machine or of metrics.
const FILE_MAX: u64 = 64 << 20;

/// The flags of `zeropp plan`.
pub(crate) fn command() -> Command {
    Command::new("plan")
        .about("Plan a run: the fastest layouts of a model on some machines")
        .long_about(ABOUT)
        .after_help(EXAMPLES)
        .arg(
            Arg::new("config")
                .value_name("CONFIG.toml")
                .value_parser(value_parser!(PathBuf))
                .help("A file of settings of `zeropp run`; flags override it")
                .long_help(
                    "A file of settings of `zeropp run`: the plan takes its model, data, device, \
                     precision, optimizer, rank-memory and global-batch, and keeps to its pp, \
                     zero3, dp, virtual, unit, micro-batch-size, recompute and schedule. Flags \
                     override it. The commands that are printed run the file with the layout.",
                ),
        )
        .args(model_args())
        .args(cluster_args())
        .args(fixed_args())
        .args(output_args())
}

fn number(name: &'static str, value: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_name(value).value_parser(whole::<usize>(1)).help(help)
}

/// Settings of `zeropp run` beside the model's that a plan's memory and time follow from.
const TRAINED_WITH: [&str; 7] =
    ["precision", "optimizer", "momentum", "ema", "dropout", "pack-weights", "optimizer-sync"];

/// The settings of `zeropp run` that say which model it is, and what it is trained with, as flags.
fn model_options() -> impl Iterator<Item = &'static OptionInfo> {
    let is_one = |o: &&OptionInfo| {
        o.heading == "Model" && o.key != "init-from" || TRAINED_WITH.contains(&o.key)
    };
    OPTIONS.iter().filter(is_one)
}

fn model_args() -> Vec<Arg> {
    let defaults = Config::default();
    let words = "As `run` takes it: family, preset, config.json, folder; a paper's (175b, 1t, ..)";
    let flag = |o: &OptionInfo| {
        let flag = args::flag(o, defaults.get(o.key));
        // The papers' models come to those of a run.
        if o.key == "model" { flag.help(words) } else { flag }
    };
    model_options().map(flag).collect()
}

fn cluster_args() -> Vec<Arg> {
    let bytes = |text: &str| {
        let works = "expected bytes, such as 80G or 74.5GiB";
        Bytes::parse(text).filter(|b| b.0 > 0).ok_or(works.to_string())
    };
    let args =
        [
            number("gpus", "N", "Devices in all").required(true),
            number("per-node", "N", "Devices in a node [default: the machine's]"),
            Arg::new("memory").long("memory").value_name("BYTES").value_parser(bytes).help(
                "What a rank may hold [default: the file's, or the machine's less its reserve]",
            ),
            Arg::new("machine")
                .long("machine")
                .value_name("NAME|FILE")
                .default_value("a100")
                .help("a100, a800, h100, h200, or a file of costs with rates"),
            Arg::new("global-batch")
                .long("global-batch")
                .value_name("SAMPLES|TOKENS")
                .help("Samples of a step, of all ranks, or `4M tokens` [default: the file's]"),
            Arg::new("cpu")
                .long("cpu")
                .action(ArgAction::SetTrue)
                .help("Ranks that compute on CPUs; with a file, that is its device"),
        ];
    args.into_iter().map(|arg| arg.help_heading("Cluster")).collect()
}

fn fixed_args() -> Vec<Arg> {
    let args = [
        number("pp", "P", "Pipeline ranks"),
        number("zero3", "D", "ZeRO-3 ranks"),
        number("dp", "K", "Replicas"),
        number("virtual", "V", "Stages on each rank"),
        number("unit", "U", "Micro-batches of a unit"),
        number("micro-batch-size", "N", "Samples of a micro-batch"),
        Arg::new("recompute")
            .long("recompute")
            .value_name("WHAT[:out=host|DIR]")
            .value_parser(|text: &str| recompute(text).map(|_| text.to_string()))
            .help("What B computes again (none, selective, full, auto), and where F may put out"),
        Arg::new("schedule")
            .long("schedule")
            .value_name("KIND[:slices=N]")
            .value_parser(|text: &str| schedule(text).map(|_| text.to_string()))
            .help("The kind of schedule, and slices of a sample (N or auto)"),
        Arg::new("head-split")
            .long("head-split")
            .value_name("WHEN")
            .value_parser(["auto", "off"])
            .help("Whether pipeline ranks may share a large head [default: as runs do]")
            .long_help(
                "Whether pipeline ranks may share a large head. By default they do where runs do: \
                 on CPUs, but with some optimizers. With auto for other runs the plan tells what \
                 it would come to, and the commands keep the head whole.",
            ),
    ];
    args.into_iter().map(|arg| arg.help_heading("Given rather than searched for")).collect()
}

fn output_args() -> Vec<Arg> {
    let args = [
        Arg::new("json").long("json").action(ArgAction::SetTrue).help("The plan as JSON"),
        Arg::new("out")
            .short('o')
            .long("out")
            .value_name("FILE.html")
            .value_parser(value_parser!(PathBuf))
            .help("A page with time over memory, the schedule, and memory over time"),
        number("explain", "N", "What layout N's step and memory are made of"),
        Arg::new("against")
            .long("against")
            .value_name("RUN.jsonl")
            .value_parser(value_parser!(PathBuf))
            .help("Metrics of a run of the first layout: predicted beside measured"),
        Arg::new("launch")
            .long("launch")
            .value_name("LAUNCHER")
            .value_parser(PossibleValuesParser::new(Launcher::ALL.map(|(name, _)| name)))
            .conflicts_with_all(["json", "against"])
            .help("The file that starts the first layout (or --explain N) on a cluster")
            .long_help(
                "The file that starts the first layout, or that of --explain, on a cluster, on \
                 standard output: a batch script for slurm, a manifest for k8s, a script for each \
                 node with torchrun. docs/launch.md has what is to be filled in.",
            ),
        trial::arg("Output"),
        number("width", "COLUMNS", "Columns of the text, 60 to 200 [default: the terminal's]"),
    ];
    args.into_iter().map(|arg| arg.help_heading("Output")).collect()
}

/// Plans and shows the plan.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    if let Some(out) = matches.get_one::<PathBuf>("out") {
        let named = ["machine", "model"]
            .map(|name| matches.try_get_one::<String>(name).ok().flatten().map(PathBuf::from));
        let files = ["config", "against"].map(|name| matches.get_one::<PathBuf>(name));
        keep_inputs(out, files.into_iter().chain(named.each_ref().map(Option::as_ref)).flatten())?;
    }
    let asked = job(matches)?;
    let job = &asked.job;
    let plan = planned(&asked, matches.get_one::<usize>("try").copied())?;
    let size = |name: &str| matches.get_one::<usize>(name).copied();
    let columns = || usize::from(console::Term::stdout().size_checked().map_or(100, |s| s.1));
    let width = size("width").unwrap_or_else(columns);
    if let Some(path) = matches.get_one::<PathBuf>("out") {
        write(path, page::html(&plan, job).map_err(bad)?.as_bytes())?;
    }
    if let Some(name) = matches.get_one::<String>("launch") {
        say(launch_file(name, &asked, &plan, size("explain").unwrap_or(1))?.trim_end());
    } else if matches.get_flag("json") {
        let json = serde_json::to_string_pretty(&plan).map_err(Failure::failed_run)?;
        say(json);
    } else if let Some(path) = matches.get_one::<PathBuf>("against") {
        let lines = file("against", path)?;
        let index = size("explain").unwrap_or(1).saturating_sub(1);
        say(against::text(&plan, index, &lines).map_err(bad)?);
    } else if let Some(number) = size("explain") {
        let reported = number.checked_sub(1).and_then(|i| text::explain(&plan, i, width));
        say(reported.ok_or_else(|| no_layout(number, &plan))?);
    } else {
        say(text::text(&plan, width));
    }
    Ok(())
}

/// The file that starts layout `number`, from 1.
fn launch_file(
    name: &str,
    asked: &PlanRequest,
    plan: &LayoutPlan,
    number: usize,
) -> Result<String, Failure> {
    let engine = asked.config.engine;
    if engine != EngineKind::Nccl {
        return Err(Failure::bad_input(format!(
            "launch = {name}: starts runs with engine nccl on GPUs, and this plan is for engine \
             {engine}; leave out --cpu, or set engine = \"nccl\" and device = \"cuda\" in the file"
        )));
    }
    let chosen = number.checked_sub(1).and_then(|i| plan.layouts.get(i));
    let chosen = chosen.ok_or_else(|| no_layout(number, plan))?;
    if let Some(feature) = chosen.only_on_cpus {
        let why = feature.why();
        return Err(Failure::bad_input(format!(
            "launch = {name}: runs on GPUs refuse layout {number}: {why}; use another layout or \
             model, or plan with --cpu"
        )));
    }
    let (_, launcher) = Launcher::ALL.into_iter().find(|(known, _)| *known == name).expect("clap");
    let places = nodes(asked.job.gpus, asked.job.machine.per_node).map_err(bad)?;
    Ok(launcher.file(&chosen.command, places))
}

fn no_layout(number: usize, plan: &LayoutPlan) -> Failure {
    let layouts = plan.layouts.len();
    Failure::bad_input(format!(
        "explain = {number}: the plan has {layouts} layouts; use 1 to {layouts}"
    ))
}

/// The plan of what is asked, whose commands run as they stand.
fn planned(asked: &PlanRequest, tries: Option<usize>) -> Result<LayoutPlan, Failure> {
    let mut plan = trial::plan(&asked.job, &asked.flags, &asked.config, tries)?;
    for ranked in &mut plan.layouts {
        let over = asked.over_file(&ranked.planned.layout);
        ranked.command = [ranked.command.as_str(), &over].join(" ").trim_end().to_string();
    }
    Ok(plan)
}

pub(crate) fn bad(error: PlanError) -> Failure {
    Failure::bad_input(error)
}

fn file(field: &str, path: &Path) -> Result<String, Failure> {
    let works = match field {
        "against" => "the file that `zeropp run --metrics RUN.jsonl` wrote",
        _ => "a file of settings, such as `zeropp run --print-config` prints",
    };
    read_text(path, FILE_MAX).map_err(|e| {
        let path = path.display();
        Failure::bad_input(format!("{field} = {path}: cannot be read ({e}); use {works}"))
    })
}
