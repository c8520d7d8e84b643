//! `zeropp plan`: the best layouts for a model on a cluster.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use zeropp::config::Bytes;
use zeropp::pipeline::costs::{Form, Machine};
use zeropp_core::choice::Activation;
use zeropp_core::files::read_text;
use zeropp_core::model::hf_config;
use zeropp_core::model::presets::{PRESETS, Preset};
use zeropp_plan::layout::{Fixed, Job, KINDS, Recompute};
use zeropp_plan::model::ModelSizes;
use zeropp_plan::plan::Plan;
use zeropp_plan::{PlanError, against, machines, page, text};

use crate::Failure;
use crate::figures::say;
use crate::schedule::write;

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
  What the third layout's step is made of:
      zeropp plan --model 14.6b --gpus 32 --machine a800 --global-batch 192 --explain 3
  After the run: predicted beside measured:
      zeropp plan --model gpt2 --gpus 8 --machine mine.toml --global-batch 64 --against run.jsonl

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
        .args(model_args())
        .args(cluster_args())
        .args(fixed_args())
        .args(output_args())
}

fn number(name: &'static str, value: &'static str, help: &'static str) -> Arg {
    Arg::new(name)
        .long(name)
        .value_name(value)
        .value_parser(value_parser!(usize))
        .allow_negative_numbers(true)
        .help(help)
}

fn model_args() -> Vec<Arg> {
    let model = Arg::new("model").long("model").value_name("NAME|FILE|DIR").help(
        "A model as `run` takes it: preset, config.json, folder; or a paper's (14.6b, 175b, ..)",
    );
    let tied = Arg::new("tied").long("tied").action(ArgAction::SetTrue);
    let mut args = vec![
        model,
        number("layers", "N", "Transformer blocks"),
        number("hidden", "N", "Hidden size"),
        number("heads", "N", "Attention heads"),
        number("vocab", "N", "Rows of the embedding"),
        number("seq", "N", "Tokens of a sample [default: the model's]"),
        tied.help("The head shares the embedding's weights"),
    ];
    args = args.into_iter().map(|arg| arg.help_heading("Model")).collect();
    args
}

fn cluster_args() -> Vec<Arg> {
    let bytes = |text: &str| {
        let works = "expected bytes, such as 80G or 74.5GiB";
        Bytes::parse(text).filter(|b| b.0 > 0).ok_or(works.to_string())
    };
    let args = [
        number("gpus", "N", "Devices in all").required(true),
        number("per-node", "N", "Devices in a node [default: the machine's]"),
        Arg::new("memory")
            .long("memory")
            .value_name("BYTES")
            .value_parser(bytes)
            .help("What a rank may hold [default: 95 % of the machine's]"),
        Arg::new("machine")
            .long("machine")
            .value_name("NAME|FILE")
            .default_value("a100")
            .help("a100, a800, h100, h200, or a file of costs with rates"),
        number("global-batch", "N", "Samples of a step, of all ranks").required(true),
        Arg::new("cpu")
            .long("cpu")
            .action(ArgAction::SetTrue)
            .help("Ranks that compute in fp32 on CPUs"),
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
            .value_name("WHAT")
            .value_parser(["none", "selective", "full"])
            .help("What B computes again"),
        Arg::new("schedule")
            .long("schedule")
            .value_name("KIND")
            .value_parser(PossibleValuesParser::new(KINDS))
            .help("The kind of schedule"),
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
        number("width", "COLUMNS", "Columns of the text, 60 to 200 [default: the terminal's]"),
    ];
    args.into_iter().map(|arg| arg.help_heading("Output")).collect()
}

/// Plans and shows the plan.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let (job, flags) = job(matches)?;
    let plan = Plan::new(&job, &flags).map_err(bad)?;
    let size = |name: &str| matches.get_one::<usize>(name).copied();
    let columns = || usize::from(console::Term::stdout().size_checked().map_or(100, |s| s.1));
    let width = size("width").unwrap_or_else(columns);
    if let Some(path) = matches.get_one::<PathBuf>("out") {
        write(path, page::html(&plan, &job).map_err(bad)?.as_bytes())?;
    }
    if matches.get_flag("json") {
        let json = serde_json::to_string_pretty(&plan).map_err(Failure::failed_run)?;
        say(json);
    } else if let Some(path) = matches.get_one::<PathBuf>("against") {
        let lines = file("against", path)?;
        let index = size("explain").unwrap_or(1).saturating_sub(1);
        say(against::text(&plan, index, &lines).map_err(bad)?);
    } else if let Some(number) = size("explain") {
        let told = number.checked_sub(1).and_then(|i| text::explain(&plan, i, width));
        say(told.ok_or_else(|| {
            let layouts = plan.layouts.len();
            Failure::bad_input(format!(
                "explain = {number}: the plan has {layouts} layouts; use 1 to {layouts}"
            ))
        })?);
    } else {
        say(text::text(&plan, width));
    }
    Ok(())
}

fn bad(error: PlanError) -> Failure {
    Failure::bad_input(error)
}

/// What is to be planned, and the flags of `zeropp run` that say which model it is.
fn job(matches: &ArgMatches) -> Result<(Job, String), Failure> {
    let size = |name: &str| matches.get_one::<usize>(name).copied();
    let machine = machine(matches)?;
    let on_gpu = !matches.get_flag("cpu");
    let (model, flags) = model(matches)?;
    let usable = (machine.memory_bytes * 0.95) as u64;
    let memory = matches.get_one::<Bytes>("memory").map_or(usable, |bytes| bytes.0);
    let recompute = matches.get_one::<String>("recompute").map(|what| match what.as_str() {
        "full" => Recompute::Full,
        "selective" => Recompute::Selective,
        _ => Recompute::None,
    });
    let fixed = Fixed {
        pp: size("pp"),
        zero3: size("zero3"),
        dp: size("dp"),
        virtual_stages: size("virtual"),
        unit: size("unit"),
        micro_batch_size: size("micro-batch-size"),
        recompute,
        schedule: matches.get_one::<String>("schedule").cloned(),
    };
    let job = Job {
        gpus: size("gpus").expect("required"),
        global_batch: size("global-batch").expect("required"),
        memory,
        model,
        machine,
        on_gpu,
        fixed,
    };
    Ok((job, flags))
}

fn flags(model: &ModelSizes) -> String {
    let tied = if model.tied { " --tied" } else { "" };
    format!(
        "--layers {} --hidden {} --heads {} --seq {} --vocab {}{tied}",
        model.layers, model.hidden, model.heads, model.seq, model.vocabulary
    )
}

fn machine(matches: &ArgMatches) -> Result<Machine, Failure> {
    let name = matches.get_one::<String>("machine").expect("has a default");
    let path = Path::new(name);
    let form = path.extension().and_then(|e| e.to_str()).and_then(Form::from_extension);
    let read = match form {
        Some(form) => machines::read(name, &file("machine", path)?, form),
        None => machines::named(name),
    };
    let mut machine = read.map_err(bad)?;
    if let Some(per_node) = matches.get_one::<usize>("per-node") {
        if *per_node == 0 {
            return Err(Failure::bad_input("per-node = 0: a node has a device; use 1 or more"));
        }
        machine.per_node = *per_node;
    }
    Ok(machine)
}

/// The model, and the flags of `zeropp run` that say which it is.
fn model(matches: &ArgMatches) -> Result<(ModelSizes, String), Failure> {
    let size = |name: &str| matches.get_one::<usize>(name).copied();
    let needed = |name: &str| {
        size(name).ok_or_else(|| {
            Failure::bad_input(format!(
                "{name} is missing: give --model, or --layers, --hidden, --heads, --vocab and --seq"
            ))
        })
    };
    let mut model = match matches.get_one::<String>("model") {
        Some(name) => named_model(name)?,
        None => {
            let sizes = ["layers", "hidden", "heads", "vocab", "seq"].map(needed);
            let [layers, hidden, heads, vocab, seq] = sizes;
            let gpt = ModelSizes::gpt("a GPT", [layers?, hidden?, heads?, vocab?, seq?]);
            ModelSizes { tied: matches.get_flag("tied"), ..gpt }
        }
    };
    if matches.contains_id("model") {
        let typed = ["layers", "hidden", "heads", "vocab"].into_iter().find(|n| size(n).is_some());
        if let Some(typed) = typed {
            return Err(Failure::bad_input(format!(
                "{typed}: the model's own is known; leave it out, or leave --model out"
            )));
        }
    }
    model.seq = size("seq").unwrap_or(model.seq);
    let name = matches.get_one::<String>("model");
    let flags = match name.filter(|name| ModelSizes::of_a_paper(name).is_none()) {
        Some(name) => format!("--model {name} --seq {}", model.seq),
        None => flags(&model),
    };
    Ok((model, flags))
}

/// A model of a paper, or one that `zeropp run --model` takes.
fn named_model(name: &str) -> Result<ModelSizes, Failure> {
    if let Some(model) = ModelSizes::of_a_paper(name) {
        return Ok(model);
    }
    let wrong = |problem: &dyn Display| Failure::bad_input(format!("model = {name}: {problem}"));
    let decoder = match Preset::find(name) {
        Some(preset) => preset.decoder,
        None if Path::new(name).is_dir() || name.ends_with(".json") => {
            hf_config::read(Path::new(name)).map_err(|e| wrong(&e))?.decoder
        }
        None => {
            let names: Vec<&str> =
                PRESETS.iter().map(|p| p.name).chain(ModelSizes::paper_names()).collect();
            return Err(wrong(&format!(
                "not a model that is known by name; use one of {}, or a config.json",
                names.join(", ")
            )));
        }
    };
    let d = &decoder;
    if d.head_dim * d.heads != d.hidden || d.qk_norm {
        let problem = "plans count heads of hidden / heads elements without norms of their own; \
                       give the sizes of a model like it";
        return Err(wrong(&problem));
    }
    Ok(ModelSizes {
        name: name.into(),
        layers: d.layers,
        hidden: d.hidden,
        heads: d.heads,
        kv_heads: d.kv_heads,
        intermediate: d.intermediate,
        gated: d.activation == Activation::Swiglu,
        vocabulary: d.vocabulary,
        seq: d.context,
        tied: d.tied,
    })
}

fn file(field: &str, path: &Path) -> Result<String, Failure> {
    read_text(path, FILE_MAX).map_err(|e| {
        Failure::bad_input(format!("{field} = {}: cannot be read ({e})", path.display()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(line: &str) -> Result<(Job, String), String> {
        let words = std::iter::once("plan").chain(line.split(' '));
        let matches = command().try_get_matches_from(words).map_err(|e| e.to_string())?;
        job(&matches).map_err(|failure| failure.message)
    }

    /// The planner counts layers by itself; a run must count the same bytes, kind by kind.
    #[test]
    fn a_plan_holds_what_a_run_of_it_predicts() {
        for (mesh, fixed) in [
            ("1", "--pp 1 --zero3 1 --recompute none"),
            ("4", "--pp 2 --zero3 2 --virtual 2 --recompute none --schedule zeropp"),
            ("4", "--pp 4 --zero3 1 --virtual 1 --recompute none --schedule 1f1b"),
            ("8", "--pp 2 --zero3 2 --virtual 3 --recompute full --schedule zeropp"),
            ("8", "--pp 2 --zero3 2 --virtual 2 --recompute selective --schedule bf-pp"),
        ] {
            let line = format!(
                "--cpu --layers 6 --hidden 64 --heads 4 --seq 32 --vocab 300 --global-batch 16 \
                 --gpus {mesh} --memory 1GiB {fixed}"
            );
            let (job, _) = plan(&line).unwrap();
            let first = &Plan::new(&job, "").unwrap().layouts[0].planned;
            let layout = &first.layout;
            let stages: Vec<String> = first.blocks.iter().map(ToString::to_string).collect();
            let config = zeropp::Config {
                pp: layout.pp,
                zero3: layout.zero3,
                dp: layout.dp,
                zero1: layout.zero1,
                virtual_stages: Some(layout.virtual_stages),
                unit: Some(layout.unit),
                micro_batches: Some(layout.micro_batches),
                micro_batch_size: layout.micro_batch_size,
                schedule: layout.schedule.into(),
                prefetch: layout.prefetch,
                recompute: match layout.recompute {
                    Recompute::None => zeropp::config::Recompute::None,
                    Recompute::Selective => zeropp::config::Recompute::Selective,
                    Recompute::Full => zeropp::config::Recompute::Full,
                },
                stages: Some(stages.join(",")),
                layers: 6,
                hidden: 64,
                heads: 4,
                seq: 32,
                vocab: Some(300),
                ..zeropp::Config::default()
            };
            let trainer = zeropp::Trainer::new(config).unwrap();
            for (mine, run) in first.memory.iter().zip(&trainer.plan().ranks) {
                let run = run.at_once;
                let run = [
                    run.parameter_shard,
                    run.gradient_shard,
                    run.optimizer,
                    run.gathered,
                    run.gradient,
                    run.activation,
                    run.weight_stash,
                    run.communication,
                ];
                assert_eq!(mine.kinds().map(|(_, bytes)| bytes), run, "{layout}");
            }
        }
    }

    #[test]
    fn the_command_is_well_formed() {
        command().debug_assert();
    }

    #[test]
    fn flags_become_a_job() {
        let line = "--model 14.6b --gpus 32 --global-batch 192 --machine a800 --seq 2048 \
                    --memory 40GiB --pp 4 --recompute full";
        let (job, flags) = plan(line).unwrap();
        assert_eq!((job.gpus, job.global_batch, job.memory), (32, 192, 40 << 30));
        assert_eq!((job.model.seq, job.fixed.pp), (2048, Some(4)));
        assert_eq!(job.fixed.recompute, Some(Recompute::Full));
        assert_eq!(flags, "--layers 48 --hidden 5120 --heads 40 --seq 2048 --vocab 51200");
    }

    #[test]
    fn bad_input_is_one_clear_message() {
        for (line, said) in [
            ("--gpus -1 --global-batch 8 --model gpt2", "invalid value '-1'"),
            ("--gpus NaN --global-batch 8 --model gpt2", "invalid value 'NaN'"),
            ("--gpus 8 --global-batch 8 --model gpt2 --memory 0", "expected bytes"),
            ("--gpus 8 --global-batch 8 --model gpt2 --memory NaN", "expected bytes"),
            ("--gpus 8 --global-batch 8 --model gpt9", "model = gpt9: not a model"),
            ("--gpus 8 --global-batch 8 --model none.json", "model = none.json: none.json: "),
            ("--gpus 8 --global-batch 8 --model gpt2 --layers 3", "layers: the model's own"),
            ("--gpus 8 --global-batch 8 --layers 3", "hidden is missing"),
            ("--gpus 8 --global-batch 8 --model gpt2 --machine b7", "machine = b7: neither"),
            ("--gpus 8 --global-batch 8 --model gpt2 --machine b7.toml", "cannot be read"),
            ("--gpus 8 --global-batch 8 --model gpt2 --per-node 0", "per-node = 0"),
        ] {
            let error = plan(line).unwrap_err();
            assert!(error.contains(said), "{line}: {error}");
        }
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("m.toml");
        std::fs::write(&file, "flops_per_s = 1e12").unwrap();
        let line = format!("--gpus 8 --global-batch 8 --model gpt2 --machine {}", file.display());
        let said = plan(&line).unwrap_err();
        assert!(said.contains("zero3_bytes_per_s is missing"), "{said}");
    }
}
