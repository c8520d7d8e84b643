//! A schedule as data: one ordered list of actions per pipeline rank.
//!
//! Generators write the compute actions, lowering adds gathers, frees, reductions, sends and
//! receives, the verifier proves the result, the executor runs it as it stands.

use crate::action::Lowering;
pub use crate::action::{Action, Compute, HeadMessage, Message, Task};

/// A schedule of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// Name of the generator, or `file`.
    pub kind: String,
    /// Pipeline rank of each stage; its length is the number of stages S.
    pub placement: Vec<usize>,
    /// Micro-batches of each unit, in order; the sum is B. A schedule that reduces gradients once
    /// a step is one unit of B.
    pub units: Vec<usize>,
    /// Actions of each pipeline rank, in program order.
    pub ranks: Vec<Vec<Action>>,
    /// How many of the head's row blocks each rank has, in rank order, where the head is split over
    /// ranks: it is a stage S of its own then, which every rank with blocks computes a slice of.
    /// Empty: the head is whole, and part of the last stage.
    pub slices: Vec<usize>,
}

/// The most row blocks of a head.
pub const BLOCKS_MAX: usize = 64;

impl Schedule {
    /// Pipeline ranks.
    pub fn pp(&self) -> usize {
        self.ranks.len()
    }

    /// Stages.
    pub fn stages(&self) -> usize {
        self.placement.len()
    }

    /// The stage that is split over ranks, S, if there is one.
    pub(crate) fn wide_stage(&self) -> Option<usize> {
        (!self.slices.is_empty()).then_some(self.stages())
    }

    /// Entries of lists that have one for each stage, as costs have: the stages and, where the head
    /// is split, the slice of each rank.
    pub fn cells(&self) -> usize {
        self.stages() + self.slices.len()
    }

    /// The place in such lists of `stage` as `rank` has it.
    pub fn cell(&self, rank: usize, stage: usize) -> usize {
        if self.wide_stage() == Some(stage) { stage + rank } else { stage }
    }

    /// Whether `rank` computes `stage`.
    pub(crate) fn has(&self, rank: usize, stage: usize) -> bool {
        match self.wide_stage() {
            Some(wide) if wide == stage => self.slices.get(rank).is_some_and(|n| *n > 0),
            _ => self.placement.get(stage) == Some(&rank),
        }
    }

    /// Micro-batches per step.
    pub fn micro_batches(&self) -> usize {
        self.units.iter().sum()
    }

    /// Whether it has forwards and no other computes, as what a validation loss takes.
    pub fn is_forward_only(&self) -> bool {
        let mut computes = self.ranks.iter().flatten().flat_map(Action::computes).peekable();
        computes.peek().is_some() && computes.all(|t| t.kind == Compute::F)
    }

    /// Whether its updates are done before the global norm is known, and validated in the next
    /// step's warm-up.
    pub fn validates_late(&self) -> bool {
        self.ranks.iter().flatten().any(|action| *action == Action::Validate)
    }

    /// Whether gathers and frees stand in it, as part of the order.
    pub fn has_gathers(&self) -> bool {
        self.ranks.iter().flatten().any(|a| a.row().lowering == Lowering::Gathers)
    }

    /// The stages of one rank in ascending order.
    pub fn stages_of(&self, rank: usize) -> Vec<usize> {
        (0..self.stages()).filter(|s| self.placement[*s] == rank).collect()
    }

    /// The unit that `micro_batch` belongs to.
    pub fn unit_of(&self, micro_batch: usize) -> usize {
        let mut end = 0;
        self.units
            .iter()
            .position(|n| {
                end += n;
                micro_batch < end
            })
            .expect("micro-batch below B")
    }

    /// The unit of every micro-batch, for loops over many actions.
    pub(crate) fn unit_table(&self) -> Vec<usize> {
        self.units.iter().enumerate().flat_map(|(unit, n)| std::iter::repeat_n(unit, *n)).collect()
    }
}

/// Looping placement: stage v·P + p lives on rank p.
pub fn looping(pp: usize, v: usize) -> Vec<usize> {
    (0..pp * v).map(|s| s % pp).collect()
}

/// V placement (two chunks a rank, folded back): stages r and 2P−1−r live on rank r; longer folds
/// go to and fro.
pub fn vee(pp: usize, v: usize) -> Vec<usize> {
    (0..pp * v).map(|s| if (s / pp).is_multiple_of(2) { s % pp } else { pp - 1 - s % pp }).collect()
}
