//! The programs of a run: a generator's schedule or a file's, lowered and verified.

use crate::config::{Config, ConfigError, OptimizerSync, OutUnits, Recompute};
use zeropp_pipeline::costs::Table;
use zeropp_pipeline::ir::{Action, Schedule};
use zeropp_pipeline::lower::{LowerOptions, recomputed};
use zeropp_pipeline::memory::StageBytes;
use zeropp_pipeline::schedules::{Limits, OrderCosts, Shape, generate_cut};
use zeropp_pipeline::simulate;
use zeropp_pipeline::verify::{VerifyLimits, verify, verify_issue_order};
use zeropp_plan::programs::{self, lowered};
use zeropp_plan::recompute::{copied_out, stages_with_r};
use zeropp_search::generate_with_costs;

use crate::plan::costs_file::load;
use crate::{Error, read_schedule};

/// A configuration with everything that follows from others written out, a schedule file's sizes
/// too, and that file's schedule.
#[derive(Clone)]
pub(crate) struct Resolved {
    pub(crate) config: Config,
    file: Option<Schedule>,
    /// The file of costs.
    pub(crate) costs: Option<Table>,
    /// Tokens of each slice of a sample; none where samples are whole.
    pub(crate) sample_slices: Vec<u64>,
}

impl Resolved {
    /// Reads the files of costs and of the schedule, if `config` names them, and checks that the
    /// schedule, or the one that is `given` in its place, is this run's.
    ///
    /// # Errors
    /// A file that cannot be read or has no correct schedule, or whose sizes are not those of
    /// `config`.
    pub(crate) fn new(config: &Config, given: Option<&Schedule>) -> Result<Resolved, Error> {
        let mut resolved = config.resolved();
        let costs = config.costs.as_deref().map(|path| load("costs", path)).transpose()?;
        let Some(path) = config.schedule_file() else {
            return Ok(Resolved { config: resolved, file: None, costs, sample_slices: Vec::new() });
        };
        let wrong = |problem: String| {
            let help = "name a file with a complete schedule, or a kind of schedule";
            ConfigError::value("schedule", &config.schedule, problem, help)
        };
        let schedule = match given {
            Some(schedule) => schedule.clone(),
            None => read_schedule(path).map_err(|e| wrong(e.problem))?.schedule,
        };
        let limits = VerifyLimits { optimizer_step: false, ..VerifyLimits::default() };
        verify(&schedule, &limits).map_err(|e| wrong(e.to_string()))?;
        check_sizes(config, &schedule)?;
        let slices = schedule.slices_per_sample();
        resolved.virtual_stages = Some(schedule.stages().div_ceil(schedule.pp()));
        resolved.micro_batches = Some(schedule.micro_batches() / slices);
        resolved.unit = Some(schedule.units[0] / slices);
        resolved.slices = slices.into();
        resolved.check_slices()?;
        let sample_slices = if slices > 1 { schedule.sample_slices.clone() } else { Vec::new() };
        let schedule = Schedule { sample_slices: sample_slices.clone(), ..schedule };
        Ok(Resolved { config: resolved, file: Some(schedule), costs, sample_slices })
    }

    /// The same with samples cut so.
    pub(crate) fn with_slices(self, sample_slices: &[u64]) -> Resolved {
        Resolved { sample_slices: sample_slices.to_vec(), ..self }
    }

    /// The row blocks of the head that each rank has, and the rank of the last stage, where the
    /// head is split.
    ///
    /// # Errors
    /// Blocks that are not for these ranks.
    pub(crate) fn head_blocks(&self) -> Result<Option<(Vec<usize>, usize)>, ConfigError> {
        let given = self.config.head_blocks()?;
        let Some(file) = &self.file else {
            return Ok(given.map(|blocks| (blocks, self.config.pp.saturating_sub(1))));
        };
        if given.is_some() {
            return Err(self.config_wrong_split());
        }
        let root = file.placement.last().copied().unwrap_or(0);
        Ok((!file.head_blocks.is_empty()).then(|| (file.head_blocks.clone(), root)))
    }

    fn config_wrong_split(&self) -> ConfigError {
        let value = self.config.head_split.as_deref().unwrap_or_default();
        let problem = format!("{} says itself whether the head is split", self.config.schedule);
        ConfigError::value("head-split", value, problem, "leave it out")
    }

    /// The error that this run's head cannot be split as it is asked for.
    pub(crate) fn wrong_split(&self, problem: String, help: &str) -> ConfigError {
        match &self.file {
            Some(_) => {
                let problem = format!("its head is split: {problem}");
                ConfigError::value("schedule", &self.config.schedule, problem, help)
            }
            None => {
                let value = self.config.head_split.as_deref().unwrap_or_default();
                ConfigError::value("head-split", value, problem, help)
            }
        }
    }

    /// The same for `n` micro-batches of each rank.
    pub(crate) fn with_micro_batches(&self, n: usize) -> Resolved {
        let (given, unit) = (Some(n), self.config.unit.map(|unit| unit.min(n)));
        let config =
            Config { micro_batches: given, global_batch: None, unit, ..self.config.clone() };
        Resolved { config, ..self.clone() }
    }

    /// Stages of the run.
    pub(crate) fn stages(&self) -> usize {
        let looping = || self.config.pp * self.config.virtual_stages();
        self.file.as_ref().map_or_else(looping, Schedule::stages)
    }

    /// How many stages are recomputed as a whole for every micro-batch, from the first on.
    pub(crate) fn recomputed(&self) -> usize {
        if self.config.recompute != Recompute::Full || self.config.recompute_first.is_some() {
            return 0;
        }
        let Config { pp, .. } = self.config;
        let of_kind = || self.config.kind().map(|k| k.recomputed(pp, self.config.virtual_stages()));
        let of_file = |file: &Schedule| {
            let all = if is_complete(file) { stages_with_r(file) } else { recomputed(file) };
            all.into_iter().enumerate().take_while(|(i, stage)| i == stage).count()
        };
        self.file.as_ref().map(of_file).or_else(of_kind).unwrap_or(0)
    }

    /// The generators' costs of stages that take the times of `costs` and keep `bytes`, within the
    /// limits of the settings.
    pub(crate) fn generator_costs(
        &self,
        costs: &simulate::Costs,
        bytes: &[StageBytes],
    ) -> OrderCosts {
        let Config { max_gathered, max_gathers, .. } = self.config;
        let mem_limit = self.config.mem_limit.and_then(|limit| i64::try_from(limit.0).ok());
        let again = self.recomputed() * self.sample_slices.len().max(1);
        OrderCosts {
            limits: Limits { gathered: max_gathered, gathers: max_gathers, evaluations: None },
            objective: self.config.optimizer_sync.into(),
            ..programs::generator_costs(costs, bytes, again, mem_limit)
        }
    }

    /// The verified programs of all pipeline ranks of a replica; kinds that weigh one order against
    /// another are made for `costs`.
    ///
    /// # Errors
    /// A schedule that does not exist, does not suit the mesh, or does not fit the settings.
    pub(crate) fn programs(&self, costs: &OrderCosts) -> Result<Schedule, Error> {
        let config = &self.config;
        let one_order = config.one_order();
        let options = lower_options(config);
        if let Some(file) = self.file.as_ref().filter(|s| is_complete(s)) {
            check_program(config, file)?;
            if one_order {
                verify_issue_order(file)?;
            }
            return Ok(file.clone());
        }
        let compact = match &self.file {
            Some(schedule) => schedule.clone(),
            None => {
                let (kind, shape, slices) = (&config.schedule, shape(config), &self.sample_slices);
                match config.head_blocks()?.unwrap_or_default() {
                    none if none.is_empty() && slices.is_empty() => {
                        generate_with_costs(kind, &shape, costs)?
                    }
                    blocks => generate_cut(kind, &shape, slices, &blocks, Some(costs))?,
                }
            }
        };
        Ok(lowered(&compact, &options, one_order)?)
    }
}

/// How schedules become programs with these settings.
pub(crate) fn lower_options(config: &Config) -> LowerOptions {
    LowerOptions {
        prefetch: config.prefetch,
        recompute: config.recompute == Recompute::Full,
        redone: config.recompute_first,
        out: config.copied_out(),
        out_later: config.recompute_out_units == OutUnits::Later,
        replicas: config.dp > 1,
        sync: config.optimizer_sync,
        ..LowerOptions::default()
    }
}

/// What the schedule of `config` is made for.
pub(crate) fn shape(config: &Config) -> Shape {
    Shape {
        pp: config.pp,
        virtual_stages: config.virtual_stages(),
        micro_batches: config.micro_batches(),
        unit: config.unit(),
    }
}

/// The sizes that are given must be those of the file.
fn check_sizes(config: &Config, schedule: &Schedule) -> Result<(), ConfigError> {
    let (pp, stages) = (schedule.pp(), schedule.stages());
    let file = &config.schedule;
    let fail = |field: &str, value: usize, problem: String, help: String| {
        Err(ConfigError::value(field, value, problem, help))
    };
    if config.pp != pp {
        let help = format!("use {pp}, or another file");
        return fail("pp", config.pp, format!("{file} is for {pp} ranks"), help);
    }
    if let Some(v) = config.virtual_stages.filter(|v| v.checked_mul(pp) != Some(stages)) {
        let problem = format!("{file} has {stages} stages on {pp} ranks");
        return fail("virtual", v, problem, "leave it out: it follows from the file".into());
    }
    let slices = schedule.slices_per_sample();
    if config.slices() != 1 && config.slices() != slices {
        let help = "leave it out: it follows from the file".into();
        return fail("slices", config.slices(), format!("{file} has {slices} a sample"), help);
    }
    let micro_batches = schedule.micro_batches() / slices;
    if let Some(b) = config.micro_batches.filter(|b| *b != micro_batches) {
        let problem = format!("{file} has {micro_batches} a step");
        return fail("micro-batches", b, problem, "leave it out: it follows from the file".into());
    }
    let units: Vec<usize> = schedule.units.iter().map(|unit| unit / slices).collect();
    let (last, full) = units.split_last().expect("a verified schedule has a unit");
    let fits = |u: usize| full.iter().all(|n| *n == u) && *last <= u;
    if let Some(u) = config.unit.filter(|u| !fits(*u)) {
        let problem = format!("the units of {file} are {units:?}");
        return fail("unit", u, problem, "leave it out: it follows from the file".into());
    }
    Ok(())
}

/// Whether a file's schedule is a program that can run as it stands, rather than one to be lowered.
fn is_complete(schedule: &Schedule) -> bool {
    schedule.ranks.iter().all(|actions| actions.last() == Some(&Action::OptimizerStep))
}

/// A program runs as it stands only where it does what the settings promise.
pub(crate) fn check_program(config: &Config, program: &Schedule) -> Result<(), Error> {
    let actions = || program.ranks.iter().flatten();
    let sums_replicas = actions().any(|a| matches!(a, Action::ReplicaReduce { .. }));
    if config.dp > 1 && !sums_replicas {
        let problem = format!("the program in {} does not sum over replicas", config.schedule);
        let help = "use 1, or a file without OPTIMIZER_STEP, which is lowered here";
        return Err(ConfigError::value("dp", config.dp, problem, help).into());
    }
    let (sync, is, other) = match program.validates_late() {
        true => (OptimizerSync::Late, "validates", OptimizerSync::Barrier),
        false => (OptimizerSync::Barrier, "does not validate", OptimizerSync::Late),
    };
    if config.optimizer_sync == other {
        let problem = format!("the program in {} {is} updates late", config.schedule);
        let help = format!("use {sync}, or a file without OPTIMIZER_STEP, which is lowered here");
        return Err(ConfigError::value("optimizer-sync", other, problem, help).into());
    }
    if config.recompute_out.is_none() && !copied_out(program).is_empty() {
        let problem = format!("the program in {} copies activations out", config.schedule);
        let help = "say where to with recompute:out=DIR, or use another file";
        return Err(ConfigError::value("schedule", &config.schedule, problem, help).into());
    }
    let whole = stages_with_r(program);
    if config.recompute != Recompute::Full && !whole.is_empty() {
        let problem = format!("the program in {} recomputes stages {whole:?}", config.schedule);
        let help = "use full, or a file without OPTIMIZER_STEP, which is lowered here";
        return Err(ConfigError::value("recompute", config.recompute, problem, help).into());
    }
    Ok(())
}
