//! The flags for costs, which `zeropp schedule` and `zeropp compare` share.

use std::path::PathBuf;
use std::str::FromStr;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, value_parser};
use zeropp::config::Bytes;

use super::micros::Micros;
use crate::values::whole;

pub(super) const MEMORY: &str =
    "Memory (any whole unit, or bytes such as 24MiB, of one micro-batch on one stage)";
const COSTS: &str = "Costs (us, of one micro-batch on one stage)";

/// One number for all stages, or one for each.
#[derive(Clone, Debug)]
pub(super) struct PerStage<T>(pub(super) Vec<T>);

/// Times of the actions, as typed.
#[derive(Clone, Debug)]
pub(crate) struct TimeArgs {
    pub(super) f: PerStage<Micros>,
    pub(super) b: PerStage<Micros>,
    pub(super) w: PerStage<Micros>,
    pub(super) gather: PerStage<Micros>,
    pub(super) reduce: PerStage<Micros>,
    pub(super) comm: Micros,
    pub(super) overlap: Option<Micros>,
}

/// Changes of memory, as typed; those that are not given follow from the others.
#[derive(Clone, Debug)]
pub(crate) struct MemoryArgs {
    pub(super) f: PerStage<i64>,
    pub(super) b: Option<PerStage<i64>>,
    pub(super) w: Option<PerStage<i64>>,
    pub(super) input: PerStage<i64>,
    /// Whether any was typed in bytes, so that all are.
    pub(super) in_bytes: bool,
}

/// Costs of a layer, from which those of every kind's stages follow.
#[derive(Clone, Debug)]
pub(crate) struct LayerTimes {
    /// Layers of the model.
    pub(super) layers: usize,
    /// F, B and W.
    pub(super) times: [Micros; 3],
}

impl LayerTimes {
    fn new(matches: &ArgMatches) -> Option<LayerTimes> {
        let time = |name: &str| matches.get_one::<Micros>(name).copied();
        let layers = *matches.get_one::<usize>("layers")?;
        // Where one is given, the others are as long.
        let [f, b, w] = LAYER.map(time);
        let any = f.or(b).or(w).unwrap_or(Micros::ONE);
        Some(LayerTimes { layers, times: [f, b, w].map(|t| t.unwrap_or(any)) })
    }
}

/// Everything about costs that was typed.
#[derive(Clone, Debug)]
pub(crate) struct CostFlags {
    pub(super) times: TimeArgs,
    pub(super) memory: MemoryArgs,
    /// Costs are those of a layer.
    pub(super) layer: Option<LayerTimes>,
    /// The file of `--costs`.
    pub(super) file: Option<PathBuf>,
    /// The flags that are no defaults.
    pub(super) typed: Vec<&'static str>,
}

/// The flags for what actions cost.
pub(crate) fn cost_args() -> Vec<Arg> {
    let time = |name: &'static str, default: &'static str, help: &'static str| {
        Arg::new(name)
            .long(name)
            .value_name("T")
            .default_value(default)
            .value_parser(per_stage::<Micros>)
            .allow_hyphen_values(true)
            .help_heading(COSTS)
            .help(help)
    };
    let memory = |name: &'static str, help: &'static str| {
        Arg::new(name)
            .long(name)
            .value_name("M")
            .value_parser(per_stage::<MemoryUnits>)
            .allow_hyphen_values(true)
            .help_heading(MEMORY)
            .help(help)
    };
    let mut args = vec![
        Arg::new("costs")
            .long("costs")
            .value_name("FILE")
            .value_parser(value_parser!(PathBuf))
            .help_heading(COSTS)
            .help("A file of costs, or a trace; flags that are given win over it")
            .long_help(
                "A file of costs (.toml, .json), as docs/costs.md has it and `zeropp run \
                 --save-costs` writes it, or a trace of a run. Flags that are given win over what \
                 the file has.",
            ),
        time("t-f", "1", "Forward"),
        time("t-b", "1", "B, the gradient of a stage's input"),
        time("t-w", "1", "W, the gradients of a stage's weights"),
        time("t-comm", "0", "A message from rank to rank, whatever its size")
            .value_parser(value_parser!(Micros)),
        time(
            "t-gather",
            "0",
            "All-gather of a stage's weights, of one stage and not one micro-batch",
        ),
        time("t-reduce", "0", "Reduce-scatter of a stage's gradients, likewise"),
        Arg::new("t-overlap")
            .long("t-overlap")
            .value_name("T")
            .value_parser(value_parser!(Micros))
            .allow_hyphen_values(true)
            .help_heading(COSTS)
            .help("An overlapped pair of dualpipe-v [default: one after the other]"),
        memory("mem-f", "What an F takes").default_value("2"),
        memory("mem-b", "What a B changes [default: half of mem-f is freed]"),
        memory("mem-w", "What a W changes [default: the rest is freed]"),
        memory("mem-input", "The part of mem-f that a stage keeps which recomputes")
            .default_value("0"),
    ];
    args.extend(layer_args());
    args
}

/// Times of a layer.
const LAYER: [&str; 3] = ["layer-f", "layer-b", "layer-w"];

/// The flags for what a layer costs.
fn layer_args() -> Vec<Arg> {
    let time = |(name, of_stage, help): (&'static str, &'static str, &'static str)| {
        Arg::new(name)
            .long(name)
            .value_name("T")
            .value_parser(value_parser!(Micros))
            .allow_hyphen_values(true)
            .requires("layers")
            .conflicts_with_all([of_stage, "costs"])
            .help_heading(COSTS)
            .help(help)
    };
    let layers = Arg::new("layers")
        .long("layers")
        .value_name("N")
        .value_parser(whole::<usize>(1))
        .help_heading(COSTS)
        .conflicts_with_all(["t-f", "t-b", "t-w", "costs"])
        .help("Layers of the model, with --layer-f, -b and -w [default of these: 1]")
        .long_help(
            "Layers of the model, with --layer-f, --layer-b and --layer-w, 1 by default. A stage \
             costs what its layers do, so that every kind runs the same model however many stages \
             it has. \
             Gathers, reductions and memory are then those of a layer, too; --mem-input and \
             --t-comm are not.",
        );
    let times = [
        ("layer-f", "t-f", "Forward of a layer, in place of --t-f [default: as the others]"),
        ("layer-b", "t-b", "B of a layer, in place of --t-b [default: as the others]"),
        ("layer-w", "t-w", "W of a layer, in place of --t-w [default: as the others]"),
    ];
    times.map(time).into_iter().chain([layers]).collect()
}

impl CostFlags {
    /// The values of the flags of [`cost_args`].
    pub(crate) fn new(matches: &ArgMatches) -> CostFlags {
        let typed = |name: &&str| matches.value_source(name) == Some(ValueSource::CommandLine);
        CostFlags {
            times: TimeArgs::new(matches),
            memory: MemoryArgs::new(matches),
            layer: LayerTimes::new(matches),
            file: matches.get_one("costs").cloned(),
            typed: FLAGS.into_iter().filter(typed).collect(),
        }
    }

    /// The same where anything was given; else costs of one of so many layers, so that schedules
    /// with more and with fewer stages run the same model.
    pub(crate) fn or_of_layers(self, layers: usize) -> CostFlags {
        if self.is_given() {
            return self;
        }
        CostFlags { layer: Some(LayerTimes { layers, times: [Micros::ONE; 3] }), ..self }
    }

    /// Whether times of stages were given, which make kinds with more stages run a larger model.
    pub(crate) fn has_times_of_stages(&self) -> bool {
        let of_stages = |flag: &&str| ["t-f", "t-b", "t-w"].contains(flag);
        self.file.is_none() && self.layer.is_none() && self.typed.iter().any(of_stages)
    }

    /// Whether anything was given.
    pub(crate) fn is_given(&self) -> bool {
        self.file.is_some() || self.layer.is_some() || !self.typed.is_empty()
    }
}

/// The flags of [`cost_args`] that are no file.
const FLAGS: [&str; 14] = [
    "layer-f",
    "layer-b",
    "layer-w",
    "t-f",
    "t-b",
    "t-w",
    "t-comm",
    "t-gather",
    "t-reduce",
    "t-overlap",
    "mem-f",
    "mem-b",
    "mem-w",
    "mem-input",
];

impl TimeArgs {
    /// The values of the flags of [`cost_args`].
    fn new(matches: &ArgMatches) -> TimeArgs {
        let list =
            |name: &str| matches.get_one::<PerStage<Micros>>(name).cloned().expect("has a default");
        TimeArgs {
            f: list("t-f"),
            b: list("t-b"),
            w: list("t-w"),
            gather: list("t-gather"),
            reduce: list("t-reduce"),
            comm: *matches.get_one("t-comm").expect("has a default"),
            overlap: matches.get_one("t-overlap").copied(),
        }
    }
}

impl MemoryArgs {
    /// The values of the flags of [`cost_args`].
    fn new(matches: &ArgMatches) -> MemoryArgs {
        let typed = |name: &str| matches.get_one::<PerStage<MemoryUnits>>(name);
        let list =
            |name: &str| Some(PerStage(typed(name)?.0.iter().map(|units| units.number).collect()));
        let all = ["mem-f", "mem-b", "mem-w", "mem-input"].into_iter().filter_map(typed);
        MemoryArgs {
            in_bytes: all.flat_map(|list| &list.0).any(|units| units.in_bytes),
            f: list("mem-f").expect("has a default"),
            b: list("mem-b"),
            w: list("mem-w"),
            input: list("mem-input").expect("has a default"),
        }
    }
}

/// A change of memory: far from what sums in 64 bits can hold.
#[derive(Clone, Copy, Debug, PartialEq)]
struct MemoryUnits {
    number: i64,
    in_bytes: bool,
}

const UNITS_MAX: i64 = 100_000_000_000;

impl FromStr for MemoryUnits {
    type Err = String;

    fn from_str(text: &str) -> Result<MemoryUnits, String> {
        let size = text.strip_prefix('-').unwrap_or(text);
        let bytes = || Bytes::parse(size).and_then(|bytes| i64::try_from(bytes.0).ok());
        let plain = text.parse::<i64>().ok().map(|number| MemoryUnits { number, in_bytes: false });
        let found = plain.or_else(|| {
            let number = if size == text { bytes()? } else { -bytes()? };
            Some(MemoryUnits { number, in_bytes: true })
        });
        found.filter(|units| (-UNITS_MAX..=UNITS_MAX).contains(&units.number)).ok_or_else(|| {
            "expected a whole number between -1e11 and 1e11, or bytes such as 24MiB; choose the \
             unit so"
                .into()
        })
    }
}

fn per_stage<T: FromStr<Err = String>>(text: &str) -> Result<PerStage<T>, String> {
    let parse = |one: &str| one.trim().parse::<T>();
    text.split(',').map(parse).collect::<Result<_, _>>().map(PerStage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_in_any_unit_or_in_bytes() {
        let units = |number, in_bytes| Ok(MemoryUnits { number, in_bytes });
        assert_eq!("-12".parse::<MemoryUnits>(), units(-12, false));
        assert_eq!("1.5MiB".parse::<MemoryUnits>(), units(3 << 19, true));
        assert_eq!("-2KiB".parse::<MemoryUnits>(), units(-2048, true));
        for text in ["", "-", "1e12", "200G", "1.5", "--2KiB"] {
            assert!(text.parse::<MemoryUnits>().is_err(), "{text}");
        }
    }
}
