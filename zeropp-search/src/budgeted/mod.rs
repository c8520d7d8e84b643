//! One scheduler for three budgets: activation memory, gathered weights, and collectives a step.
//!
//! The Zero Bubble family bounds activations and keeps all weights; ZeroPP bounds weights by a
//! fixed order of blocks. Here an order is searched for within limits on both: a *skeleton* says
//! which stages a rank visits when (`walk`, `pattern`, `others`), annealing over
//! sequences moves single actions (`anneal`), and W fill what is left (`decode`). What
//! comes out is never slower than any other kind that keeps the same limits. The result depends on
//! the request alone: no clock is read, and effort is counted in entries timed.
//!
//! The cut of sums is that of [`Budgets::units`]: one unit of B unless the whole gradients of a
//! rank's stages may not all wait for the end; then units of [`Shape::unit`]. It never depends on
//! times.

use zeropp_schedule::ir::{Action, Schedule, looping, vee};
pub use zeropp_schedule::schedules::Objective;
use zeropp_schedule::schedules::{OrderCosts, ScheduleError, Shape, default_unit};

mod anneal;
mod bound;
#[cfg(test)]
mod deadlines;
mod decode;
mod drift;
#[cfg(test)]
mod judged;
mod ledger;
mod moves;
mod others;
mod pattern;
mod problem;
mod random;
mod residency;
mod search;
mod sequence;
mod starting_point;
mod stretch;
mod waiting;
mod walk;
mod write;

#[cfg(test)]
mod auto_tests;
#[cfg(test)]
mod decode_tests;
#[cfg(test)]
mod optimum;
#[cfg(test)]
mod tests;

/// Where stages live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// [`looping`].
    Looping,
    /// [`vee`].
    Vee,
    /// Each with half of the effort.
    Either,
}

/// Limits besides that on activations, which is [`OrderCosts::mem_limit`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Budgets {
    /// The most gathered weights of a rank at once, those on their way included.
    pub gathered: Option<u64>,
    /// Gathered weights of each stage in the unit of `gathered`; empty where each counts as 1.
    pub weights: Vec<u64>,
    /// The most stages of a rank with a whole gradient at once: added to, or on its way to be
    /// reduced. Below V, gradients are reduced once a unit of [`Shape::unit`].
    pub gradients: Option<usize>,
    /// The most gathers a rank and step.
    pub gathers: Option<usize>,
    /// The most reductions a rank and step.
    pub reductions: Option<usize>,
    /// Time of each stage's recomputation and the memory that it and its B need besides what F
    /// keeps; empty where nothing is recomputed, (0, 0) for a stage that is not.
    pub recompute: Vec<(u64, i64)>,
}

impl Budgets {
    fn weight_of(&self, stage: usize) -> u64 {
        self.weights.get(stage).copied().unwrap_or(1)
    }

    fn recomputed(&self, stage: usize) -> (u64, i64) {
        self.recompute.get(stage).copied().unwrap_or((0, 0))
    }

    /// The cut of sums: micro-batches of each unit. It follows from the shape and this limit alone,
    /// so that times do not change a bit of a gradient.
    ///
    /// # Panics
    /// Panics as [`Shape::units`] does.
    pub fn units(&self, shape: &Shape) -> Vec<usize> {
        match self.gradients {
            Some(most) if most < shape.virtual_stages => shape.units(),
            _ => vec![shape.micro_batches],
        }
    }

    fn check(&self, shape: &Shape, costs: &OrderCosts) -> Result<(), ScheduleError> {
        let stages = shape.stages();
        let fail = |field, value, works| Err(field_error(field, value, works));
        for (field, found) in [("weights", self.weights.len()), ("recompute", self.recompute.len())]
        {
            if found != 0 && found != stages {
                let works = format!("give one for each of the {stages} stages, or none");
                return fail(field, found, works);
            }
        }
        if let Some(at) = (0..stages).find(|s| costs.mem_w[*s] > 0) {
            return fail("mem_w of stage", at, "a W must free memory: mem_w ≤ 0".into());
        }
        let largest = (0..stages).map(|s| self.weight_of(s)).max().unwrap_or(0);
        if let Some(gathered) = self.gathered.filter(|gathered| *gathered < largest) {
            let works = format!("one stage alone needs {largest}");
            return fail("max_gathered", gathered as usize, works);
        }
        if let Some(gathers) = self.gathers.filter(|gathers| *gathers < shape.virtual_stages) {
            let works = format!("each of {} stages is gathered once", shape.virtual_stages);
            return fail("max_gathers", gathers, works);
        }
        let reductions = self.units(shape).len() * shape.virtual_stages;
        match self.reductions {
            Some(most) if most < reductions => {
                let works = format!(
                    "{} stages in units of {} are reduced {reductions} times; make the unit \
                     larger, or let all gradients wait for the end of the step",
                    shape.virtual_stages, shape.unit
                );
                fail("max_reductions", most, works)
            }
            _ => Ok(()),
        }
    }
}

/// The request for a schedule.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// P, V, B, and U for the cut of sums where gradients are limited.
    pub shape: &'a Shape,
    /// Times and memory of every stage.
    pub costs: &'a OrderCosts,
    /// The other limits.
    pub budgets: &'a Budgets,
    /// The objective, which is minimised.
    pub objective: Objective,
    /// Where stages live.
    pub placement: Placement,
    /// Another seed, another search.
    pub seed: u64,
    /// Whole schedules that may be timed; those given up half-way count as the part that was. None:
    /// [`default_evaluations`].
    pub evaluations: Option<u64>,
}

/// The result of a search.
#[derive(Clone, Debug)]
pub struct FoundSchedule {
    /// Compute actions with gathers, frees, reductions and recomputation, kind `auto`. Lower it
    /// with [`Residency::AsWritten`](zeropp_schedule::lower::Residency::AsWritten).
    pub schedule: Schedule,
    /// Its objective, in the costs' unit of time.
    pub span: u64,
    /// A value that no order within the budgets can beat.
    pub bound: u64,
    /// Computing time of the busiest rank.
    pub work: u64,
    /// The skeleton or the kind that it grew from.
    pub from: String,
}

impl FoundSchedule {
    /// Share of the span that the busiest rank does not compute.
    pub fn bubble(&self) -> f64 {
        1.0 - self.work as f64 / self.span.max(1) as f64
    }

    /// The same for the bound.
    pub fn bubble_bound(&self) -> f64 {
        1.0 - self.work as f64 / self.bound.max(1) as f64
    }

    /// The most gathers of a rank.
    pub fn gathers(&self) -> usize {
        let gathers = |rank: &Vec<Action>| {
            rank.iter().filter(|a| matches!(a, Action::AllGather { .. })).count()
        };
        self.schedule.ranks.iter().map(gathers).max().unwrap_or(0)
    }
}

impl std::fmt::Display for FoundSchedule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let percent = |share: f64| 100.0 * share;
        let (found, least) = (percent(self.bubble()), percent(self.bubble_bound()));
        write!(f, "{found:.2} %, at least {least:.2} % (from {})", self.from)
    }
}

/// Evaluations without a number: what takes some ten seconds for schedules of a thousand actions,
/// less for small ones, which it has searched through by then, and for large ones, over which
/// annealing could not range anyway.
pub fn default_evaluations(shape: &Shape) -> u64 {
    let entries = (2 * shape.stages() * shape.micro_batches) as u64;
    let share = (entries / 2048).max(1) * (entries / 32_768).max(1);
    (LETTERS / (entries * share)).clamp(4, 1200 * entries.max(4))
}

/// F and B that the default search times.
const LETTERS: u64 = 400_000_000;

/// Kind `auto`: an order within the limits in `costs`, for their objective.
/// Without a limit on activations it takes as much as ZeroPP's default unit holds.
///
/// # Errors
/// As [`schedule`].
pub fn auto(shape: &Shape, costs: &OrderCosts) -> Result<FoundSchedule, ScheduleError> {
    let Shape { pp, virtual_stages: v, micro_batches, .. } = *shape;
    let mut costs = costs.clone();
    let limits = costs.limits;
    let largest = costs.mem_f.iter().max().copied().unwrap_or(0);
    let held = default_unit(pp, v, micro_batches).saturating_mul(v) as i64;
    costs.mem_limit.get_or_insert(held.saturating_mul(largest));
    let entries = (2 * shape.stages() * micro_batches) as u64;
    let request = Request {
        shape: &Shape { unit: micro_batches, ..*shape },
        budgets: &Budgets {
            gathered: Some(limits.gathered.unwrap_or(2) as u64),
            gathers: limits.gathers,
            ..Budgets::default()
        },
        costs: &costs,
        objective: costs.objective,
        placement: Placement::Either,
        seed: 1,
        evaluations: Some(
            limits.evaluations.unwrap_or(default_evaluations(shape).min(2 * entries)),
        ),
    };
    let mut found = schedule(&request)?;
    // Reductions follow from the cut of sums, and lowering adds them.
    for actions in &mut found.schedule.ranks {
        actions.retain(|a| !matches!(a, Action::ReduceScatter { .. }));
    }
    Ok(found)
}

/// Finds an order within the budgets. It is never slower than the other kinds that keep them, as
/// the simulator has it.
///
/// # Errors
/// A shape, costs or budgets that contradict each other; budgets within which nothing was found.
pub fn schedule(request: &Request) -> Result<FoundSchedule, ScheduleError> {
    let Request { shape, costs, budgets, objective, .. } = *request;
    shape.check(write::KIND)?;
    costs.check(write::KIND, shape.stages())?;
    budgets.check(shape, costs)?;
    if shape.virtual_stages > sequence::STAGES_MAX || shape.micro_batches > usize::from(u16::MAX) {
        let works = format!("at most {} and {} micro-batches", sequence::STAGES_MAX, u16::MAX);
        return Err(field_error("virtual_stages", shape.virtual_stages, works));
    }
    let (pp, v) = (shape.pp, shape.virtual_stages);
    let placements = match request.placement {
        Placement::Looping => vec![looping(pp, v)],
        Placement::Vee => vec![vee(pp, v)],
        Placement::Either if v == 1 => vec![looping(pp, v)],
        Placement::Either => vec![looping(pp, v), vee(pp, v)],
    };
    let evaluations = request.evaluations.unwrap_or_else(|| default_evaluations(shape));
    let problem = |placed| problem::Problem::new(shape, costs, budgets, placed, objective);
    let problems: Vec<problem::Problem> = placements.into_iter().map(problem).collect();
    let entries = evaluations.saturating_mul(problems[0].entries() as u64);
    search::found(&problems, request, entries).ok_or_else(|| {
        let limit = costs.mem_limit.unwrap_or(0).max(0) as usize;
        let works = "no order was found within all limits; raise this one or another".to_string();
        field_error("mem_limit", limit, works)
    })
}

/// A value that no order of `shape` on `placement` within the budgets can beat, and the computing
/// time of the busiest rank.
pub(crate) fn least_span(
    shape: &Shape,
    costs: &OrderCosts,
    budgets: &Budgets,
    placement: &[usize],
    objective: Objective,
) -> (u64, u64) {
    let p = problem::Problem::new(shape, costs, budgets, placement.to_vec(), objective);
    let work = p.work.iter().max().copied().unwrap_or(0);
    (bound::bound(&p).max(work) as u64, work as u64)
}

fn field_error(field: &'static str, value: usize, works: String) -> ScheduleError {
    ScheduleError::Field { kind: write::KIND, field, value, works }
}
