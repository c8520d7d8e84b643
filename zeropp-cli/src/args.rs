//! The command line. The flags of `run` are the table of settings in `zeropp::config`, so that a
//! flag, its key in a file and its manual cannot differ.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use zeropp::config::{
    Config, OPTIONS, OptimizerKind, OptionInfo, OptionKind, Table, Value, as_table,
};
use zeropp::{config_of, is_model, with_model_of_checkpoint, with_model_of_weights};

use crate::failure::Failure;
use crate::fit::check_tokens;

const RUN_ABOUT: &str = "Train a model\n\n\
Flags override CONFIG.toml, and CONFIG.toml overrides the defaults. In the file a setting has the \
name of its flag, as in `micro-batches = 16`; relative paths in it are relative to its folder. \
Values of a setting stand behind a colon, as in `--optimizer adamw:beta2=0.95,eps=1e-6`; values \
alone, as in `--optimizer beta2=0.95`, leave the setting as it is. A \
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
            .hide(!option.is_setting() || !shown(option))
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
    match option.key {
        "schedule" => long.push_str(&format!("\n\n{}", crate::schedule::kinds())),
        "optimizer" => long.push_str(&format!("\n\n{}", optimizers())),
        _ => {}
    }
    let values: Vec<String> = option.values().map(|(name, of)| value_line(name, of)).collect();
    if !values.is_empty() {
        long.push_str(&format!("\n\nValues behind it:\n{}", values.join("\n")));
    }
    if long.contains('\n') {
        long.push('\n');
    }
    let arg = Arg::new(option.key)
        .long(option.key)
        .help_heading(option.heading)
        .value_name(option.value_name)
        .help(short)
        .long_help(long)
        .hide(!option.is_setting())
        .allow_negative_numbers(true);
    reading(arg, option)
}

/// The flag with the texts that its setting takes.
pub(crate) fn reading(arg: Arg, option: &OptionInfo) -> Arg {
    let arg = match option.kind {
        OptionKind::Switch | OptionKind::Resume => may_stand_alone(arg),
        _ => arg,
    };
    if option.values().next().is_some() {
        return arg
            .value_parser(WithValues(option.key))
            .hide_possible_values(option.kind == OptionKind::Switch);
    }
    match option.kind {
        OptionKind::Choice(names) => arg.value_parser(PossibleValuesParser::new(names)),
        OptionKind::Switch => arg.value_parser(["true", "false"]).hide_possible_values(true),
        // Several are a mix of sources.
        OptionKind::Path if option.key == "data" => arg.action(ArgAction::Append),
        kind => arg.value_parser(move |text: &str| kind.parse(text).map(|_| text.to_string())),
    }
}

/// A value of a setting, as its manual has it.
fn value_line(name: &str, option: &OptionInfo) -> String {
    let default = Config::default().get(option.key).filter(|value| *value != Value::Boolean(false));
    let (about, _) = manual(option.doc, default);
    let usage = match option.kind {
        OptionKind::Switch => name.to_owned(),
        _ => format!("{name}={}", option.value_name),
    };
    format!("{usage}: {about}")
}

/// Every optimizer with what it does, a line each.
fn optimizers() -> String {
    let line = |kind: &OptimizerKind| format!("{:10} {}", kind.name(), kind.about());
    OptimizerKind::ALL.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Reads the text of a setting, by its key, that may have values behind it.
#[derive(Clone, Copy)]
struct WithValues(&'static str);

impl WithValues {
    fn option(self) -> &'static OptionInfo {
        OPTIONS.iter().find(|option| option.key == self.0).expect("a setting")
    }
}

impl TypedValueParser for WithValues {
    type Value = String;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        let option = self.option();
        let read = move |text: &str| option.parse(text).map(|_| text.to_string());
        read.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let names: &[&str] = match self.option().kind {
            OptionKind::Choice(names) => names,
            OptionKind::Switch => &["true", "false"],
            _ => return None,
        };
        Some(Box::new(names.iter().map(PossibleValue::new)))
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
    let file = in_file(matches.get_one::<PathBuf>("config"));
    let undone = UNDO.iter().filter(|undo| matches.get_flag(undo.flag));
    let mut undone: Vec<&str> = undone.flat_map(|undo| undo.keys).copied().collect();
    let values = OPTIONS.iter().filter(|o| undone.contains(&o.key)).flat_map(|o| o.values());
    let mut replaced: Vec<&str> = values.map(|(_, value)| value.key).collect();
    let mut flags = Table::new();
    for option in OPTIONS {
        let Some(text) = matches.get_one::<String>(option.key) else { continue };
        option.add_to(&mut flags, text).map_err(Failure::bad_input)?;
        // With the setting its values are replaced, but for those that stand by themselves.
        let values = option.values().map(|(_, value)| value.key);
        replaced.extend(values.filter(|key| !file.by_themselves.contains(*key)));
    }
    undone.extend(replaced);
    let sources: Vec<_> = matches.get_many::<String>("data").into_iter().flatten().collect();
    if !sources.is_empty() {
        undone.extend(["data", "data-mix"]);
    }
    if let [_, _, ..] = sources.as_slice() {
        let mix = sources.iter().map(|s| s.as_str()).collect::<Vec<_>>().join(",");
        flags.remove("data");
        flags.insert("data-mix".into(), mix.into());
    }
    let given = file.keys.into_iter().chain(flags.keys().cloned()).collect();
    let from_file = from_file.without(&undone).map_err(Failure::bad_input)?;
    let config = from_file.with(flags).map_err(Failure::bad_input)?;
    let mut config = match with_model_of_checkpoint(&config, &given)? {
        Some(resumed) => resumed,
        None => with_model_of_weights(config, &given)?,
    };
    check_data(&config, given.contains("tokenizer"))?;
    // A Rust program is asked first; the user of the command wants to know why it failed.
    config.flight_dir.get_or_insert_with(|| PathBuf::from(FLIGHT_DIR));
    Ok(config)
}

/// Data of a run that begins with the weights of a file or folder has that model's tokens.
fn check_data(config: &Config, insists: bool) -> Result<(), Failure> {
    let Some(from) = config.init_from.as_ref().filter(|from| is_model(from)) else { return Ok(()) };
    // The model of the weights says it, where it was not given.
    let vocabulary = config.vocab.or_else(|| config_of(from).ok()?.vocab);
    let sources = config.sources().map_err(Failure::bad_input)?;
    let data = config.data.iter().chain(sources.iter().map(|(path, _)| path));
    // A file of weights alone does not say how many ids its model has.
    let Some(vocabulary) = vocabulary else { return Ok(()) };
    data.into_iter()
        .try_for_each(|data| check_tokens(config, from, Some(vocabulary), insists, data))
}

/// The settings of a file.
#[derive(Default)]
struct InFile {
    /// Of all that it gives.
    keys: BTreeSet<String>,
    /// Of those that are a line of their own.
    by_themselves: BTreeSet<String>,
}

fn in_file(path: Option<&PathBuf>) -> InFile {
    // It was read before.
    let Some(text) = path.and_then(|path| std::fs::read_to_string(path).ok()) else {
        return InFile::default();
    };
    let keys = |table: Table| table.into_iter().map(|(key, _)| key).collect();
    InFile {
        keys: as_table(&text).map(keys).unwrap_or_default(),
        by_themselves: text.parse().map(keys).unwrap_or_default(),
    }
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
    fn a_flag_of_before_means_the_value_that_it_became() {
        let same = |old: &str, new: &str| {
            let [old, new] = [old, new].map(|line| parse(&format!("zeropp run {line}")).config);
            assert_eq!(old, new);
        };
        same(
            "--optimizer muon --beta2 0.95 --nesterov=false",
            "--optimizer muon:beta2=0.95,nesterov=false",
        );
        same("--eps 1e-6", "--optimizer eps=1e-6");
        same("--resume --resume-fallback --save s", "--save s --resume=true:fallback");
        same("--no-memory-check --rank-memory 2", "--rank-memory 2:unchecked");
        same("--keep-best --pin", "--keep best --threads pin");
        same("--document-mask --document-end 3", "--document-mask=true:end=3");
        let twice = "zeropp run --beta2 0.9 --optimizer beta2=0.95";
        let matches = command().try_get_matches_from(twice.split(' ')).unwrap();
        let failure = run(matches.subcommand_matches("run").unwrap()).err().unwrap();
        assert!(failure.message.contains("optimizer has this value too"), "{}", failure.message);
        assert_eq!(failure.code, 2);
    }

    #[test]
    fn a_setting_that_a_flag_gives_replaces_the_values_of_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("c.toml");
        let of = |text: &str, flags: &str| {
            std::fs::write(&file, text).unwrap();
            parse(&format!("zeropp run {} {flags}", file.display())).config
        };
        let text = "optimizer = 'adamw:beta2=0.95,eps=1e-6'";
        assert_eq!(of(text, "--lr 1").beta2, Some(0.95));
        let lion = of(text, "--optimizer lion");
        assert_eq!((lion.optimizer.name(), lion.beta2, lion.eps), ("lion", None, None));
        let one = of(text, "--optimizer beta2=0.9");
        assert_eq!((one.beta2, one.eps), (Some(0.9), None));
        // A line of its own stays, as it always has.
        assert!(of("save = 's'\nresume-fallback = true", "--resume").resume_fallback);
        assert!(!of("save = 's'\nresume-fallback = true", "--no-save").resume_fallback);
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
        for option in OPTIONS.iter().filter(|option| option.is_setting()) {
            let usage = format!(" --{} <{}>", option.key, option.value_name);
            let switch = format!(" --{}[=<{}>]", option.key, option.value_name);
            let count = help.matches(&usage).count() + help.matches(&switch).count();
            assert_eq!(count, 1, "--{} in:\n{help}", option.key);
        }
        for default in ["0.003", "zeropp", "120", "false"] {
            assert!(help.contains(&format!("[default: {default}]")), "{default} in:\n{help}");
        }
        let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
        for option in OPTIONS.iter().filter(|option| !option.is_setting()) {
            let Some((_, name)) = option.part_of.and_then(|of| of.split_once(':')) else {
                continue;
            };
            assert!(words.contains(&format!(" {name}: ")) || words.contains(&format!(" {name}=")));
        }
        for kind in OptimizerKind::ALL {
            let about = kind.about().split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(about.contains("lr") && words.contains(&about), "{about}");
        }
    }
}
