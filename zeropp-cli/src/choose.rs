//! `zeropp run --plan`: the layout of a run, chosen by a plan for the machine at hand.

use std::path::Path;

use clap::{Arg, ArgMatches};
use zeropp::Config;
use zeropp::config::{DeviceKind, EngineKind, Recompute};
use zeropp_plan::layout::{Fixed, Job};
use zeropp_plan::model::ModelSizes;
use zeropp_plan::{machines, text};

use crate::failure::Failure;
use crate::values::whole;
use crate::{measure, planning, trial};

/// Stands for a machine that is measured first.
const MEASURED: &str = "measured";
/// Settings that a plan chooses, and keeps where they are given.
const KEPT: [&str; 8] =
    ["pp", "zero3", "dp", "virtual", "unit", "micro-batch-size", "recompute", "schedule"];
/// Settings that a plan always chooses itself.
const CHOSEN: [&str; 5] = ["micro-batches", "zero1", "prefetch", "stages", "costs"];

/// A run whose layout is to be planned.
pub(crate) struct RunToPlan {
    /// A name, a file, or [`MEASURED`].
    machine: String,
    ranks: Option<usize>,
    /// Layouts that are to be tried.
    tries: Option<usize>,
    /// Settings of the command line.
    given: Vec<&'static str>,
}

/// The flags of a plan that a run starts with.
pub(crate) fn args() -> [Arg; 3] {
    let number = |name: &'static str, help: &'static str| {
        Arg::new(name)
            .long(name)
            .value_name("N")
            .value_parser(whole::<usize>(1))
            .requires("plan")
            .help_heading("Plan")
            .hide_short_help(true)
            .help(help)
    };
    [
        Arg::new("plan")
            .long("plan")
            .value_name("NAME|FILE")
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value(MEASURED)
            .help_heading("Plan")
            .hide_short_help(true)
            .help("Plan the layout and run the fastest that fits; --dry-run shows the plan")
            .long_help(
                "Plan the layout and run the fastest that fits; --dry-run shows the plan\n\n\
                 For this machine, which is measured first, or for the machine of this name or \
                 file, as `zeropp plan --machine` takes it. The plan keeps to what the flags give \
                 of pp, zero3, dp, virtual, unit, micro-batch-size, recompute and schedule, and to \
                 rank-memory. Needs --global-batch.",
            ),
        number("gpus", "With --plan: ranks in all [default: the cores or GPUs of this machine]"),
        trial::arg("Plan").requires("plan").hide_short_help(true),
    ]
}

impl RunToPlan {
    /// The wish of a command line; none where nothing is to be planned.
    pub(crate) fn new(matches: &ArgMatches) -> Option<RunToPlan> {
        let size = |name: &str| matches.get_one::<usize>(name).copied();
        let all = KEPT.iter().chain(&CHOSEN).copied();
        Some(RunToPlan {
            machine: matches.get_one::<String>("plan")?.clone(),
            ranks: size("gpus"),
            tries: size("try"),
            given: all.filter(|key| matches.contains_id(key)).collect(),
        })
    }

    /// The file of the machine, where it is one.
    pub(crate) fn file(&self) -> Option<&Path> {
        Some(Path::new(&self.machine)).filter(|path| path.is_file())
    }

    /// The settings with the best layout, and the plan in words.
    ///
    /// # Errors
    /// Settings that a plan does not take, or a job that fits nowhere, with the nearest.
    pub(crate) fn chosen(&self, config: &Config) -> Result<(Config, String), Failure> {
        let job = self.job(config)?;
        let plan = trial::plan(&job, &others(config), config, self.tries)?;
        let first = &plan.layouts[0].planned;
        let columns = console::Term::stdout().size_checked().map_or(100, |s| usize::from(s.1));
        let chosen = trial::with_layout(config, first)?;
        Ok((chosen, text::text(&plan, columns)))
    }

    fn job(&self, config: &Config) -> Result<Job, Failure> {
        if let Some(key) = self.given.iter().find(|key| CHOSEN.contains(key)) {
            let value = config.get(key).map_or_else(|| "given".into(), |v| v.to_string());
            return Err(Failure::bad_input(format!(
                "{key} = {value}: --plan chooses it; leave it out, or leave out --plan"
            )));
        }
        let Some(asked) = &config.global_batch else {
            return Err(Failure::bad_input(
                "global-batch is missing: --plan needs to know the samples of a step, of all \
                 ranks, such as --global-batch 64",
            ));
        };
        let global_batch = asked.parse().map_err(|_| {
            Failure::bad_input(format!(
                "global-batch = {asked}: --plan takes samples; use a whole number, such as 64"
            ))
        })?;
        let gpus = match self.ranks {
            Some(ranks) => ranks,
            None => measure::ranks_here(config)?,
        };
        let ids = config.dataset().map_err(zeropp::Error::from)?.vocabulary();
        let machine = self.machine(config, gpus, ids)?;
        let decoder = config.decoder(ids).map_err(Failure::bad_input)?;
        Ok(Job {
            model: ModelSizes { name: config.model.clone(), decoder, seq: config.seq },
            memory: config.rank_memory.map_or(machine.memory_bytes - machine.reserve_bytes, |gib| {
                gib * (1u64 << 30) as f64
            }) as u64,
            machine,
            gpus,
            global_batch,
            compute: config.compute(),
            state: config.run_state(),
            fixed: Fixed { head: planning::head_split(None, config)?, ..self.fixed(config)? },
        })
    }

    fn machine(
        &self,
        config: &Config,
        ranks: usize,
        ids: usize,
    ) -> Result<zeropp::pipeline::costs::Machine, Failure> {
        if self.machine != MEASURED {
            return planning::machine_called(&self.machine);
        }
        if config.engine != EngineKind::Threads {
            return Err(Failure::bad_input(
                "plan = measured: each process would measure, and plan, for itself; measure once, \
                 with zeropp measure -o machine.toml, and use --plan=machine.toml",
            ));
        }
        // Beyond a sane number the plan itself says so.
        let zero3 = ranks.clamp(1, 64);
        let measured = Config { zero3, pp: 1, dp: 1, vocab: Some(ids), ..config.clone() };
        let file = measure::machine_file(&measured)?;
        machines::read(MEASURED, &file).map_err(planning::bad)
    }

    fn fixed(&self, config: &Config) -> Result<Fixed, Failure> {
        let given = |key: &str| self.given.contains(&key);
        let size = |key: &str, value: usize| given(key).then_some(value);
        let mut config = config.clone();
        let on_cpu = config.device == DeviceKind::Cpu;
        let states = planning::states_out(&mut config, on_cpu)?;
        Ok(Fixed {
            pp: size("pp", config.pp),
            zero3: size("zero3", config.zero3),
            dp: size("dp", config.dp),
            virtual_stages: config.virtual_stages,
            unit: config.unit,
            micro_batch_size: size("micro-batch-size", config.micro_batch_size),
            recompute: Some(config.recompute)
                .filter(|asked| given("recompute") && *asked != Recompute::Auto),
            schedule: given("schedule").then(|| config.schedule.clone()),
            slices: planning::searched_slices(&config, None)?,
            sync: config.optimizer_sync,
            states,
            moments: planning::moments(&config),
            ..Fixed::default()
        })
    }
}

/// The settings that a layout does not choose, as flags, where they are not the model's defaults.
fn others(config: &Config) -> String {
    let base = Config::for_model(&config.model).unwrap_or_default();
    // Micro-batches are a plan's own.
    let given = ["global-batch", "flight-dir"];
    let chosen = |key: &str| [&KEPT[..], &CHOSEN, &given].concat().contains(&key);
    // The model is named even where it is the usual one.
    let base = Config { model: String::new(), ..base };
    let flags = trial::flags(config, &base).into_iter().filter(|(key, _)| !chosen(key));
    flags.map(|(key, value)| planning::flag(key, &value)).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{args, command};

    fn chosen(line: &str) -> Result<(Config, String), String> {
        let words = ["zeropp", "run"].into_iter().chain(line.split(' '));
        let matches = command::command().try_get_matches_from(words).map_err(|e| e.to_string())?;
        let matches = matches.subcommand_matches("run").unwrap();
        let run = args::run(matches).map_err(|f| f.message)?;
        let run_to_plan = RunToPlan::new(matches).expect("asked for");
        run_to_plan.chosen(&run.config).map_err(|f| f.message)
    }

    const MODEL: &str = "--layers 6 --hidden 64 --heads 4 --seq 32";

    #[test]
    fn the_layout_of_the_plan_is_the_one_that_runs() {
        let line = format!("--plan=a100 --gpus 4 --global-batch 16 --pp 2 --rank-memory 1 {MODEL}");
        let (config, text) = chosen(&line).unwrap();
        assert_eq!((config.pp, config.mesh().world()), (2, 4));
        assert_eq!(config.samples_per_step(), 16);
        assert!(text.contains("layouts ranked") && text.contains("--pp 2"), "{text}");
        let reported = text.split_whitespace().collect::<Vec<_>>().join(" ").replace(" \\ ", " ");
        let sizes = "zeropp run --rank-memory 1.0 --model gpt --layers 6 --seq 32 --pp 2";
        assert!(reported.contains(sizes), "{reported}");
        zeropp::Trainer::new(config).unwrap();
    }

    #[test]
    fn impossible_plans_give_one_message() {
        for (line, said) in [
            ("--plan=a100 --gpus 4", "global-batch is missing"),
            ("--plan=a100 --gpus 4 --global-batch 8 --zero1", "zero1 = true: --plan chooses it"),
            ("--plan=b7 --gpus 4 --global-batch 8", "machine = b7: neither a file"),
            ("--plan=a100 --gpus 7 --global-batch 4", "gpus = 7: no P x D x K suits"),
            (
                "--plan=a100 --gpus 1 --global-batch 8 --rank-memory 0.00001",
                "memory = 10.49 KiB: none of",
            ),
            (
                "--plan=a100 --gpus 1 --global-batch 8 --rank-memory 0.00001",
                "times as much, on pipeline rank",
            ),
            ("--plan=a100 --gpus 4 --global-batch 8k", "global-batch = 8k: --plan takes samples"),
        ] {
            let error = chosen(&format!("{line} {MODEL}")).unwrap_err();
            assert!(error.contains(said), "{line}: {error}");
        }
    }
}
