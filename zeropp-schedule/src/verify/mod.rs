//! Proves that a schedule is complete, in order, within its limits and free of deadlock, before
//! any rank starts.
//!
//! Both forms are understood. A *compute-only* schedule has nothing but compute actions; messages
//! between ranks are implied. A *program* (lowered) has gathers, frees, reductions, sends, receives
//! and the optimizer step as actions, and is judged as the executor would run it: sends are
//! buffered and never block, receives are posted without waiting, a compute action waits for its
//! message, and collectives involve no other pipeline rank.

use std::fmt;

use crate::ir::{Action, Compute, Schedule};

mod deadlock;
mod messages;
mod order;
mod tables;
mod weights;

/// What a schedule has to keep besides being correct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerifyLimits {
    /// The W of a stage must run in micro-batch order; the bits of a gradient depend on it.
    pub w_in_order: bool,
    /// A program must end with an optimizer step (programs of other tools have none).
    pub optimizer_step: bool,
    /// The most stages whose weights a rank may hold at once.
    pub gathered_max: Option<usize>,
    /// The most micro-batches, counted per stage, whose activations a rank may keep at once from F
    /// (from R where the stage recomputes) to the end of B.
    pub activations_max: Option<usize>,
}

impl Default for VerifyLimits {
    fn default() -> VerifyLimits {
        VerifyLimits {
            w_in_order: true,
            optimizer_step: true,
            gathered_max: None,
            activations_max: None,
        }
    }
}

/// An action of a rank's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Pipeline rank.
    pub rank: usize,
    /// Index in the rank's list, from 0.
    pub index: usize,
    /// The action there.
    pub action: Action,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, action {} ({})", self.rank, self.index, self.action)
    }
}

/// Why a schedule was rejected: the first fault found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    /// The placement, the units or the ranks contradict each other.
    #[error("schedule: {0}")]
    Header(String),
    /// An action breaks a rule.
    #[error("{place}: {fault}")]
    Action {
        /// Where.
        place: Place,
        /// The rule.
        fault: Fault,
    },
    /// A rank's list lacks an action.
    #[error("rank {rank}: {what} is missing")]
    Missing {
        /// Pipeline rank.
        rank: usize,
        /// The action, in the IR's spelling.
        what: String,
    },
    /// Ranks wait for each other in a circle.
    #[error("deadlock: {}", circle(.0))]
    Deadlock(Vec<Stuck>),
}

/// One rank of a deadlock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// The action that cannot start.
    pub place: Place,
    /// What it waits for: the compute action of a neighbouring stage, in the next rank of the list.
    pub waits_for: (Compute, usize, usize),
}

/// The rule that an action breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // The messages say what each is.
pub enum Fault {
    #[error("unknown stage; stages are 0..{stages}")]
    UnknownStage { stages: usize },
    #[error("unknown micro-batch; micro-batches are 0..{micro_batches}")]
    UnknownMicroBatch { micro_batches: usize },
    #[error("wrong rank; stage {stage} lives on rank {home}")]
    WrongRank { stage: usize, home: usize },
    #[error("duplicate of action {first}")]
    Duplicate { first: usize },
    #[error("the backward is whole there and split at action {other}")]
    WholeAndSplit { other: usize },
    #[error("no {} before it", compute(.0))]
    NothingBefore((Compute, usize, usize)),
    #[error("no {0} before it")]
    NoActionBefore(Action),
    #[error("it recomputes for {}, which runs earlier", compute(.0))]
    RecomputeLate((Compute, usize, usize)),
    #[error("W of stage {stage} must run in micro-batch order, but {after} ran before")]
    WeightOrder { stage: usize, after: usize },
    #[error("superfluous; the neighbouring stage is on the same rank, or there is none")]
    NoNeighbour,
    #[error("crossed; the next message on this link is {0}")]
    Crossed(Action),
    #[error("stage {stage} is not gathered")]
    NotGathered { stage: usize },
    #[error("stage {stage} is gathered already, by action {since}")]
    GatheredTwice { stage: usize, since: usize },
    #[error("never freed")]
    NeverFreed,
    #[error("{resident} gathered stages are more than the limit of {limit}")]
    GatheredLimit { resident: usize, limit: usize },
    #[error("activations of {alive} micro-batches are more than the limit of {limit}")]
    ActivationLimit { alive: usize, limit: usize },
    #[error("too early; {done} of the {size} micro-batches of unit {unit} have had their W")]
    ReducedEarly { unit: usize, done: usize, size: usize },
    #[error("reduced already; nothing was added since")]
    ReducedTwice,
    #[error("the gradient of unit {unit} is not reduced before it")]
    NotReduced { unit: usize },
    #[error("after the optimizer step")]
    AfterStep,
}

/// Checks `schedule` against every rule.
///
/// # Errors
/// The first fault, with rank, index and action.
pub fn verify(schedule: &Schedule, limits: &VerifyLimits) -> Result<(), VerifyError> {
    header(schedule)?;
    let tables = tables::Tables::new(schedule)?;
    order::check(schedule, &tables, limits)?;
    if is_program(schedule) {
        messages::check(schedule, &tables)?;
        weights::check(schedule, limits)?;
    }
    deadlock::check(schedule, &tables)
}

/// True where the schedule has more than compute actions.
pub fn is_program(schedule: &Schedule) -> bool {
    schedule.ranks.iter().flatten().any(|a| a.computes().next().is_none())
}

/// Placement, units and ranks must fit together.
fn header(schedule: &Schedule) -> Result<(), VerifyError> {
    let fail = |message: String| Err(VerifyError::Header(message));
    let pp = schedule.pp();
    if let Some(stage) = schedule.placement.iter().position(|rank| *rank >= pp) {
        let rank = schedule.placement[stage];
        return fail(format!("stage {stage} is placed on rank {rank}; ranks are 0..{pp}"));
    }
    if let Some(rank) = (0..pp).find(|rank| !schedule.placement.contains(rank)) {
        return fail(format!("rank {rank} has no stage; place one there or take fewer ranks"));
    }
    if pp == 0 {
        return fail("there are no ranks; at least one is needed".into());
    }
    if let Some(unit) = schedule.units.iter().position(|n| *n == 0) {
        return fail(format!("unit {unit} has no micro-batches; give it one or leave it out"));
    }
    if schedule.units.is_empty() {
        return fail("there are no units; at least one is needed".into());
    }
    // Before tables are sized by it: a slip in a file must not ask for all memory.
    let computes: usize = schedule.ranks.iter().flatten().map(|a| a.computes().count()).sum();
    let micro_batches = schedule.units.iter().try_fold(0usize, |sum, n| sum.checked_add(*n));
    match micro_batches.and_then(|b| b.checked_mul(schedule.stages())) {
        Some(least) if least <= computes => Ok(()),
        _ => fail(format!(
            "{computes} compute actions are too few for {} stages and {} micro-batches; each needs \
             an F and a backward",
            schedule.stages(),
            micro_batches.map_or("too many".into(), |b| b.to_string()),
        )),
    }
}

fn compute(c: &(Compute, usize, usize)) -> Action {
    Action::compute(c.0, c.1, c.2)
}

fn circle(stuck: &[Stuck]) -> String {
    let one = |s: &Stuck| format!("{} waits for {}", s.place, compute(&s.waits_for));
    stuck.iter().map(one).collect::<Vec<_>>().join("; ")
}

/// The place of action `index` of `rank`.
fn place(schedule: &Schedule, rank: usize, index: usize) -> Place {
    Place { rank, index, action: schedule.ranks[rank][index] }
}

/// Shorthand for the error of one action.
fn fault<T>(
    schedule: &Schedule,
    rank: usize,
    index: usize,
    fault: Fault,
) -> Result<T, VerifyError> {
    Err(VerifyError::Action { place: place(schedule, rank, index), fault })
}

#[cfg(test)]
mod mutation_tests;
#[cfg(test)]
mod tests;
