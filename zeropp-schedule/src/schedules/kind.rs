//! The facts about a kind of schedule: the columns of the table of kinds.

use std::fmt;

use super::{Forms, OrderCosts, Planning, ScheduleError, Shape};
use crate::ir::Schedule;

use Rate::{MakespanLessMessages, OwnSpan};
use StagesPerRank::{Any, Exactly, MultipleOf};

/// A schedule that can be asked for by name.
pub struct Kind {
    /// Name on the command line and in [`Schedule::kind`].
    pub name: &'static str,
    /// One line for help texts.
    pub about: &'static str,
    /// Stages on each rank, V.
    pub stages: StagesPerRank,
    /// How a step is cut.
    pub step: StepForm,
    /// Which bubble rate its paper prints.
    pub rate: Rate,
    /// Whether it looks for an order within a memory limit.
    pub obeys_limit: bool,
    /// Whether gathers are part of the order it looks for, within limits of their own.
    pub plans_gathers: bool,
    /// The rank of each stage, for P ranks with V stages each.
    pub placement: fn(usize, usize) -> Vec<usize>,
    /// Whether some of its backwards are split into B and W.
    pub splits: bool,
    /// Whether planners choose among its layouts, and by which closed forms.
    pub planning: Planning,
    /// A better cut of a shape into units, in a sentence, if there is one.
    pub note: fn(&Shape) -> Option<String>,
    /// Chooses U as well, where it can do that within a memory limit.
    pub with_unit: Option<WithUnit>,
    /// Makes the order that slices of a split head are put into, with so many micro-batches more
    /// ahead than it has of its own; none where the head of whole samples is always whole.
    pub ahead: Option<Ahead>,
    /// Makes the order of samples that are cut into slices, with a split head too, which wants more
    /// ahead; none where it has whole samples only.
    pub in_slices: Option<InSlices>,
    /// Makes the compute actions, for a shape that is nowhere zero: for given costs where there are
    /// any and the kind weighs one order against another, else for equal ones.
    pub generate: fn(&Shape, Option<&OrderCosts>) -> Result<Schedule, ScheduleError>,
}

/// Chooses U for costs; returns it with the schedule.
pub type WithUnit = fn(&Shape, &OrderCosts) -> Result<(usize, Schedule), ScheduleError>;

/// The compute actions of a kind for samples in so many slices each, of which the shape's numbers
/// are, with so many of them more ahead.
pub type InSlices = fn(&Shape, usize, usize) -> Result<Schedule, ScheduleError>;

/// The compute actions of a kind with so many micro-batches more ahead.
pub type Ahead = fn(&Shape, usize) -> Result<Schedule, ScheduleError>;

/// Stages on each rank of a schedule, V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StagesPerRank {
    /// The schedule leaves no choice.
    Exactly(usize),
    /// Any multiple of this number, and it where none is given.
    MultipleOf(usize),
    /// Any number; this one where none is given.
    Any(usize),
}

impl StagesPerRank {
    /// V where none is given.
    pub fn default_number(self) -> usize {
        match self {
            Exactly(v) | MultipleOf(v) | Any(v) => v,
        }
    }

    /// Whether a schedule can have `v` stages on each rank.
    pub fn allows(self, v: usize) -> bool {
        match self {
            Exactly(only) => v == only,
            MultipleOf(n) => v > 0 && v.is_multiple_of(n),
            Any(_) => v > 0,
        }
    }
}

/// The numbers that are allowed, in words.
impl fmt::Display for StagesPerRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exactly(v) => write!(f, "{v}"),
            MultipleOf(n) => write!(f, "a multiple of {n}"),
            Any(_) => write!(f, "1 or more"),
        }
    }
}

/// How a step is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepForm {
    /// Into units of U micro-batches; gradients are reduced once a unit.
    Units,
    /// One unit of B.
    Whole,
    /// One unit of B, in rounds of P micro-batches or a little more.
    Rounds,
}

/// What the bubble rate that a paper prints is a share of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rate {
    /// The makespan from time 0.
    Makespan,
    /// The largest own span of a rank: the end of one step overlaps the start of the next.
    OwnSpan,
    /// The makespan less P messages: the script behind the Zero Bubble papers' tables waits for
    /// only the first micro-batch of each round on the way from the last rank back to the first.
    MakespanLessMessages,
}

impl Rate {
    /// What the rate is a share of, for P ranks and S stages whose messages take `latency`.
    pub fn cost(self, makespan: u64, own_span: u64, pp: usize, stages: usize, latency: u64) -> u64 {
        match self {
            OwnSpan => own_span,
            MakespanLessMessages if pp > 1 && stages > pp => {
                makespan.saturating_sub((pp as u64).saturating_mul(latency))
            }
            _ => makespan,
        }
    }
}

impl Kind {
    /// Whether its orders are searched for: by the crate `zeropp-search`, which has a `generate`
    /// for these kinds and all others.
    pub fn is_searched(&self) -> bool {
        self.plans_gathers
    }

    /// Whether a head can be split in it, of samples that are cut into slices or not.
    pub fn splits_heads(&self, in_slices: bool) -> bool {
        if in_slices { self.in_slices.is_some() } else { self.ahead.is_some() }
    }

    /// The closed forms of its layouts, if planners choose among them.
    pub fn forms(&self) -> Option<&Forms> {
        match &self.planning {
            Planning::With(forms) => Some(forms),
            Planning::Not(_) => None,
        }
    }

    /// Why it cannot have `v` stages on each rank, and what would work, in words; none if it can.
    pub fn refused_stages(&self, v: usize) -> Option<(String, String)> {
        (!self.stages.allows(v)).then(|| {
            let problem =
                format!("schedule {} cannot have that many stages on each rank", self.name);
            let help = format!("use {}, leave virtual out, or use another schedule", self.stages);
            (problem, help)
        })
    }
}
