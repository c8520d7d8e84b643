//! One scheduler for three budgets.

use crate::schedules::Shape;

mod anneal;
mod decode;
mod ledger;
mod moves;
mod pattern;
mod problem;
mod random;
mod residency;
mod search;
mod walk;
mod word;

#[cfg(test)]
mod decode_tests;
#[cfg(test)]
mod tests;

/// What is made as short as can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// From the first start to the last end of all ranks.
    Makespan,
    /// The largest time of a rank between its first start and its last end.
    OwnSpan,
}

/// Limits besides that on activations, which stands with the costs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Budgets {
    /// The most gathered weights of a rank at once.
    pub gathered: Option<u64>,
    /// Gathered weights of each stage in the unit of `gathered`; empty where each counts as 1.
    pub weights: Vec<u64>,
    /// The most stages whose gradients wait for their reduction, or are on their way to it.
    pub gradients: Option<usize>,
    /// The most gathers a rank and step.
    pub gathers: Option<usize>,
    /// Time of each stage's recomputation and the memory that it and its B need besides what F
    /// keeps; empty where nothing is recomputed.
    pub recompute: Vec<(u64, i64)>,
}

impl Budgets {
    fn weight_of(&self, stage: usize) -> u64 {
        self.weights.get(stage).copied().unwrap_or(1)
    }

    fn recomputed(&self, stage: usize) -> (u64, i64) {
        self.recompute.get(stage).copied().unwrap_or((0, 0))
    }

    /// The cut of sums.
    fn units(&self, shape: &Shape) -> Vec<usize> {
        match self.gradients {
            Some(most) if most < shape.virtual_stages => shape.units(),
            _ => vec![shape.micro_batches],
        }
    }
}
