//! A schedule made, proven and simulated as a request says.

use zeropp::pipeline::exchange::json::{Document, Measures};
use zeropp::pipeline::ir::Schedule;
use zeropp::pipeline::lower::lower;
use zeropp::pipeline::metrics::Metrics;
use zeropp::pipeline::report::measures;
use zeropp::pipeline::schedules::{
    ACTIONS_MAX, Kind, Limits, Objective, OrderCosts, Shape, StepForm, default_unit, generate_cut,
    generate_split,
};
use zeropp::pipeline::simulate::{simulate, simulate_steps};
use zeropp::pipeline::timeline::Timeline;
use zeropp::pipeline::verify::{VerifyLimits, verify};
use zeropp::search::bound::least_bubble_rate;
use zeropp::search::budgeted::{auto, default_evaluations};
use zeropp::search::generate_with_costs;

use super::args::{Limit, ScheduleRequest};
use super::costs::ScheduleCosts;
use super::facts;
use super::micros::micros;
use crate::failure::Failure;
use crate::large;

/// A schedule with all that is known about it.
pub(super) struct SimulatedSchedule {
    /// Stages per rank and the rest of the shape it was made for.
    pub(super) shape: Shape,
    /// Schedule, costs and measures.
    pub(super) document: Document,
    /// The simulated run, in nanoseconds, with what it is of.
    pub(super) timeline: Timeline,
    /// A `bubble_rate` that no order is below, in the memory that this one takes or in
    /// that of --mem-limit, and with as many stages gathered; where anything is known.
    pub(super) rate_at_least: Option<f64>,
    /// The costs in words.
    pub(super) costs: String,
    /// Result of a search and its distance from the best at most, to stand beside the numbers.
    pub(super) found: Option<String>,
    /// Remarks for standard error.
    pub(super) notes: Vec<String>,
}

impl SimulatedSchedule {
    pub(super) fn schedule(&self) -> &Schedule {
        &self.document.schedule
    }

    pub(super) fn measures(&self) -> &Measures {
        self.document.measures.as_ref().expect("made with measures")
    }
}

/// The shape of `kind` where the request leaves it open. `alike` is a shape for kinds side by
/// side: the same step for all of them.
pub(super) fn shape(request: &ScheduleRequest, kind: &str, alike: bool) -> Shape {
    let pp = request.pp;
    let row = Kind::find(kind);
    let in_units = row.is_some_and(|kind| kind.step == StepForm::Units) && !alike;
    let stages = row.map_or(1, |kind| kind.stages.default_number());
    let twice = pp.saturating_mul(2);
    let step = if in_units { twice - 1 } else { twice };
    let slices = request.slices.as_ref().map_or(1, |slices| slices.number.max(1));
    let step = request.unit.filter(|_| in_units).unwrap_or(step.div_ceil(slices));
    let virtual_stages = request.virtual_stages.unwrap_or(stages);
    let micro_batches = request.micro_batches.unwrap_or(step.saturating_mul(2));
    // Of samples in slices a unit has as few as have as many slices as a unit has micro-batches.
    let unit = request.unit.unwrap_or_else(|| match slices {
        1 => default_unit(pp, virtual_stages, micro_batches),
        _ => twice.saturating_sub(1).div_ceil(slices),
    });
    Shape { pp, virtual_stages, micro_batches, unit }
}

/// Limits on gathers and on a search are for kinds that have them.
fn keeps_to_kind(request: &ScheduleRequest, kind: &str) -> Result<(), Failure> {
    let plans = request.all || Kind::find(kind).is_some_and(|kind| kind.plans_gathers);
    let Limits { gathered, gathers, evaluations } = request.limits;
    let given = [
        ("max-gathered", gathered.map(|n| n as u64)),
        ("max-gathers", gathers.map(|n| n as u64)),
        ("evaluations", evaluations),
    ];
    let first = given.into_iter().find_map(|(name, value)| Some((name, value?)));
    match first {
        Some((name, value)) if !plans => Err(Failure::bad_input(format!(
            "{name} = {value}: schedule {kind} has no such setting; use kind {}, or leave it \
             out",
            Kind::names(|kind| kind.plans_gathers)
        ))),
        _ => Ok(()),
    }
}

/// F and B that a search may time: three hours or so.
const SEARCHED_MAX: u64 = 400_000_000_000;

fn is_searched(kind: &str) -> bool {
    Kind::find(kind).is_some_and(Kind::is_searched)
}

/// Refuses a search that would not end within hours.
fn searches_for_hours_at_most(
    request: &ScheduleRequest,
    kind: &str,
    shape: &Shape,
) -> Result<(), Failure> {
    let Some(evaluations) = request.limits.evaluations.filter(|_| is_searched(kind)) else {
        return Ok(());
    };
    let letters = 2 * (shape.stages() as u64).saturating_mul(shape.micro_batches as u64);
    let most = (SEARCHED_MAX / letters.max(1)).max(1);
    if evaluations <= most {
        return Ok(());
    }
    Err(Failure::bad_input(format!(
        "evaluations = {evaluations}: the search would take more than three hours; use at most \
         {most}"
    )))
}

/// The micro-batches of so many slices of each sample; refuses more than a schedule may have,
/// before there are costs of each.
fn of_slices(kind: &str, shape: &Shape, number: usize) -> Result<usize, Failure> {
    let micro_batches = shape.micro_batches.saturating_mul(number);
    let Some(kind) = Kind::find(kind).filter(|_| number > 1) else { return Ok(micro_batches) };
    shape.check(kind.name).map_err(Failure::bad_input)?;
    if (Shape { micro_batches, ..*shape }).check(kind.name).is_ok() {
        return Ok(micro_batches);
    }
    let (samples, stages) = (shape.micro_batches, shape.stages());
    Err(Failure::bad_input(format!(
        "slices = {number}: of {samples} samples on {stages} stages that is more than \
         {ACTIONS_MAX} actions; use at most {}",
        ACTIONS_MAX / (3 * stages * samples)
    )))
}

/// Generates, lowers if asked, verifies and simulates.
pub(super) fn make(
    request: &ScheduleRequest,
    kind: &str,
    shape: Shape,
) -> Result<SimulatedSchedule, Failure> {
    keeps_to_kind(request, kind)?;
    let stages = shape.pp.checked_mul(shape.virtual_stages).filter(|s| *s <= STAGES_MAX);
    let stages = stages.ok_or_else(|| {
        Failure::bad_input(format!(
            "pp = {}: times virtual = {} that is more than {STAGES_MAX} stages; use less of one",
            shape.pp, shape.virtual_stages
        ))
    })?;
    searches_for_hours_at_most(request, kind, &shape)?;
    let number = request.slices.as_ref().map_or(1, |slices| slices.number);
    let micro_batches = of_slices(kind, &shape, number)?;
    let mut schedule_costs = ScheduleCosts::new(&request.costs, stages, micro_batches)?;
    schedule_costs.add_slices(&request.head_blocks);
    let sample_slices = match &request.slices {
        Some(slices) => schedule_costs.cut(slices, stages)?,
        None => Vec::new(),
    };
    large::announce(shape.pp, shape.virtual_stages, micro_batches);
    let limit = request.limit.map(|limit| units_of(limit, &shape, &schedule_costs));
    schedule_costs.generator.mem_limit = limit;
    schedule_costs.generator.limits = request.limits;
    if let Some(options) = &request.lower {
        schedule_costs.generator.objective = options.sync.into();
    }
    let (shape, schedule, found) =
        generated(request, kind, shape, &schedule_costs, &sample_slices)?;
    let schedule = match &request.lower {
        Some(options) => lower(&schedule, options),
        None => schedule,
    };
    // Our own generators are held to every rule before anyone gets to see their work.
    let limits =
        VerifyLimits { forward_only: schedule.is_forward_only(), ..VerifyLimits::default() };
    verify(&schedule, &limits).map_err(Failure::failed_run)?;
    let timeline = simulate(&schedule, &schedule_costs.simulator).map_err(Failure::bad_input)?;
    let measures = measures(&schedule, &timeline, &schedule_costs.simulator, micros);
    keeps_limit(kind, &measures, limit)?;
    let metrics = Metrics::new(&schedule, &timeline, &schedule_costs.simulator);
    let rate_at_least = least_bubble_rate(&schedule, &metrics, &schedule_costs.simulator, limit);
    let actions: usize = schedule.ranks.iter().map(Vec::len).sum();
    let most = (DRAWN_MAX / actions.max(1)).max(1);
    if request.steps > most {
        return Err(Failure::bad_input(format!(
            "simulate-steps = {}: with {actions} actions a step that is more than {DRAWN_MAX} \
             actions to draw; use at most {most}",
            request.steps
        )));
    }
    let mut timeline = match request.steps {
        1 => timeline,
        steps => simulate_steps(&schedule, &schedule_costs.simulator, steps)
            .map_err(Failure::bad_input)?,
    };
    timeline.memory_unit = schedule_costs.memory_unit;
    timeline.facts = facts::facts(&schedule, &request.costs, &schedule_costs);
    timeline.facts.extend(facts::made_by());
    let costs = facts::costs(&request.costs, &schedule_costs);
    let document =
        Document { schedule, costs: Some(schedule_costs.document()), measures: Some(measures) };
    // Notes are about micro-batches, the shape is of samples.
    let noted = Kind::find(kind).filter(|_| sample_slices.is_empty());
    let unit = noted.and_then(|kind| (kind.note)(&shape));
    let notes = schedule_costs.note.into_iter().chain(unit).collect();
    Ok(SimulatedSchedule { shape, document, timeline, rate_at_least, costs, found, notes })
}

/// Most actions of several steps together: a picture of more is no picture, and takes gigabytes.
const DRAWN_MAX: usize = 1 << 22;
/// Beyond this a slip of the keyboard is likelier than a pipeline.
const STAGES_MAX: usize = 1 << 16;

/// The schedule, its shape where the generator chooses the unit, and what a search says of it.
fn generated(
    request: &ScheduleRequest,
    kind: &str,
    shape: Shape,
    schedule_costs: &ScheduleCosts,
    sample_slices: &[u64],
) -> Result<(Shape, Schedule, Option<String>), Failure> {
    if !sample_slices.is_empty() {
        let (blocks, costs) = (&request.head_blocks, &schedule_costs.generator);
        let schedule = generate_cut(kind, &shape, sample_slices, blocks, Some(costs));
        return Ok((shape, schedule.map_err(Failure::bad_input)?, None));
    }
    let costs = &schedule_costs.generator;
    if is_searched(kind) && !request.all && request.head_blocks.is_empty() {
        let evaluations = costs.limits.evaluations.unwrap_or_else(|| default_evaluations(&shape));
        let limits = Limits { evaluations: Some(evaluations), ..costs.limits };
        let costs = OrderCosts { limits, ..costs.clone() };
        let found = auto(&shape, &costs).map_err(Failure::bad_input)?;
        let of = match costs.objective {
            Objective::OwnSpan => "largest own span's",
            Objective::Makespan => "whole step's",
        };
        let line = format!("search: {of} bubble {found}");
        return Ok((shape, found.schedule, Some(line)));
    }
    let with_unit = Kind::find(kind).and_then(|kind| kind.with_unit);
    let with_unit = with_unit.filter(|_| {
        request.unit.is_none() && costs.mem_limit.is_some() && request.head_blocks.is_empty()
    });
    if let Some(with_unit) = with_unit {
        let (unit, schedule) = with_unit(&shape, costs).map_err(Failure::bad_input)?;
        return Ok((Shape { unit, ..shape }, schedule, None));
    }
    let schedule = match request.head_blocks.is_empty() {
        true => generate_with_costs(kind, &shape, costs),
        false => generate_split(kind, &shape, &request.head_blocks, Some(costs)),
    };
    Ok((shape, schedule.map_err(Failure::bad_input)?, None))
}

fn units_of(limit: Limit, shape: &Shape, schedule_costs: &ScheduleCosts) -> i64 {
    let largest = schedule_costs.generator.mem_f.iter().max().copied().unwrap_or(0);
    match limit {
        Limit::Units(units) => units,
        Limit::TimesP(fold) => {
            let micro_batches = (shape.pp * shape.virtual_stages) as i64;
            fold.saturating_mul(micro_batches).saturating_mul(largest)
        }
    }
}

fn keeps_limit(kind: &str, measures: &Measures, limit: Option<i64>) -> Result<(), Failure> {
    let Some(limit) = limit else { return Ok(()) };
    let peaks = measures.peak_activation.iter().enumerate();
    match peaks.max_by_key(|(_, peak)| **peak) {
        Some((rank, peak)) if i128::from(*peak) > i128::from(limit) => {
            Err(Failure::bad_input(format!(
                "mem-limit = {limit}: {kind} needs {peak} on rank {rank}; raise the limit, or take \
                 one of {}, which look for an order within it",
                Kind::names(|kind| kind.obeys_limit)
            )))
        }
        _ => Ok(()),
    }
}
