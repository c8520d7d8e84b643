#![doc = include_str!("../README.md")]

pub mod advice;
pub mod against;
pub mod bytes;
pub mod change;
mod closed;
mod cores;
pub mod cut;
pub mod cutter;
pub mod deal;
pub mod exact;
pub mod launch;
pub mod layout;
pub mod links;
pub mod machines;
mod matrices;
pub mod memory;
pub mod model;
pub mod page;
pub mod parts;
pub mod plan;
pub mod programs;
pub mod race;
pub mod recompute;
mod recut;
pub mod reschedule;
pub mod room;
pub mod search;
pub(crate) mod shared;
pub mod sizes;
pub mod slices;
pub mod split;
pub mod stages;
pub mod text;
mod work;
pub mod worth;

/// What cannot be planned: the field, its value and what would work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PlanError(String);

impl PlanError {
    /// A problem in words.
    pub fn new(problem: impl Into<String>) -> PlanError {
        PlanError(problem.into())
    }
}

#[cfg(test)]
mod tests;
