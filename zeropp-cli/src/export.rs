//! `zeropp export`: a checkpoint or another model as a folder that other tools read.

use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use zeropp::weights::StoreAs;
use zeropp::{ExportOptions, export_adapter, export_checkpoint};

use crate::args::ema;
use crate::failure::Failure;
use crate::figures::{count, say, scaled};

const ABOUT: &str = "Write a checkpoint or another model as a Hugging Face folder\n\n\
Writes sharded safetensors with an index, config.json and the tokenizer's files, from a checkpoint \
of any layout, a Hugging Face folder or a GGUF file. It holds one tensor in memory at a time. The \
folder gets its name once all of it is on disk.";

const EXAMPLES: &str = "\
Examples:
  zeropp export checkpoints -o model                    the newest checkpoint of a run
  zeropp export checkpoints/step-000100 -o model --dtype bf16
  zeropp export checkpoints -o model --like SmolLM2     the tokenizer and config.json of that
  zeropp export checkpoints -o lora --adapter           the adapters alone, for peft
  zeropp export model.gguf -o model                     a folder that transformers reads

Exit codes: 0 written, 2 nothing was written.";

/// The arguments of `zeropp export`.
pub(crate) fn command() -> Command {
    let path = |name: &'static str| Arg::new(name).value_parser(value_parser!(PathBuf));
    Command::new("export")
        .about("Write a checkpoint or a GGUF file as a Hugging Face folder")
        .long_about(ABOUT)
        .after_help(EXAMPLES)
        .arg(path("checkpoint").value_name("CHECKPOINT|FOLDER|GGUF").required(true).help(
            "A checkpoint, a folder of checkpoints (the newest), a Hugging Face folder, or a \
                 GGUF file",
        ))
        .arg(
            path("output")
                .short('o')
                .long("output")
                .value_name("FOLDER")
                .required(true)
                .help("The new folder"),
        )
        .arg(
            Arg::new("dtype")
                .long("dtype")
                .value_name("TYPE")
                .value_parser(["f32", "bf16"])
                .default_value("f32")
                .help("The type of the written weights"),
        )
        .arg(path("like").long("like").value_name("PATH").help(
            "Copy the tokenizer of this model, and its config.json, which must describe the same \
             one [default: what the run began with, where it does]",
        ))
        .arg(ema())
        .arg(Arg::new("adapter").long("adapter").action(ArgAction::SetTrue).help(
            "Write the adapters of a run with lora-rank alone, as peft reads them; without it they \
             are merged into the weights",
        ))
}

/// Writes the folder and says what it holds.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let path = |name: &str| matches.get_one::<PathBuf>(name).cloned();
    let (from, to) = (path("checkpoint").expect("required"), path("output").expect("required"));
    let dtype = matches.get_one::<String>("dtype").expect("has a default").as_str();
    let store_as = if dtype == "bf16" { StoreAs::Bf16 } else { StoreAs::F32 };
    let options = ExportOptions { store_as, like: path("like"), ema: matches.get_flag("ema") };
    let report = match matches.get_flag("adapter") {
        true => export_adapter(&from, &to, store_as)?,
        false => export_checkpoint(&from, &to, &options)?,
    };
    let copied = match report.copied.is_empty() {
        true => String::new(),
        false => format!("; copied {}", report.copied.join(", ")),
    };
    let step = report.step.map_or(String::new(), |step| format!("step {step}, "));
    report.notes.iter().for_each(|note| tracing::warn!("{note}"));
    say(format!(
        "{}: {step}{} of {} parameters as {dtype}{copied}",
        to.display(),
        count(report.tensors, "tensor"),
        scaled(report.parameters as f64),
    ));
    Ok(())
}
