//! Emulation: the real executor, engine and program with computation and links replaced by given
//! times, so that a pipeline of any size can be measured on a small machine.

mod rank;
#[cfg(test)]
mod reschedule_tests;

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use tracing::Span;
use zeropp_comm::threads::ThreadsOptions;
use zeropp_core::device::Devices;
use zeropp_pipeline::costs::{
    ALONE, SampleGrowth, Sharers, Table, check_sums, of_slices, slices_of, with_slices,
};
use zeropp_pipeline::executor::StatusBoard;
use zeropp_pipeline::memory::StageBytes;
use zeropp_pipeline::simulate::{Costs, StageCosts, step_period_ns};
use zeropp_pipeline::timeline::Timeline;
use zeropp_plan::programs::Programs;

use crate::Error;
use crate::config::{Config, ConfigError, DeviceKind, Precision};
use crate::plan::costs_file::wrong;
use crate::plan::program::Resolved;
use crate::plan::reschedule::Exchangeable;
use crate::plan::{limit, replicas};
use crate::run::context::ProcessContext;
use crate::run::ranks::Ranks;
use crate::run::reschedule::Offered;
use crate::run::trace;
use crate::world::{self, LocalRank, World};
use rank::{EmulationShared, RankSteps, run_rank};

/// Steps whose timelines are kept, from the first one with a program on.
const KEPT_STEPS: usize = 8;
/// A rank's thread holds no graph and needs little.
const STACK_BYTES: usize = 1 << 20;

/// One step of an emulated run, in real time from a start that all ranks share.
#[derive(Clone, Debug, PartialEq)]
pub struct EmulatedStep {
    /// Step, from 1.
    pub step: u64,
    /// The last end of a compute action on any rank, in ns; where updates are validated late, since
    /// the step's first beginning of one, after the first step.
    pub makespan_ns: u64,
    /// The same with the optimizer step. Where updates are validated late, what the step adds to
    /// the run: from the last end of a compute action in the step before to that in this one.
    pub step_ns: u64,
    /// Idle share of all ranks from the first start to the last end of a compute on any.
    pub bubble: f64,
    /// Time of the runtime itself for an action, averaged over all: everything but waiting for
    /// given times and for other ranks.
    pub runtime_ns: u64,
    /// How late a rank was after a wait, averaged over all: the machine's part, most of which the
    /// rank makes up for in its next wait.
    pub late_ns: u64,
    /// The program that the ranks ran: the n-th that took another one's place, or the planned one.
    pub program: u64,
}

/// A measured run beside a simulated one with the same times.
#[derive(Clone, Debug, PartialEq)]
pub struct EmulationReport {
    /// All steps.
    pub steps: Vec<EmulatedStep>,
    /// Where programs are exchanged, what that took of rank 0's time, in ns, with the searches.
    pub exchanging_ns: u64,
    /// The simulator's makespan, without the optimizer step; of the program that ran last.
    pub simulated_makespan_ns: u64,
    /// From one step's beginning to the next one's, by the simulator.
    pub simulated_step_ns: u64,
    /// The simulator's bubble.
    pub simulated_bubble: f64,
    /// The timeline of every rank in the step of the median makespan among the first few of the
    /// program that ran last.
    pub measured: Timeline,
    /// The simulator's timeline, one rank for each ZeRO-3 group and replica; of one
    /// replica where all have as many micro-batches.
    pub simulated: Timeline,
}

impl EmulationReport {
    /// The step of the median makespan.
    pub fn median(&self) -> &EmulatedStep {
        let mut steps: Vec<&EmulatedStep> = self.steps.iter().collect();
        steps.sort_by_key(|s| s.makespan_ns);
        steps[(steps.len() - 1) / 2]
    }

    /// Time of a step in the second half of the run, the median: ranks have found their places
    /// among each other by then.
    pub fn settled_step_ns(&self) -> u64 {
        let settled = self.steps.iter().skip(self.steps.len() / 2);
        let mut all: Vec<u64> = settled.map(|step| step.step_ns).collect();
        all.sort_unstable();
        all[(all.len() - 1) / 2]
    }
}

/// Runs `config.steps` steps of the schedule that `config` asks for, with `costs` in place of a
/// model, data and links; `config.costs` are those that an order is made for, if others.
/// `on_step` sees every step as soon as it is complete; the ranks do not
/// wait for it, and a panic in it ends them. The measured timeline is written to `config.trace`, if
/// that is set.
///
/// # Errors
/// Bad settings or costs, before anything starts; a rank that failed; a trace that cannot be
/// written.
pub fn emulate(
    config: &Config,
    costs: &Table,
    on_step: impl FnMut(&EmulatedStep),
) -> Result<EmulationReport, Error> {
    emulate_changing(config, costs, None, on_step)
}

/// The same, where from a step on actions take `later` times, as where a rank has become slower;
/// what is simulated is with those then.
fn emulate_changing(
    config: &Config,
    costs: &Table,
    later: Option<(u64, &Table)>,
    on_step: impl FnMut(&EmulatedStep),
) -> Result<EmulationReport, Error> {
    let config = &Config { without_model: true, ..config.clone() };
    config.validate()?;
    let resolved = in_slices(Resolved::new(config, None)?, costs)?;
    let costs = costs_of("emulate", costs, config, &resolved)?;
    let of = |(from, table)| Ok((from, Arc::new(costs_of("emulate", table, config, &resolved)?)));
    let later = later.map(of).transpose().map_err(|e: ConfigError| e)?;
    let assumed = match &resolved.costs {
        Some(table) => &costs_of("costs", table, config, &resolved)?,
        None => &costs,
    };
    let bytes = bytes_of(assumed);
    let programs = programs(&resolved, assumed, &bytes)?;
    let simulated = |programs: &Programs, costs: &Costs| {
        programs.simulated(costs).map_err(|e| misfit("emulate", config, &e.to_string()))
    };
    limit::check(&resolved.config, &simulated(&programs, &costs)?)?;
    let shared = Arc::new(EmulationShared {
        steps: config.steps,
        mesh: config.mesh(),
        exchangeable: Exchangeable::emulated(&resolved.config, &programs.most, assumed, bytes),
        offered: Offered::default(),
        programs: Arc::new(programs),
        costs: Arc::new(costs),
        later,
        status: Arc::new(StatusBoard::new(config.mesh().world())),
        epoch: Instant::now(),
    });
    let (steps, mut ranks) = run_all(&shared, world::options(config), on_step)?;
    let programs = match ranks[0].exchanged.take() {
        Some(program) => Programs::alike(config.deal(), (*program).clone()),
        None => (*shared.programs).clone(),
    };
    let last = shared.later.as_ref().map_or(&shared.costs, |(_, costs)| costs);
    let simulated = simulated(&programs, last)?;
    let ends = simulated.ranks.iter().filter_map(|r| r.own_span()).map(|(_, end)| end);
    let periods = programs.each().map(|program| step_period_ns(program, last));
    let report = EmulationReport {
        exchanging_ns: ranks[0].exchanging_ns,
        simulated_makespan_ns: ends.max().unwrap_or(0),
        simulated_step_ns: periods.max().unwrap_or(0),
        simulated_bubble: simulated.bubble(),
        measured: measured(&shared, &programs, &steps, ranks),
        simulated,
        steps,
    };
    if let Some(path) = &config.trace {
        trace::write(path, &report.measured)?;
    }
    Ok(report)
}

/// The costs of the run's stages, from the file that setting `of` names.
fn costs_of(
    of: &'static str,
    table: &Table,
    config: &Config,
    resolved: &Resolved,
) -> Result<Costs, ConfigError> {
    let sharers = Sharers { zero3: config.zero3, replicas: config.dp };
    let costs = table.of(resolved.stages(), sharers, None);
    let costs = costs.map_err(|e| misfit(of, config, &e.to_string()))?;
    let costs = with_head(&costs, of, table, config, resolved)?;
    let costs = match &resolved.sample_slices[..] {
        [] => costs,
        tokens => of_slices(&costs, resolved.stages(), &growth(of, table, config)?, tokens),
    };
    // The executor runs the two halves of an overlapped pair one after the other.
    if costs.overlap_ns.is_some() {
        let problem = "t_overlap: this executor overlaps no computation; leave it out";
        return Err(misfit(of, config, problem));
    }
    if !costs.states.is_empty() {
        let problem = "t_state_read, t_state_add: no states are copied here; leave them out";
        return Err(misfit(of, config, problem));
    }
    let micro_batches = resolved.config.micro_batches();
    check_sums(&costs, micro_batches).map_err(|e| misfit(of, config, &e.to_string()))?;
    Ok(costs)
}

/// The run with its samples cut as the settings and the given times say, where they are.
fn in_slices(resolved: Resolved, costs: &Table) -> Result<Resolved, ConfigError> {
    let config = &resolved.config;
    let n = config.slices();
    if n < 2 || !resolved.sample_slices.is_empty() {
        return Ok(resolved);
    }
    let of = |e: &dyn Display| misfit("emulate", config, &e.to_string());
    let stages = costs.of(resolved.stages(), ALONE, None).map_err(|e| of(&e))?.stages;
    let sum = |part: fn(&StageCosts) -> u64| stages.iter().map(part).sum();
    let times = [sum(|s| s.f_ns), sum(|s| s.b_ns), sum(|s| s.w_ns)];
    let growth = growth("emulate", costs, config)?;
    let tokens = slices_of(config.seq as u64, n, config.slice_cut, times, &growth);
    let tokens = tokens.map_err(|e| {
        let (problem, help) = e.split_once("; ").unwrap_or((&e, "use fewer"));
        let problem = problem.rsplit(": ").next().unwrap_or(problem);
        ConfigError::value("slices", n, problem, help)
    })?;
    Ok(resolved.with_slices(&tokens))
}

fn growth(of: &'static str, table: &Table, config: &Config) -> Result<SampleGrowth, ConfigError> {
    table.growth().map_err(|e| misfit(of, config, &e.to_string()))
}

/// The same with slices behind the stages where the head is split.
fn with_head(
    costs: &Costs,
    of: &'static str,
    table: &Table,
    config: &Config,
    resolved: &Resolved,
) -> Result<Costs, ConfigError> {
    let Some((blocks, _)) = resolved.head_blocks()? else { return Ok(costs.clone()) };
    let head = table.head_times().map_err(|e| misfit(of, config, &e.to_string()))?;
    let missing = "t_head is missing: a split head needs the times of its F, B and W";
    let head = head.ok_or_else(|| misfit(of, config, missing))?;
    Ok(with_slices(costs, head, head, &blocks))
}

/// Costs that the run cannot use, of the file that setting `of` names.
fn misfit(of: &'static str, config: &Config, problem: &str) -> ConfigError {
    let file = if of == "costs" { &config.costs } else { &config.emulate };
    let name = file.as_deref().unwrap_or(Path::new("the given costs")).display();
    wrong(of, &name, problem)
}

fn is_without_bytes(costs: &Costs) -> bool {
    costs.memory.iter().all(|m| m.activation == 0)
}

/// Bytes of every stage. Without sizes a micro-batch counts as two units, half of which W needs.
fn bytes_of(costs: &Costs) -> Vec<StageBytes> {
    let half = StageBytes { activation: 2, stash: 1, ..StageBytes::default() };
    match is_without_bytes(costs) {
        true => costs.memory.iter().map(|of| StageBytes { head: of.head, ..half }).collect(),
        false => costs.memory.clone(),
    }
}

fn programs(resolved: &Resolved, costs: &Costs, bytes: &[StageBytes]) -> Result<Programs, Error> {
    if let (Some(limit), true) = (resolved.config.mem_limit, is_without_bytes(costs)) {
        let help = "give mem_f and mem_w in the file of emulate, in bytes";
        let problem = "the given costs have no bytes";
        return Err(ConfigError::value("mem-limit", limit, problem, help).into());
    }
    let weighed = resolved.generator_costs(costs, bytes);
    replicas::programs(resolved, &weighed)
}

/// Runs all ranks to their end: every step, and every rank's spans of the first few steps.
fn run_all(
    shared: &Arc<EmulationShared>,
    options: ThreadsOptions,
    mut on_step: impl FnMut(&EmulatedStep),
) -> Result<(Vec<EmulatedStep>, Vec<RankSteps>), Error> {
    // Nothing is computed, so any device will do.
    let devices = Devices::find(DeviceKind::Cpu, Precision::Fp32)?;
    let world = World::threads(shared.mesh, options, &devices);
    let context = ProcessContext {
        here: (0..shared.mesh.world()).collect(),
        mesh: shared.mesh,
        status: shared.status.clone(),
        recorder: None,
        span: Span::current(),
        stack_bytes: STACK_BYTES,
    };
    let rank_s = shared.clone();
    let work = move |local: LocalRank, see: &mut dyn FnMut(EmulatedStep)| {
        run_rank(&rank_s, local.communicator, see)
    };
    let mut ranks = Ranks::start(world, context, work);
    let mut steps = Vec::new();
    while let Some(step) = ranks.next_news() {
        on_step(&step);
        steps.push(step);
    }
    Ok((steps, ranks.end()?))
}

fn measured(
    shared: &EmulationShared,
    programs: &Programs,
    steps: &[EmulatedStep],
    ranks: Vec<RankSteps>,
) -> Timeline {
    let kept = ranks[0].kept.len();
    let first = ranks[0].first as usize - 1;
    let mut order: Vec<usize> = (0..kept).collect();
    order.sort_by_key(|i| steps[first + i].makespan_ns);
    let median = order[(kept - 1) / 2];
    let spans = ranks.into_iter().map(|mut rank| rank.kept.swap_remove(median));
    let title = format!("{} · {} · emulated", programs.most.kind, shared.mesh);
    trace::timeline(title, shared.mesh, &programs.most.placement, spans)
}
