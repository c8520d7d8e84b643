//! A schedule as data: one ordered list of actions per pipeline rank.
//!
//! Generators write the compute actions, lowering adds gathers, frees, reductions, sends and
//! receives, the verifier proves the result, the executor runs it as it stands.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The compute kinds of one stage and one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Compute {
    /// Forward.
    F,
    /// Gradient of the stage's input (`I` in PyTorch's spelling).
    B,
    /// Gradients of the stage's weights; needs no weights.
    W,
    /// A whole backward, B and W at once (`B` in PyTorch's spelling).
    BW,
    /// Recomputation of the forward, right before the B it serves.
    R,
}

/// One compute of one stage on one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Task {
    /// What to compute.
    pub kind: Compute,
    /// Stage, 0..S.
    pub stage: usize,
    /// Micro-batch of the step, 0..B.
    pub micro_batch: usize,
}

impl From<Task> for Action {
    fn from(Task { kind, stage, micro_batch }: Task) -> Action {
        Action::Compute { kind, stage, micro_batch }
    }
}

/// What passes between neighbouring stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Message {
    /// The output of a stage's F, to the next stage.
    Activation,
    /// The output of a stage's B, to the stage before.
    Gradient,
}

/// One instruction of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Action {
    /// Compute on one micro-batch.
    Compute {
        /// What to compute.
        kind: Compute,
        /// Stage, 0..S.
        stage: usize,
        /// Micro-batch of the step, 0..B.
        micro_batch: usize,
    },
    /// A forward and a whole backward that overlap (DualPipeV); run one after the other where the
    /// device cannot overlap them.
    Overlap {
        /// Stage and micro-batch of the F.
        forward: (usize, usize),
        /// Stage and micro-batch of the BW.
        backward: (usize, usize),
    },
    /// Sends what `stage` has just produced for `micro_batch`; returns at once.
    Send {
        /// Activation (to stage + 1) or gradient (to stage − 1).
        message: Message,
        /// The producing stage.
        stage: usize,
        /// Micro-batch.
        micro_batch: usize,
    },
    /// Posts the receive of what `stage` needs for `micro_batch`; the compute action waits for it.
    Recv {
        /// Activation (from stage − 1) or gradient (from stage + 1).
        message: Message,
        /// The consuming stage.
        stage: usize,
        /// Micro-batch.
        micro_batch: usize,
    },
    /// Starts gathering a stage's weights inside the ZeRO-3 group; the first use waits for it.
    AllGather {
        /// Stage.
        stage: usize,
    },
    /// Drops a stage's gathered weights.
    Free {
        /// Stage.
        stage: usize,
    },
    /// Starts reducing a stage's gradients inside the ZeRO-3 group into the shard.
    ReduceScatter {
        /// Stage.
        stage: usize,
    },
    /// Starts summing a stage's gradient shard over the replicas.
    ReplicaReduce {
        /// Stage.
        stage: usize,
    },
    /// Waits for the reductions, agrees on the global norm and updates the rank's shards; in a
    /// program with [`Validate`](Self::Validate) the rank updates without waiting for the others.
    OptimizerStep,
    /// Waits for the global norm of the step before, whose update was done without it (Zero
    /// Bubble's post-validation). Where that was wrong, it is taken back and done right, and all
    /// that this step has done so far is done again: before it is a *warm-up* of forwards.
    Validate,
}

impl Action {
    /// Shorthand for a compute action.
    pub fn compute(kind: Compute, stage: usize, micro_batch: usize) -> Action {
        Action::Compute { kind, stage, micro_batch }
    }

    /// A forward and a whole backward that overlap; none for other kinds.
    pub(crate) fn overlap(forward: Task, backward: Task) -> Option<Action> {
        let fit = forward.kind == Compute::F && backward.kind == Compute::BW;
        let of = |task: Task| (task.stage, task.micro_batch);
        fit.then(|| Action::Overlap { forward: of(forward), backward: of(backward) })
    }

    /// The stage it is about; of an overlap, its forward's. The optimizer's step and its
    /// validation have none.
    pub fn stage(&self) -> Option<usize> {
        match *self {
            Action::Compute { stage, .. }
            | Action::Overlap { forward: (stage, _), .. }
            | Action::Send { stage, .. }
            | Action::Recv { stage, .. }
            | Action::AllGather { stage }
            | Action::Free { stage }
            | Action::ReduceScatter { stage }
            | Action::ReplicaReduce { stage } => Some(stage),
            Action::OptimizerStep | Action::Validate => None,
        }
    }

    /// The micro-batch it is about, if it is about one; of an overlap, its forward's.
    pub fn micro_batch(&self) -> Option<usize> {
        match *self {
            Action::Compute { micro_batch, .. }
            | Action::Overlap { forward: (_, micro_batch), .. }
            | Action::Send { micro_batch, .. }
            | Action::Recv { micro_batch, .. } => Some(micro_batch),
            _ => None,
        }
    }

    /// Whether it gathers or frees weights.
    pub(crate) fn is_residency(&self) -> bool {
        matches!(self, Action::AllGather { .. } | Action::Free { .. })
    }

    /// The tasks of this action in the order they run: none, one, or two (overlap).
    pub fn computes(&self) -> impl Iterator<Item = Task> + use<> {
        let task = |kind, (stage, micro_batch)| Task { kind, stage, micro_batch };
        let (first, second) = match *self {
            Action::Compute { kind, stage, micro_batch } => {
                (Some(Task { kind, stage, micro_batch }), None)
            }
            Action::Overlap { forward, backward } => {
                (Some(task(Compute::F, forward)), Some(task(Compute::BW, backward)))
            }
            _ => (None, None),
        };
        first.into_iter().chain(second)
    }
}

/// zeropp's own short spelling, as in `2F0`, `2B0`, `AG2`, `>A2.0`.
impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = |m: &Message| if *m == Message::Activation { 'A' } else { 'G' };
        match self {
            Action::Compute { kind, stage, micro_batch } => {
                write!(f, "{stage}{kind:?}{micro_batch}")
            }
            Action::Overlap { forward, backward } => {
                write!(f, "{}F{}&{}BW{}", forward.0, forward.1, backward.0, backward.1)
            }
            Action::Send { message, stage, micro_batch } => {
                write!(f, ">{}{stage}.{micro_batch}", letter(message))
            }
            Action::Recv { message, stage, micro_batch } => {
                write!(f, "<{}{stage}.{micro_batch}", letter(message))
            }
            Action::AllGather { stage } => write!(f, "AG{stage}"),
            Action::Free { stage } => write!(f, "FREE{stage}"),
            Action::ReduceScatter { stage } => write!(f, "RS{stage}"),
            Action::ReplicaReduce { stage } => write!(f, "AR{stage}"),
            Action::OptimizerStep => write!(f, "STEP"),
            Action::Validate => write!(f, "VALID"),
        }
    }
}

/// A schedule of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// Name of the generator, or `file`.
    pub kind: String,
    /// Pipeline rank of each stage; its length is the number of stages S. Where stages have copies,
    /// that of the first micro-batch.
    pub placement: Vec<usize>,
    /// Where stages have copies on several ranks: the rank of each stage for each micro-batch.
    /// Empty where all micro-batches go by `placement`.
    pub routes: Vec<Vec<usize>>,
    /// Micro-batches of each unit, in order; the sum is B. A schedule that reduces gradients once
    /// a step is one unit of B.
    pub units: Vec<usize>,
    /// Actions of each pipeline rank, in program order.
    pub ranks: Vec<Vec<Action>>,
}

impl Schedule {
    /// Pipeline ranks.
    pub fn pp(&self) -> usize {
        self.ranks.len()
    }

    /// Stages.
    pub fn stages(&self) -> usize {
        self.placement.len()
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
    pub(crate) fn has_gathers(&self) -> bool {
        self.ranks.iter().flatten().any(Action::is_residency)
    }

    /// The rank on which `stage` computes `micro_batch`.
    pub fn home(&self, stage: usize, micro_batch: usize) -> usize {
        self.routes.get(micro_batch).unwrap_or(&self.placement)[stage]
    }

    /// The stages of one rank in ascending order.
    pub fn stages_of(&self, rank: usize) -> Vec<usize> {
        (0..self.stages()).filter(|s| self.holds(rank, *s)).collect()
    }

    /// Whether `rank` has `stage`, or a copy of it.
    pub fn holds(&self, rank: usize, stage: usize) -> bool {
        let on_route = self.routes.iter().any(|route| route[stage] == rank);
        self.placement[stage] == rank || on_route
    }

    /// For each rank the first one with the same stages: itself, but where these are copies.
    pub fn first_copies(&self) -> Vec<usize> {
        if self.routes.is_empty() {
            return (0..self.pp()).collect();
        }
        let held = self.stages_of_all();
        let first = |stages| held.iter().position(|other| other == stages).expect("its own");
        held.iter().map(first).collect()
    }

    /// [`stages_of`](Self::stages_of) every rank, in one walk over the routes, whose ranks must be
    /// those that there are.
    pub(crate) fn stages_of_all(&self) -> Vec<Vec<usize>> {
        let mut holds = vec![vec![false; self.stages()]; self.pp()];
        for route in std::iter::once(&self.placement).chain(&self.routes) {
            route.iter().enumerate().for_each(|(stage, rank)| holds[*rank][stage] = true);
        }
        let held = |holds: Vec<bool>| {
            let stages = holds.into_iter().enumerate().filter(|(_, held)| *held);
            stages.map(|(stage, _)| stage).collect()
        };
        holds.into_iter().map(held).collect()
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
