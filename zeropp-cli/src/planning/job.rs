//! The job to be planned, from flags: the same model that `zeropp run` makes of them.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use clap::ArgMatches;
use zeropp::config::{
    Bytes, DeviceKind, EngineKind, OPTIONS, OutStates, Precision, Recompute, SliceCount, SliceCut,
    Table, Value, samples_of,
};
use zeropp::pipeline::costs::Machine;
use zeropp::pipeline::schedules::Kind;
use zeropp::{Config, read_costs};
use zeropp_plan::layout::{Fixed, HOST, HeadSplit, Job, Layout, OutPlace, Slices};
use zeropp_plan::machines;
use zeropp_plan::model::ModelSizes;

use super::{bad, file, model_options};
use crate::failure::Failure;

/// Token ids of a run without data and a vocabulary: bytes.
const BYTE_IDS: usize = 256;

/// The request of a command line.
pub(crate) struct PlanRequest {
    pub(crate) job: Job,
    /// The file and the flags of `zeropp run` that say which model it is, and what it is trained
    /// with.
    pub(crate) flags: String,
    /// The settings of a run of that, without a layout.
    pub(crate) config: Config,
    /// The keys of the file.
    keys: Vec<String>,
}

/// Settings of a file that a plan chooses: what it prints stands over them.
const OVERRIDDEN: [&str; 2] = ["zero1", "prefetch"];
/// Settings of a file that nothing can stand over, so that a plan has no room.
const REFUSED: [(&str, &str); 2] =
    [("stages", "the cut into stages"), ("costs", "the order, by the machine's rates")];

/// Reads the job to be planned.
pub(crate) fn job(matches: &ArgMatches) -> Result<PlanRequest, Failure> {
    let size = |name: &str| matches.get_one::<usize>(name).copied();
    let file = matches.get_one::<PathBuf>("config");
    let keys = file.map_or(Ok(Vec::new()), |path| keys(path))?;
    let base = file.map_or(Ok(Config::default()), |path| Config::load(path));
    let base = base.map_err(Failure::bad_input)?;
    let has = |key: &str| keys.iter().any(|k| k == key);
    if let Some((key, what)) = REFUSED.into_iter().find(|(key, _)| has(key)) {
        let value = base.get(key).map_or_else(|| "given".into(), |v| v.to_string());
        return Err(Failure::bad_input(format!(
            "{key} = {value}: a plan chooses {what}; take it out of {}",
            file.map_or_else(String::new, |path| path.display().to_string())
        )));
    }
    let machine = machine(matches)?;
    let (model, mut flags, mut config) = model(matches, &base)?;
    let on_cpu = matches.get_flag("cpu");
    if let Some(path) = file.filter(|_| on_cpu && config.device != DeviceKind::Cpu) {
        return Err(Failure::bad_input(format!(
            "cpu: {} has device = {}, and its run has that; set device = \"cpu\" there, or leave \
             out --cpu",
            path.display(),
            config.device
        )));
    }
    let states = states_out(&mut config, on_cpu)?;
    let moments = moments(&config);
    let given = matches.get_one::<String>("precision").is_some();
    let (device, precision) = match (file, on_cpu) {
        (Some(_), _) => (config.device, config.precision),
        (None, true) if given => (DeviceKind::Cpu, config.precision),
        (None, true) => (DeviceKind::Cpu, Precision::Fp32),
        (None, false) if given => (DeviceKind::Cuda, config.precision),
        (None, false) => (DeviceKind::Cuda, Precision::Bf16),
    };
    match file {
        Some(path) => {
            let path = crate::shell::quoted(&path.to_string_lossy());
            flags = [path, flags].join(" ").trim_end().to_string();
        }
        None if device != DeviceKind::Cpu => {
            let chosen = if given { "" } else { " --precision bf16" };
            flags.push_str(&format!("{chosen} --device cuda --engine nccl"));
            config = Config { precision, device, engine: EngineKind::Nccl, ..config };
        }
        None => {}
    }
    let usable = (machine.memory_bytes - machine.reserve_bytes) as u64;
    let of_file = config.rank_memory.map(|gib| (gib * (1u64 << 30) as f64) as u64);
    let memory = matches.get_one::<Bytes>("memory").map(|bytes| bytes.0).or(of_file);
    let run = Config { device, ..config.clone() };
    let head = head_split(matches.get_one::<String>("head-split"), &run)?;
    let fixed = Fixed { head, states, moments, ..fixed(matches, &config, &has)? };
    let gpus = size("gpus").expect("required");
    let job = Job {
        gpus,
        global_batch: global_batch(matches.get_one("global-batch"), &config, gpus)?,
        memory: memory.unwrap_or(usable),
        compute: Config { device, precision, ..config.clone() }.compute(),
        state: config.run_state(),
        model,
        machine,
        fixed,
    };
    // A layout says how many micro-batches there are.
    let config = Config { global_batch: None, micro_batches: None, ..config };
    Ok(PlanRequest { job, flags, config, keys })
}

impl PlanRequest {
    /// Settings over a file where a layout leaves a flag out: the default.
    pub(crate) fn over_file(&self, layout: &Layout) -> String {
        let plain = [!layout.zero1, layout.prefetch == 1];
        let flags = ["--zero1=false", "--prefetch 1"].into_iter().zip(OVERRIDDEN).zip(plain);
        let has = |key: &str| self.keys.iter().any(|k| k == key);
        let needed = flags.filter(|((_, key), is_plain)| *is_plain && has(key));
        needed.map(|((flag, _), _)| flag).collect::<Vec<_>>().join(" ")
    }
}

/// The keys that a file of settings has.
fn keys(path: &Path) -> Result<Vec<String>, Failure> {
    let text = file("config", path)?;
    let table: Table = text.parse().map_err(|e| {
        Failure::bad_input(format!("config = {}: not a file of settings ({e})", path.display()))
    })?;
    Ok(table.keys().cloned().collect())
}

/// Settings that are given, by flags or by the file.
fn fixed(
    matches: &ArgMatches,
    config: &Config,
    has: &dyn Fn(&str) -> bool,
) -> Result<Fixed, Failure> {
    let size = |name: &str, of_file: usize| {
        matches.get_one::<usize>(name).copied().or_else(|| has(name).then_some(of_file))
    };
    let asked = matches.get_one::<String>("recompute").map(|text| recompute(text));
    let (asked, out) = asked.transpose().map_err(Failure::bad_input)?.unzip();
    let on_cpu = matches.get_flag("cpu");
    let out = out.flatten().map(|place| out_place("recompute:out", place, config, on_cpu));
    let given = matches.get_one::<String>("schedule").map(|text| schedule(text));
    let (kind, slices) = given.transpose().map_err(Failure::bad_input)?.unwrap_or_default();
    Ok(Fixed {
        pp: size("pp", config.pp),
        zero3: size("zero3", config.zero3),
        dp: size("dp", config.dp),
        virtual_stages: matches.get_one("virtual").copied().or(config.virtual_stages),
        unit: matches.get_one("unit").copied().or(config.unit),
        micro_batch_size: size("micro-batch-size", config.micro_batch_size),
        recompute: asked
            .or_else(|| has("recompute").then_some(config.recompute))
            .filter(|asked| *asked != Recompute::Auto),
        schedule: kind.or_else(|| has("schedule").then(|| config.schedule.clone())),
        slices: searched_slices(config, slices)?,
        sync: config.optimizer_sync,
        head: HeadSplit::Whole,
        out: out.transpose()?,
        states: None,
        moments: None,
    })
}

/// What is recomputed, and where activations may be put out, in a text of `--recompute`.
///
/// # Errors
/// Anything else, in a sentence.
pub(super) fn recompute(text: &str) -> Result<(Recompute, Option<&str>), String> {
    let (word, out) = match text.split_once(":out=") {
        Some((word, place)) if !place.is_empty() && !place.contains(',') => (word, Some(place)),
        Some(_) => ("", None),
        None => (text, None),
    };
    let known = Recompute::ALL.iter().find(|r| r.name() == word);
    known.map(|known| (*known, out)).ok_or_else(|| {
        "does not work; use none, selective, full or auto, and :out=host or :out=DIR, as in \
         auto:out=host"
            .into()
    })
}

/// Where states are out; on a host moments alone.
pub(crate) fn states_out(config: &mut Config, on_cpu: bool) -> Result<Option<OutPlace>, Failure> {
    let Some(place) = config.optimizer_out.clone() else { return Ok(None) };
    let place = out_place("optimizer:out", &place.to_string_lossy(), config, on_cpu)?;
    if place == OutPlace::Host {
        if config.optimizer_out_states == OutStates::All {
            let said = "GPUs keep weights and gradients in their memory; use moments";
            return Err(Failure::bad_input(format!("optimizer:out-states = all: {said}")));
        }
        config.optimizer_out_states = OutStates::Moments;
    }
    Ok(Some(place))
}

/// Whether moments are out alone, where that is given.
pub(crate) fn moments(config: &Config) -> Option<bool> {
    match config.optimizer_out_states {
        OutStates::Auto => None,
        states => Some(states == OutStates::Moments),
    }
}

/// A folder that ranks on CPUs put out to.
pub(crate) fn folder(path: &Path) -> OutPlace {
    OutPlace::File(crate::shell::quoted(&path.to_string_lossy()))
}

/// The place that `field` calls so, for ranks on GPUs or CPUs.
fn out_place(field: &str, place: &str, config: &Config, on_cpu: bool) -> Result<OutPlace, Failure> {
    let on_cpu = on_cpu || config.file.is_some() && config.device == DeviceKind::Cpu;
    match (place, on_cpu) {
        (HOST, false) => Ok(OutPlace::Host),
        (HOST, true) => Err(Failure::bad_input(format!(
            "{field} = {HOST}: ranks on CPUs have no other memory; use a folder, as in out=/scratch"
        ))),
        (place, true) => Ok(folder(Path::new(place))),
        (place, false) => Err(Failure::bad_input(format!(
            "{field} = {place}: GPUs put out to their host; use out=host, or --cpu"
        ))),
    }
}

/// The kind and the number of slices in a text of `--schedule`.
///
/// # Errors
/// Anything else, in a sentence.
pub(super) fn schedule(text: &str) -> Result<(Option<String>, Option<SliceCount>), String> {
    let works = || {
        let kinds = Kind::names(|kind| kind.forms().is_some());
        format!("does not work; use one of {kinds}, and slices, as in zeropp:slices=4")
    };
    let option = OPTIONS.iter().find(|option| option.key == "schedule").expect("a setting");
    let read = option.parse(text).map_err(|e| e.to_string())?;
    if read.keys().any(|key| !["schedule", "slices"].contains(&key.as_str())) {
        return Err(works());
    }
    let kind = read.get("schedule").and_then(Value::as_str);
    let is_planned = |name: &str| Kind::planned().any(|kind| kind.name == name);
    if kind.is_some_and(|name| !is_planned(name)) {
        return Err(works());
    }
    let slices = read.get("slices").map(|value| match value {
        Value::Integer(n) => SliceCount::Of(*n as usize),
        _ => SliceCount::Auto,
    });
    Ok((kind.map(Into::into), slices))
}

/// The numbers of slices that a plan for a run of `config` looks at, of which this one may be
/// `asked` for.
///
/// # Errors
/// Samples that are cut by tokens: plans cut them by work.
pub(crate) fn searched_slices(
    config: &Config,
    asked: Option<SliceCount>,
) -> Result<Slices, Failure> {
    if config.slice_cut != SliceCut::default() {
        let cut = config.slice_cut;
        return Err(Failure::bad_input(format!(
            "schedule:slice-cut = {cut}: plans cut samples by work; leave slice-cut out"
        )));
    }
    Ok(match (asked, config.slices) {
        (Some(SliceCount::Of(n)), _) | (None, SliceCount::Of(n)) => Slices::Number(n),
        (Some(SliceCount::Auto), _) => Slices::Any,
        // Samples of a micro-batch are the layout's.
        (None, SliceCount::Auto)
            if config.device != DeviceKind::Cpu
                || Config { micro_batch_size: 1, ..config.clone() }.could_slice() =>
        {
            Slices::Runnable
        }
        (None, SliceCount::Auto) => Slices::Whole,
    })
}

/// What a plan makes of the head, of which a flag may say `auto` or `off`, for runs like `run`.
///
/// # Errors
/// Settings that say which rank has what of the head.
pub(crate) fn head_split(flag: Option<&String>, run: &Config) -> Result<HeadSplit, Failure> {
    let of_run = run.head_split.as_deref().unwrap_or("auto");
    if flag.is_none() && !["auto", "off"].contains(&of_run) {
        return Err(Failure::bad_input(format!(
            "schedule:head-split = {of_run}: a plan chooses which rank has what of the head; use \
             auto or off"
        )));
    }
    let can = zeropp::may_split_head(run);
    Ok(match (flag.map_or(of_run, String::as_str), can, flag.is_some()) {
        ("off", ..) => HeadSplit::Whole,
        (_, true, _) => HeadSplit::Auto,
        (_, false, true) => HeadSplit::Ahead,
        (_, false, false) => HeadSplit::Told,
    })
}

/// Samples of a step on so many devices: the flag's, else the file's.
fn global_batch(flag: Option<&String>, config: &Config, gpus: usize) -> Result<usize, Failure> {
    let Some(asked) = flag.or(config.global_batch.as_ref()) else {
        return Err(Failure::bad_input(
            "global-batch is missing: a plan needs to know the samples of a step, of all ranks, \
             such as --global-batch 64",
        ));
    };
    samples_of(asked, config.seq, gpus).map_err(Failure::bad_input)
}

fn machine(matches: &ArgMatches) -> Result<Machine, Failure> {
    let mut machine = machine_called(matches.get_one::<String>("machine").expect("has a default"))?;
    if let Some(per_node) = matches.get_one::<usize>("per-node") {
        machine.per_node = *per_node;
    }
    Ok(machine)
}

/// The machine that is known by this name, or that the file of this name is about.
pub(crate) fn machine_called(name: &str) -> Result<Machine, Failure> {
    let path = Path::new(name);
    let is_file = |end: &OsStr| ["toml", "json"].iter().any(|form| end.eq_ignore_ascii_case(form));
    let read = match path.extension().is_some_and(is_file) {
        true => machines::of_table(name, read_costs(path).map_err(|e| e.problem)),
        false => machines::named(name),
    };
    read.map_err(bad)
}

/// The model, the flags of `zeropp run` that say which it is, and the settings with them.
fn model(matches: &ArgMatches, base: &Config) -> Result<(ModelSizes, String, Config), Failure> {
    // As they are typed, with values behind them.
    let mut given = Table::new();
    for option in model_options() {
        if let Some(text) = matches.get_one::<String>(option.key) {
            let value = option.kind.parse(text).unwrap_or_else(|_| text.as_str().into());
            given.insert(option.key.into(), value);
        }
    }
    let of_file = base.file.as_ref().map(|_| base.model.as_str());
    let called = given.get("model").and_then(Value::as_str).or(of_file).unwrap_or("a GPT");
    let called = called.to_owned();
    if let Some(paper) = ModelSizes::of_a_paper(&called) {
        let d = paper.decoder;
        given.insert("model".into(), "gpt".into());
        for (key, size) in [
            ("layers", d.layers),
            ("hidden", d.hidden),
            ("heads", d.heads),
            ("vocab", d.vocabulary),
            ("seq", paper.seq),
        ] {
            given.entry(key).or_insert(Value::Integer(size as i64));
        }
    }
    let flags: Vec<String> = given.iter().map(|(key, value)| flag(key, value)).collect();
    let config = base.with(given).map_err(unknown)?;
    // Where states go is checked with the device, which is not known yet.
    let (optimizer_out, optimizer_out_states) = (None, OutStates::Auto);
    Config { optimizer_out, optimizer_out_states, ..config.clone() }
        .validate_for_prediction()
        .map_err(Failure::bad_input)?;
    let ids = match (config.vocab, &base.file) {
        (Some(ids), _) => ids,
        (None, None) => BYTE_IDS,
        (None, Some(_)) => config.dataset().map_err(zeropp::Error::from)?.vocabulary(),
    };
    let decoder = config.decoder(ids).map_err(Failure::bad_input)?;
    Ok((ModelSizes { name: called, decoder, seq: config.seq }, flags.join(" "), config))
}

/// A setting as a flag of `zeropp run`, quoted for a shell.
pub(crate) fn flag(key: &str, value: &Value) -> String {
    match value {
        Value::Boolean(on) => format!("--{key}={on}"),
        Value::String(text) => format!("--{key} {}", crate::shell::quoted(text)),
        other => format!("--{key} {other}"),
    }
}

/// A model that is not known by its name, with the names that only plans know.
fn unknown(error: zeropp::config::ConfigError) -> Failure {
    let said = error.to_string();
    if !said.contains("is not known") {
        return Failure::bad_input(said);
    }
    let papers: Vec<&str> = ModelSizes::paper_names().collect();
    Failure::bad_input(format!("{said}; plans also know the papers' {}", papers.join(", ")))
}
