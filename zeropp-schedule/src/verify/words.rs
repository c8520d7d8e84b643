//! Faults in words.

use std::fmt;

use super::{Fault, LocatedAction, Stuck, VerifyError};
use crate::ir::{Action, Compute, Task};

/// How a reader calls what a message speaks of: this crate's own way, or that of a file.
pub trait Words {
    /// An action by itself.
    fn action(&self, action: &Action) -> String {
        action.to_string()
    }

    /// A rank.
    fn rank(&self, rank: usize) -> String {
        format!("rank {rank}")
    }

    /// Action `index`, from 0, of a message's own rank.
    fn index(&self, _rank: usize, index: usize) -> String {
        format!("action {index}")
    }

    /// An action of a rank's list.
    fn place(&self, place: &LocatedAction) -> String {
        let LocatedAction { rank, index, action } = place;
        format!("{}, {} ({})", self.rank(*rank), self.index(*rank, *index), self.action(action))
    }
}

/// This crate's own: `rank 1, action 4 (2B0)`.
struct DefaultWords;

impl Words for DefaultWords {}

impl VerifyError {
    /// What is wrong, in these words.
    pub fn message(&self, words: &dyn Words) -> String {
        let place = self.place().map(|place| words.place(&place) + ": ").unwrap_or_default();
        place + &self.problem(words)
    }

    /// The action that is at fault, or the first of a deadlock.
    pub fn place(&self) -> Option<LocatedAction> {
        match self {
            VerifyError::Action { place, .. } => Some(*place),
            _ => None,
        }
    }

    /// [`message`](Self::message) without the place.
    pub fn problem(&self, words: &dyn Words) -> String {
        match self {
            VerifyError::Header(problem) => format!("schedule: {problem}"),
            VerifyError::Action { place, fault } => fault.problem(place.rank, words),
            VerifyError::Missing { rank, action, unit } => {
                let unit = unit.map(|unit| format!(" of unit {unit}")).unwrap_or_default();
                format!("{}: {}{unit} is missing", words.rank(*rank), words.action(action))
            }
            VerifyError::Deadlock(stuck) => {
                let one = |Stuck { place, waits_for }: &Stuck| {
                    let awaited = words.action(&(*waits_for).into());
                    format!("{} waits for {awaited}", words.place(place))
                };
                format!("deadlock: {}", stuck.iter().map(one).collect::<Vec<_>>().join("; "))
            }
            VerifyError::IssueOrder(places) => {
                let one = |place: &LocatedAction| words.place(place);
                let waits = places.iter().map(one).collect::<Vec<_>>().join(" waits for ");
                format!("no one order of operations: {waits} waits for the first")
            }
            VerifyError::Replicas(problem) => {
                format!("the programs of the replicas do not go together: {problem}")
            }
        }
    }
}

impl fmt::Display for VerifyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message(&DefaultWords))
    }
}

impl std::error::Error for VerifyError {}

impl Fault {
    fn problem(&self, rank: usize, words: &dyn Words) -> String {
        let computed = |task: Task| words.action(&task.into());
        match *self {
            Fault::UnknownStage { stages } => format!("unknown stage; stages are 0..{stages}"),
            Fault::UnknownMicroBatch { micro_batches } => {
                format!("unknown micro-batch; micro-batches are 0..{micro_batches}")
            }
            Fault::WrongRank { stage, home } => {
                format!("wrong rank; stage {stage} lives on {}", words.rank(home))
            }
            Fault::NoBlocks => "wrong rank; it has no blocks of the split head".into(),
            Fault::NotOfHead => "no split head of these slices has it".into(),
            Fault::NotThere(of) => format!("it passes on {}, not before it", words.action(&of)),
            Fault::Duplicate { first } => format!("duplicate of {}", words.index(rank, first)),
            Fault::WholeAndSplit { other } => {
                format!("the backward is whole there and split at {}", words.index(rank, other))
            }
            Fault::NothingBefore(task) => format!("no {} before it", computed(task)),
            Fault::NoActionBefore(action) => format!("no {} before it", words.action(&action)),
            Fault::RecomputeLate(task) => {
                format!("it recomputes for {}, which runs earlier", computed(task))
            }
            Fault::WeightOrder { stage, after } => {
                format!("W of stage {stage} must run in micro-batch order, but {after} ran before")
            }
            Fault::SliceWeightOrder { stage, after } => slice_weight_order(stage, after),
            Fault::NoSliceBefore(task) => no_slice_before(task.kind, &computed(task)),
            Fault::HeadOrder { stage, after } => head_order(stage, after),
            Fault::NoNeighbour => {
                "superfluous; the neighbouring stage is on the same rank, or there is none".into()
            }
            Fault::Crossed(next) => {
                format!("crossed; the next message on this link is {}", words.action(&next))
            }
            Fault::NotGathered { stage } => format!("stage {stage} is not gathered"),
            Fault::GatheredTwice { stage, since } => {
                format!("stage {stage} is gathered already, by {}", words.index(rank, since))
            }
            Fault::NeverFreed => "never freed".into(),
            Fault::GatheredLimit { resident, limit } => {
                format!("{resident} gathered stages are more than the limit of {limit}")
            }
            Fault::ActivationLimit { alive, limit } => {
                format!("activations of {alive} micro-batches are more than the limit of {limit}")
            }
            Fault::OutOfSlice => OUT_OF_SLICE.into(),
            Fault::OutLimit { out, limit } => too_many_out(out, limit),
            Fault::ReducedEarly { unit, done, size } => format!(
                "too early; {done} of the {size} micro-batches of unit {unit} have had their W"
            ),
            Fault::ReducedTwice => "reduced already; nothing was added since".into(),
            Fault::NotReducing { stage } => {
                format!("no reduction of stage {stage} is under way there")
            }
            Fault::NotRetired { stage } => {
                let retire = words.action(&Action::Retire { stage });
                format!("the reduction of stage {stage} before it is not ended by {retire}")
            }
            Fault::NotReduced { unit } => {
                format!("the gradient of unit {unit} is not reduced before it")
            }
            Fault::AfterStep => "after the optimizer step".into(),
            Fault::NotWarmUp => NOT_WARM_UP.into(),
            Fault::CrossesValidation => CROSSES_VALIDATION.into(),
            Fault::NotForward => "only forwards are run here; leave it out".into(),
        }
    }
}

const OUT_OF_SLICE: &str =
    "slices of a sample need each other's keys and values: none is copied out";
const NOT_WARM_UP: &str = "before the update of the step before is validated only forwards and \
                           what they need can run, as they may have to run again";
const CROSSES_VALIDATION: &str = "of this message's two ends one is before the rank's validation \
                                  and the other after its own";

fn too_many_out(out: usize, limit: usize) -> String {
    format!("{out} micro-batches that are copied out are more than the limit of {limit}")
}

fn slice_weight_order(stage: usize, after: usize) -> String {
    format!(
        "W of stage {stage} must run in the order of samples, and from the last slice of each to \
         the first, but {after} ran before"
    )
}

fn no_slice_before(kind: Compute, slice: &str) -> String {
    let why = match kind {
        Compute::F => "whose keys and values it needs",
        _ => "which adds to the gradients of its keys and values",
    };
    format!("no {slice} before it, {why}: a slice of the same sample")
}

fn head_order(stage: usize, after: usize) -> String {
    format!(
        "forwards of stage {stage} must run in micro-batch order, as the loss's weight gradient is \
         made in them, but {after} ran before"
    )
}
