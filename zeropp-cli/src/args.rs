//! The command line. The flags of `run` are the table of settings in `zeropp::config`, so that a
//! flag, its key in a file and its manual cannot differ.

use std::collections::BTreeSet;
use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use zeropp::config::{Config, OPTIONS, OptionInfo, OptionKind, Table, Value};
use zeropp::{config_of, is_model, with_model_of_checkpoint, with_model_of_weights};

use crate::Failure;
use crate::fit::check_tokens;

const RUN_ABOUT: &str = "Train a model\n\n\
Flags override CONFIG.toml, and CONFIG.toml overrides the defaults. In the file a setting has the \
name of its flag, as in `micro-batches = 16`; relative paths in it are relative to its folder. A \
run has P x D x K ranks; with engine threads they all run on this machine, with nothing to set up.";

/// Where the ranks of a failed run leave their records.
const FLIGHT_DIR: &str = "zeropp-failed";

/// The settings that most runs use: the short help has these alone.
const USUAL: [&str; 8] = ["pp", "zero3", "unit", "data", "steps", "lr", "save", "metrics"];

pub(crate) const FIRST_STEPS: &str = "\
Examples:
  zeropp run --pp 4 --zero3 8 --unit 8              a small GPT on 32 ranks
  zeropp run --data book.txt --save ckpt --resume   your text; resumes from ckpt
  zeropp run --pp 4 --zero3 8 --dry-run             mesh, bubble and memory";

/// The last line of the short help of `run`.
const MORE: &str = "`zeropp run --help` is the manual: all settings, signals and exit codes.";

pub(crate) const EXAMPLES: &str = "\
Examples:
  Train a small GPT on built-in text, 32 ranks as threads:
      zeropp run --pp 4 --zero3 8 --unit 8
  Train on your own text, with the metrics of every step and a trace for Perfetto:
      zeropp run --pp 2 --zero3 2 --unit 3 --data book.txt --metrics out.jsonl --trace out.json
  See the mesh, the bubble and the memory of a run without starting it:
      zeropp run --pp 4 --zero3 8 --unit 8 --dry-run
  Keep the settings in a file, and override one of them:
      zeropp run --pp 4 --zero3 8 --unit 8 --print-config > run.toml
      zeropp run run.toml --lr 1e-3
  Save, and resume where an earlier start of the same command was stopped:
      zeropp run run.toml --save checkpoints --save-every 100 --resume

Signals: INT (Ctrl-C), TERM and HUP stop after the current step and save, a second one stops at
once; USR1 saves and goes on; QUIT writes what every rank is doing, for `zeropp why`, and stops.
Exit codes: 0 done, 2 bad input (nothing was started), 1 the run failed, 130 stopped by INT, 143 by
TERM.";

/// The work of a `zeropp run`.
pub(crate) struct Run {
    /// The settings, flags applied.
    pub(crate) config: Config,
    /// Print the settings and stop.
    pub(crate) print_config: bool,
    /// Print the plan and stop.
    pub(crate) dry_run: bool,
    /// Where the plan goes as a page, too.
    pub(crate) page: Option<PathBuf>,
}

/// The flags of `zeropp run`.
pub(crate) fn run_command() -> Command {
    with_settings(Command::new("run"), |_| true)
        .about("Train a model")
        .long_about(RUN_ABOUT)
        .after_help(format!("{FIRST_STEPS}\n\n{MORE}"))
        .after_long_help(EXAMPLES)
        .arg(
            Arg::new("quiet")
                .short('q')
                .long("quiet")
                .help_heading("Output")
                .hide_short_help(true)
                .action(ArgAction::SetTrue)
                .help("Print only how the run begins, what goes wrong, and the summary"),
        )
        .next_help_heading("Instead of training")
        .arg(
            Arg::new("print-config")
                .long("print-config")
                .hide_short_help(true)
                .action(ArgAction::SetTrue)
                .help("Print all settings as a file; those that follow from others are comments"),
        )
        .arg(
            Arg::new("dry-run")
                .long("dry-run")
                .value_name("PAGE.html")
                .num_args(0..=1)
                .require_equals(true)
                .default_missing_value("")
                .value_parser(value_parser!(String))
                .help("Print the mesh, the schedule's bubble and the memory by kind")
                .long_help(
                    "Print the mesh, the schedule's bubble and the memory by kind\n\nWith \
                     =PAGE.html they are also written as a page, with the learning rate of every \
                     step drawn.",
                ),
        )
}

/// Adds the file and the flags of all settings; the help shows those that `shown` picks.
pub(crate) fn with_settings(command: Command, shown: fn(&OptionInfo) -> bool) -> Command {
    let defaults = Config::default();
    let file = Arg::new("config")
        .value_name("CONFIG.toml")
        .value_parser(value_parser!(PathBuf))
        .help("A file of settings; flags override it");
    let flag = |option: &OptionInfo| {
        flag(option, defaults.get(option.key))
            .hide(!shown(option))
            .hide_short_help(!USUAL.contains(&option.key))
    };
    let undo =
        |undo: &Undo| undo.arg().hide(!OPTIONS.iter().any(|o| o.key == undo.keys[0] && shown(o)));
    command.arg(file).args(OPTIONS.iter().map(flag)).args(UNDO.iter().map(undo))
}

/// A flag that takes back what a file says.
struct Undo {
    flag: &'static str,
    /// The settings that are then as if they were not given.
    keys: &'static [&'static str],
    help: &'static str,
}

const UNDO: [Undo; 3] = [
    Undo {
        flag: "no-metrics",
        keys: &["metrics"],
        help: "Write no metrics, whatever CONFIG.toml says",
    },
    Undo { flag: "no-trace", keys: &["trace"], help: "Write no trace, whatever CONFIG.toml says" },
    Undo {
        flag: "no-save",
        keys: &["save", "save-every", "resume"],
        help: "Neither save nor resume, whatever CONFIG.toml says",
    },
];

impl Undo {
    fn arg(&self) -> Arg {
        Arg::new(self.flag)
            .long(self.flag)
            .action(ArgAction::SetTrue)
            .help_heading("Output")
            .hide_short_help(true)
            .conflicts_with_all(self.keys)
            .help(self.help)
    }
}

/// The flag of a setting.
pub(crate) fn flag(option: &OptionInfo, default: Option<Value>) -> Arg {
    let (short, mut long) = manual(option.doc, default);
    if option.key == "schedule" {
        long.push_str(&format!("\n\n{}\n", crate::schedule::kinds()));
    }
    let arg = Arg::new(option.key)
        .long(option.key)
        .help_heading(option.heading)
        .value_name(option.value_name)
        .help(short)
        .long_help(long)
        .allow_negative_numbers(true);
    match option.kind {
        OptionKind::Choice(names) => arg.value_parser(PossibleValuesParser::new(names)),
        OptionKind::Switch => switch(arg),
        // Several are a mix of sources.
        OptionKind::Path if option.key == "data" => arg.action(ArgAction::Append),
        kind @ OptionKind::Resume => may_stand_alone(arg)
            .value_parser(move |text: &str| kind.parse(text).map(|_| text.to_string())),
        kind => arg.value_parser(move |text: &str| kind.parse(text).map(|_| text.to_string())),
    }
}

/// A setting's line in the short help, without its default.
pub(crate) fn about(option: &OptionInfo) -> String {
    manual(option.doc, None).0
}

/// Whether the mean of a checkpoint's weights is taken in their place.
pub(crate) fn ema() -> Arg {
    Arg::new("ema")
        .long("ema")
        .action(ArgAction::SetTrue)
        .help("Use the moving average of the weights that a run with --ema saved")
}

/// The model of a command that takes one as it was trained.
pub(crate) fn trained_model() -> Arg {
    Arg::new("model")
        .value_name("CHECKPOINT|FOLDER|GGUF")
        .required(true)
        .value_parser(value_parser!(PathBuf))
        .help(
            "A checkpoint, a folder of checkpoints (the newest), a Hugging Face folder, or a GGUF \
             file",
        )
}

/// A flag that is true where it stands alone.
pub(crate) fn switch(arg: Arg) -> Arg {
    may_stand_alone(arg).value_parser(["true", "false"]).hide_possible_values(true)
}

fn may_stand_alone(arg: Arg) -> Arg {
    arg.num_args(0..=1).require_equals(true).default_missing_value("true")
}

/// The first paragraph, and all of them, with the default at the end of the first.
fn manual(doc: &[&str], default: Option<Value>) -> (String, String) {
    let mut paragraphs = vec![String::new()];
    for line in doc.iter().map(|line| line.trim()) {
        let last = paragraphs.last_mut().expect("begins with one");
        match (line.is_empty(), last.is_empty()) {
            (true, _) => paragraphs.push(String::new()),
            (false, true) => last.push_str(line),
            (false, false) => last.extend([" ", line]),
        }
    }
    if let Some(value) = default {
        paragraphs[0].push_str(&format!(" [default: {}]", shown(&value)));
    }
    (paragraphs[0].clone(), paragraphs.join("\n\n"))
}

/// A default as one would type it: `zeropp`, `1e-8`, `120`.
fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Float(x) if *x != 0.0 && x.abs() < 1e-4 => format!("{x:e}"),
        Value::Float(x) => x.to_string(),
        other => other.to_string(),
    }
}

/// Reads a command line of `zeropp run`.
pub(crate) fn run(matches: &ArgMatches) -> Result<Run, Failure> {
    let page = matches.get_one::<String>("dry-run");
    Ok(Run {
        config: settings(matches)?,
        print_config: matches.get_flag("print-config"),
        dry_run: page.is_some(),
        page: page.filter(|path| !path.is_empty()).map(PathBuf::from),
    })
}

/// The settings of a command line.
pub(crate) fn settings(matches: &ArgMatches) -> Result<Config, Failure> {
    let from_file = match matches.get_one::<PathBuf>("config") {
        Some(path) => Config::load(path).map_err(Failure::bad_input)?,
        None => Config::default(),
    };
    let undone = UNDO.iter().filter(|undo| matches.get_flag(undo.flag));
    let undone: Vec<&str> = undone.flat_map(|undo| undo.keys).copied().collect();
    let mut undone = undone;
    let mut flags = Table::new();
    for option in OPTIONS {
        if let Some(text) = matches.get_one::<String>(option.key) {
            let value = option.kind.parse(text).expect("clap has parsed it");
            flags.insert(option.key.into(), value);
        }
    }
    let sources: Vec<_> = matches.get_many::<String>("data").into_iter().flatten().collect();
    if !sources.is_empty() {
        undone.extend(["data", "data-mix"]);
    }
    if let [_, _, ..] = sources.as_slice() {
        let mix = sources.iter().map(|s| s.as_str()).collect::<Vec<_>>().join(",");
        flags.remove("data");
        flags.insert("data-mix".into(), mix.into());
    }
    let given = given(matches.get_one::<PathBuf>("config"), &flags);
    let from_file = from_file.without(&undone).map_err(Failure::bad_input)?;
    let config = from_file.with(flags).map_err(Failure::bad_input)?;
    let mut config = match with_model_of_checkpoint(&config, &given)? {
        Some(resumed) => resumed,
        None => with_model_of_weights(config, &given)?,
    };
    check_data(&config, given.contains("tokenizer"))?;
    // A Rust program is asked first; whoever runs the command wants to know why it failed.
    config.flight_dir.get_or_insert_with(|| PathBuf::from(FLIGHT_DIR));
    Ok(config)
}

/// Data of a run that begins with the weights of a file or folder has that model's tokens.
fn check_data(config: &Config, insists: bool) -> Result<(), Failure> {
    let Some(from) = config.init_from.as_ref().filter(|from| is_model(from)) else { return Ok(()) };
    // The model of the weights has told it, where it was not given.
    let vocabulary = config.vocab.or_else(|| config_of(from).ok()?.vocab);
    let sources = config.sources().map_err(Failure::bad_input)?;
    let data = config.data.iter().chain(sources.iter().map(|(path, _)| path));
    // A file of weights alone does not say how many ids its model has.
    let Some(vocabulary) = vocabulary else { return Ok(()) };
    data.into_iter()
        .try_for_each(|data| check_tokens(config, from, (Some(vocabulary), insists), data))
}

/// The settings that a file or flags name.
fn given(file: Option<&PathBuf>, flags: &Table) -> BTreeSet<String> {
    // It was read before.
    let text = file.and_then(|file| std::fs::read_to_string(file).ok());
    let in_file = text.and_then(|text| text.parse::<Table>().ok()).unwrap_or_default();
    in_file.into_iter().chain(flags.clone()).map(|(key, _)| key).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::{command, helpful};
    use zeropp::config::Resume;

    fn parse(line: &str) -> Run {
        let matches = command().try_get_matches_from(line.split(' ')).unwrap();
        run(matches.subcommand_matches("run").unwrap()).unwrap_or_else(|f| panic!("{}", f.message))
    }

    #[test]
    fn the_command_is_well_formed() {
        command().debug_assert();
    }

    #[test]
    fn flags_become_settings() {
        let run = parse(
            "zeropp run --pp 4 --zero3 8 --virtual 2 --lr 1e-3 --zero1 --tied=false \
             --recompute full --data a/b.txt --timeout-s 5",
        );
        let c = run.config;
        assert_eq!((c.pp, c.zero3, c.virtual_stages, c.lr), (4, 8, Some(2), 1e-3));
        assert_eq!((c.zero1, c.tied, c.timeout_s), (true, false, 5.0));
        assert_eq!(c.recompute.name(), "full");
        assert_eq!(c.data.as_deref(), Some(std::path::Path::new("a/b.txt")));
        assert!(!run.print_config && !run.dry_run);
        for (flag, resume) in [
            ("--resume", Resume::Newest),
            ("--resume=must", Resume::Must),
            ("--resume=1200", Resume::Step(1200)),
            ("--resume=false", Resume::No),
        ] {
            assert_eq!(parse(&format!("zeropp run {flag}")).config.resume, resume);
        }
        assert!(command().try_get_matches_from(["zeropp", "run", "--resume=perhaps"]).is_err());
        let dry = parse("zeropp run --dry-run --pp 2");
        assert!(dry.dry_run && dry.page.is_none() && dry.config.pp == 2);
        let page = parse("zeropp run --dry-run=plan.html").page;
        assert_eq!(page, Some("plan.html".into()));
    }

    #[test]
    fn flags_override_a_settings_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("c.toml");
        let text =
            "metrics = 'm'\ntrace = 't'\nsave = 's'\nsave-every = 5\nresume = true\nkeep = 3";
        std::fs::write(&file, text).unwrap();
        let file = file.display();
        let c = parse(&format!("zeropp run {file} --no-save --no-metrics --no-trace")).config;
        assert_eq!((&c.save, &c.metrics, &c.trace), (&None, &None, &None));
        assert_eq!((c.save_every, c.keep), (0, 3));
        c.validate().unwrap();
        let line = "zeropp run --no-save --save x";
        assert!(command().try_get_matches_from(line.split(' ')).is_err());
    }

    #[test]
    fn suggestions_are_close_or_none() {
        let tip = |flag: &str| {
            let error = command().try_get_matches_from(["zeropp", "run", flag]).unwrap_err();
            helpful(error).to_string()
        };
        assert!(tip("--stepz").contains("'--steps'"), "{}", tip("--stepz"));
        for far in ["--silent", "--loud"] {
            assert!(!tip(far).contains("similar argument"), "{}", tip(far));
        }
    }

    #[test]
    fn the_short_help_is_one_screen_with_the_usual_settings() {
        let mut all = command().term_width(100);
        all.build();
        let help = all.find_subcommand_mut("run").unwrap().render_help().to_string();
        for key in USUAL {
            assert!(help.contains(&format!("--{key} ")), "--{key} in:\n{help}");
        }
        assert!(!help.contains("--weight-decay") && help.contains("--dry-run"), "{help}");
        assert!(help.lines().count() <= 42, "{} lines:\n{help}", help.lines().count());
    }

    #[test]
    fn help_has_every_setting_once_with_its_default() {
        let help = run_command().term_width(100).render_long_help().to_string();
        for option in OPTIONS {
            let usage = format!(" --{} <{}>", option.key, option.value_name);
            let switch = format!(" --{}[=<{}>]", option.key, option.value_name);
            let count = help.matches(&usage).count() + help.matches(&switch).count();
            assert_eq!(count, 1, "--{} in:\n{help}", option.key);
        }
        for default in ["0.003", "zeropp", "1e-8", "120", "false"] {
            assert!(help.contains(&format!("[default: {default}]")), "{default} in:\n{help}");
        }
    }
}
