//! Proves that a schedule is complete, in order, within its limits and free of deadlock, before
//! any rank starts.
//!
//! Both forms are understood. A *compute-only* schedule has nothing but compute actions; messages
//! between ranks are implied. A *program* (lowered) has gathers, frees, reductions, sends, receives
//! and the optimizer step as actions, and is judged as the executor would run it: sends are
//! buffered and never block, receives are posted without waiting, a compute action waits for its
//! message, and collectives involve no other pipeline rank.

use crate::action::Lowering;
use crate::ir::{Action, BLOCKS_MAX, Schedule, Task};

mod copies;
mod deadlock;
mod issue;
mod messages;
mod order;
mod replicas;
mod tables;
mod validate;
mod weights;
mod words;

pub use issue::verify_issue_order;
pub use replicas::{verify_replicas, verify_replicas_issue_order};
pub use words::Words;

/// What a schedule has to keep besides being correct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerifyLimits {
    /// The W of a stage must run in micro-batch order, of a sample's slices from the last to the
    /// first; and in micro-batch order the F of the last stage (its R where it recomputes), in
    /// which a head makes its weight gradient, or those of a split head. The bits of a gradient
    /// depend on it.
    pub w_in_order: bool,
    /// A program must end with an optimizer step (programs of other tools have none).
    pub optimizer_step: bool,
    /// Every stage and micro-batch has its F, and nothing else is computed, reduced or updated; the
    /// two above are not looked at.
    pub forward_only: bool,
    /// The most stages whose weights a rank may hold at once.
    pub gathered_max: Option<usize>,
    /// The most micro-batches, counted per stage, whose activations a rank may keep at once from F
    /// (from R where the stage recomputes) to the end of B, less those that are copied out.
    pub activations_max: Option<usize>,
    /// The most micro-batches, counted per stage, that a rank may have copied out at once.
    pub out_max: Option<usize>,
}

impl Default for VerifyLimits {
    fn default() -> VerifyLimits {
        VerifyLimits {
            w_in_order: true,
            optimizer_step: true,
            forward_only: false,
            gathered_max: None,
            activations_max: None,
            out_max: None,
        }
    }
}

/// An action of a rank's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocatedAction {
    /// Pipeline rank.
    pub rank: usize,
    /// Index in the rank's list, from 0.
    pub index: usize,
    /// The action there.
    pub action: Action,
}

/// Why a schedule was rejected. Printed, it spells actions as this crate does and counts from 0;
/// [`message`](Self::message) says it in words of the reader's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VerifyError {
    /// The placement, the units or the ranks contradict each other.
    Header(String),
    /// An action breaks a rule.
    Action {
        /// Where.
        place: LocatedAction,
        /// The rule.
        fault: Fault,
    },
    /// A rank's list lacks an action.
    Missing {
        /// Pipeline rank.
        rank: usize,
        /// The action.
        action: Action,
        /// The unit that it would belong to, for a reduction.
        unit: Option<usize>,
    },
    /// Ranks wait for each other in a circle.
    Deadlock(Vec<Stuck>),
    /// Ranks come to the messages between them in orders that do not go together, where sends are
    /// not buffered: each would wait for the next one, and the last for the first.
    IssueOrder(Vec<LocatedAction>),
    /// The programs of replicas do not go together.
    Replicas(String),
}

/// One rank of a deadlock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// The action that cannot start.
    pub place: LocatedAction,
    /// What it waits for: the compute action of a neighbouring stage, in the next rank of the list.
    pub waits_for: Task,
}

/// The rule that an action breaks. [`VerifyError`] says each in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // The messages say what each is.
pub enum Fault {
    UnknownStage { stages: usize },
    UnknownMicroBatch { micro_batches: usize },
    WrongRank { stage: usize, home: usize },
    NoBlocks,
    NotOfHead,
    NotThere(Action),
    Duplicate { first: usize },
    WholeAndSplit { other: usize },
    NothingBefore(Task),
    NoActionBefore(Action),
    RecomputeLate(Task),
    WeightOrder { stage: usize, after: usize },
    SliceWeightOrder { stage: usize, after: usize },
    NoSliceBefore(Task),
    HeadOrder { stage: usize, after: usize },
    NoNeighbour,
    Crossed(Action),
    NotGathered { stage: usize },
    GatheredTwice { stage: usize, since: usize },
    NeverFreed,
    GatheredLimit { resident: usize, limit: usize },
    ActivationLimit { alive: usize, limit: usize },
    OutOfSlice,
    OutLimit { out: usize, limit: usize },
    ReducedEarly { unit: usize, done: usize, size: usize },
    ReducedTwice,
    NotReducing { stage: usize },
    NotRetired { stage: usize },
    NotReduced { unit: usize },
    AfterStep,
    NotWarmUp,
    CrossesValidation,
    NotForward,
}

/// Checks `schedule` against every rule.
///
/// # Errors
/// The first fault, with rank, index and action.
pub fn verify(schedule: &Schedule, limits: &VerifyLimits) -> Result<(), VerifyError> {
    match verify_all(schedule, limits, 1).pop() {
        Some(first) => Err(first),
        None => Ok(()),
    }
}

/// Checks `schedule` against every rule and returns the faults, at most `faults_max`. Where one
/// kind of rule is broken, those that build on it are not looked at: what is in the wrong place,
/// then what is missing or out of order, then messages, then weights, then deadlocks.
pub(crate) fn verify_all(
    schedule: &Schedule,
    limits: &VerifyLimits,
    faults_max: usize,
) -> Vec<VerifyError> {
    let mut faults = Faults { found: Vec::new(), max: faults_max };
    // What is left out then is more of the same.
    let (Ok(()) | Err(Enough)) = all_rules(schedule, limits, &mut faults);
    faults.found
}

fn all_rules(
    schedule: &Schedule,
    limits: &VerifyLimits,
    faults: &mut Faults,
) -> Result<(), Enough> {
    faults.note(header(schedule))?;
    faults.none_yet()?;
    if limits.forward_only {
        order::forwards_only(schedule, faults)?;
        faults.none_yet()?;
    }
    let tables = tables::Tables::new(schedule, limits.forward_only, faults)?;
    faults.no_strangers_yet()?;
    order::check(schedule, &tables, limits, faults)?;
    faults.none_yet()?;
    let program = is_program(schedule);
    if program {
        copies::check(schedule, &tables, limits, faults)?;
        faults.none_yet()?;
        messages::check(schedule, &tables, faults)?;
        faults.none_yet()?;
        validate::check(schedule, &tables, faults)?;
        faults.none_yet()?;
    }
    if program || schedule.has_gathers() {
        weights::check(schedule, program, limits, faults)?;
        faults.none_yet()?;
    }
    faults.note(deadlock::check(schedule, &tables))
}

/// The faults found so far.
struct Faults {
    found: Vec<VerifyError>,
    max: usize,
}

/// There are as many faults as were asked for, or the rest of the rules would mislead.
struct Enough;

impl Faults {
    /// Keeps a fault.
    fn note(&mut self, checked: Result<(), VerifyError>) -> Result<(), Enough> {
        self.found.extend(checked.err());
        if self.found.len() < self.max { Ok(()) } else { Err(Enough) }
    }

    /// Goes on only where nothing was found but gaps.
    fn no_strangers_yet(&self) -> Result<(), Enough> {
        let is_gap = |fault: &VerifyError| matches!(fault, VerifyError::Missing { .. });
        if self.found.iter().all(is_gap) { Ok(()) } else { Err(Enough) }
    }

    /// Goes on only where nothing was found.
    fn none_yet(&self) -> Result<(), Enough> {
        if self.found.is_empty() { Ok(()) } else { Err(Enough) }
    }
}

/// True where the schedule has more than compute actions, and gathers and frees among them: then
/// it must be all that ranks run.
pub fn is_program(schedule: &Schedule) -> bool {
    schedule.ranks.iter().flatten().any(|a| a.row().lowering == Lowering::Makes)
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
    head_blocks(schedule)?;
    if let Some(problem) = schedule.slices_fault() {
        return fail(problem);
    }
    if schedule.units.is_empty() {
        return fail("there are no units; at least one is needed".into());
    }
    schedule.computes_fault().map_or(Ok(()), fail)
}

/// A split head has blocks, and a number of them for each rank.
fn head_blocks(schedule: &Schedule) -> Result<(), VerifyError> {
    let (slices, pp) = (&schedule.head_blocks, schedule.pp());
    if slices.is_empty() {
        return Ok(());
    }
    let sum = slices.iter().try_fold(0usize, |sum, n| sum.checked_add(*n)).unwrap_or(usize::MAX);
    match slices.len() == pp && (1..=BLOCKS_MAX).contains(&sum) {
        true => Ok(()),
        false => Err(VerifyError::Header(format!(
            "slices = {slices:?}; a split head has a number of blocks for each of {pp} ranks, and \
             1 to {BLOCKS_MAX} of them in all"
        ))),
    }
}

/// The place of action `index` of `rank`.
fn place(schedule: &Schedule, rank: usize, index: usize) -> LocatedAction {
    LocatedAction { rank, index, action: schedule.ranks[rank][index] }
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
mod head_tests;
#[cfg(test)]
mod mutation_tests;
#[cfg(test)]
mod slice_tests;
#[cfg(test)]
mod tests;
