//! `zeropp eval`: the loss of a model on data.

use std::path::{Path, PathBuf};

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use zeropp::config::{Config, OPTIONS, OptionInfo, Table};
use zeropp::data::{Dataset, SplitPart};
use zeropp::{Evaluation, Trainer, config_of, split_of};

use crate::args::{about, ema, reading, trained_model};
use crate::failure::Failure;
use crate::figures::say;
use crate::fit::check_tokens;
use crate::progress::evaluated;
use crate::stderr;

const ABOUT: &str = "Measure the loss and the perplexity of a model on data\n\n\
Takes a checkpoint of any layout, a Hugging Face folder or a GGUF file. Samples are read one after \
another from the start of the data, and each token but the first is predicted once, whatever the \
micro-batch size. Of the data that a run split, the part that it kept for validation is measured. \
The mesh changes no bit of the loss.";

const EXAMPLES: &str = "\
Examples:
  zeropp eval checkpoints --data held-out.txt                the newest checkpoint of a run
  zeropp eval checkpoints --data book.txt                    what the run kept of it (its --split)
  zeropp eval checkpoints --data book.txt --part all         all of it
  zeropp eval checkpoints/step-000100 --data held-out.bin --eval-steps 20
  zeropp eval SmolLM2 --data held-out.bin --pp 2 --zero3 2   tokens of that model's tokenizer
  zeropp eval checkpoints --data held-out.txt --json | jq .loss

Exit codes: 0 measured, 2 bad input, 1 the run failed.";

/// The parts of data that may be measured on.
const VALIDATION: &str = "validation";
const TRAINING: &str = "training";
const ALL: &str = "all";
/// The settings that may be given, beside the data.
const SETTINGS: [&str; 14] = [
    "split",
    "eval-steps",
    "seq",
    "micro-batch-size",
    "tokenizer",
    "document-mask",
    "document-end",
    "loss-mask",
    "vocab",
    "precision",
    "device",
    "pp",
    "zero3",
    "dp",
];

fn offered() -> impl Iterator<Item = &'static OptionInfo> {
    OPTIONS.iter().filter(|option| SETTINGS.contains(&option.key))
}

/// The arguments of `zeropp eval`.
pub(crate) fn command() -> Command {
    let flag = |option: &'static OptionInfo| {
        let help = match option.key {
            "eval-steps" => {
                "Batches of the data to use, each of 2 x pp x zero3 x dp x micro-batch-size \
                 samples; 0 uses all of it [default: 0]"
                    .into()
            }
            "split" => {
                "Shares of the data for training and validation, as in 98,2 [default: the run's, \
                 of the data that it was trained on]"
                    .into()
            }
            "seq" => "Tokens in a sample [default: the checkpoint's]".into(),
            "vocab" => "Token ids that the model knows [default: the model's]".into(),
            "tokenizer" | "precision" | "document-mask" | "document-end" | "loss-mask" => {
                format!("{} [default: the run's]", about(option))
            }
            _ => about(option),
        };
        let arg = Arg::new(option.key).long(option.key).value_name(option.value_name).help(help);
        reading(arg.hide(!option.is_setting()), option)
    };
    Command::new("eval")
        .about("Measure the loss and the perplexity of a model on data")
        .long_about(ABOUT)
        .after_help(EXAMPLES)
        .arg(trained_model())
        .arg(ema())
        .arg(
            Arg::new("json")
                .long("json")
                .action(ArgAction::SetTrue)
                .help("Print the figures as JSON, with all digits"),
        )
        .arg(
            Arg::new("data")
                .long("data")
                .value_parser(value_parser!(PathBuf))
                .value_name("PATH")
                .required(true)
                .help("A file or folder of text, or a file of tokens"),
        )
        .arg(
            Arg::new("part")
                .long("part")
                .value_name("PART")
                .value_parser(PossibleValuesParser::new([VALIDATION, TRAINING, ALL]))
                .help("The part of split data to measure on [default: validation]"),
        )
        .args(offered().map(flag))
}

/// The part of the data at `path` that is measured on, as flags and the run of the model say, and
/// the same in words.
fn part(
    config: &mut Config,
    matches: &ArgMatches,
    model: &Path,
    path: &Path,
) -> Result<String, Failure> {
    let asked = matches.get_one::<String>("part").map(String::as_str);
    let (data, given) = (path.display(), config.split.is_some());
    if !given {
        let opened = Dataset::open(path, config.tokenizer).map_err(zeropp::Error::from)?;
        config.split = split_of(model, &opened)?;
    }
    let Some(split) = config.split.clone().filter(|_| asked != Some(ALL)) else {
        config.split = None;
        return match asked {
            Some(part) if part != ALL => Err(Failure::bad_input(format!(
                "part = {part}: {data} is not known to be split; say how with --split, as in \
                 98,2, or use --part all"
            ))),
            _ => Ok(format!("all of {data}")),
        };
    };
    let is_training = asked == Some(TRAINING);
    config.eval_part = Some(if is_training { SplitPart::Training } else { SplitPart::Validation });
    config.eval_data = None;
    let part = if is_training { "trained on" } else { "kept for validation" };
    let whose = if given { "split" } else { "the run's split" };
    Ok(format!("the part of {data} that is {part} ({whose} {split})"))
}

/// Measures and prints.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let path = |name: &str| matches.get_one::<PathBuf>(name).cloned().expect("required");
    let mut given = Table::new();
    for option in offered() {
        if let Some(text) = matches.get_one::<String>(option.key) {
            option.add_to(&mut given, text).map_err(Failure::bad_input)?;
        }
    }
    let names_tokens = given.contains_key("tokenizer");
    let names_end = given.contains_key("document-end");
    let names_mask = given.contains_key("document-mask");
    let config = config_of(&path("model"))?;
    let config = Config { eval_steps: 0, init_ema: matches.get_flag("ema"), ..config };
    let mut config = config.with(given).map_err(Failure::bad_input)?;
    // The run's end of a document has no use without its mask.
    config.document_end = config.document_end.filter(|_| config.document_mask || names_end);
    let data = path("data");
    let is_indexed = Dataset::is_indexed(&data);
    if config.document_mask && !names_mask && config.document_end.is_none() && !is_indexed {
        let data = data.display();
        stderr::tell(&format!(
            "note: {data} does not say where documents begin, so none are kept apart"
        ));
        config.document_mask = false;
    }
    check_tokens(&config, &path("model"), config.vocab, names_tokens, &data)?;
    let mut config = Config {
        // Nothing is trained, on whatever this is.
        data: Some(data.clone()),
        eval_data: Some(data.clone()),
        eval_every: 1,
        steps: 1,
        // A batch keeps every rank of a pipeline at work.
        micro_batches: Some(2 * config.pp),
        unit: Some(2 * config.pp),
        ..config
    };
    let measured = part(&mut config, matches, &path("model"), &data)?;
    let trainer = Trainer::new(config)?;
    for note in &trainer.plan().notes {
        stderr::tell(&format!("note: {note}"));
    }
    stderr::tell(&format!("measured on {measured}"));
    // One figure alone is the lowest of none.
    let evaluation = Evaluation { best: false, ..trainer.evaluate()? };
    match matches.get_flag("json") {
        true => say(json(&evaluation, &measured)),
        false => say(evaluated(&evaluation)),
    }
    Ok(())
}

/// The figures, each of which reads back to the same bits.
fn json(evaluation: &Evaluation, measured: &str) -> String {
    let mut value = serde_json::to_value(evaluation).expect("plain numbers");
    let figures = value.as_object_mut().expect("figures by name");
    figures.remove("best");
    figures.insert("measured_on".into(), measured.into());
    serde_json::to_string_pretty(&value).expect("plain data")
}
