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
    /// Empty: the head is whole, and part of the last stage. Files call it `slices`.
    pub head_blocks: Vec<usize>,
    /// Tokens of each of the n slices that every sample is cut into, in their order; empty where
    /// samples are whole. A micro-batch is a slice then: number / n is its sample, number % n which
    /// slice. Its F needs keys and values of the slices before it, its B gradients of those that
    /// the slices behind it have made.
    pub sample_slices: Vec<u64>,
}

/// The most tokens of a sample.
pub const SAMPLE_TOKENS_MAX: u64 = 1 << 40;

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
        (!self.head_blocks.is_empty()).then_some(self.stages())
    }

    /// Entries of lists that have one for each stage, as costs have: the stages and, where the head
    /// is split, the slice of each rank.
    pub fn cells(&self) -> usize {
        self.stages() + self.head_blocks.len()
    }

    /// The place in such lists of `stage` as `rank` has it.
    pub fn cell(&self, rank: usize, stage: usize) -> usize {
        if self.wide_stage() == Some(stage) { stage + rank } else { stage }
    }

    /// Slices of each sample, n; 1 where samples are whole.
    pub fn slices_per_sample(&self) -> usize {
        self.sample_slices.len().max(1)
    }

    /// Entries of lists that have one for each of [`cells`](Self::cells) and slice, as costs have:
    /// all slices of the first, then of the second.
    pub fn cost_entries(&self) -> usize {
        self.cells() * self.slices_per_sample()
    }

    /// The place in such lists of a micro-batch of `stage` as `rank` has it. What belongs to the
    /// stage alone, as its weights, stands at that of micro-batch 0.
    pub(crate) fn cost_entry(&self, rank: usize, stage: usize, micro_batch: usize) -> usize {
        let slices = self.slices_per_sample();
        self.cell(rank, stage) * slices + micro_batch % slices
    }

    /// What is wrong with the slices of its samples, and what would work.
    pub(crate) fn slices_fault(&self) -> Option<String> {
        let slices = &self.sample_slices;
        if slices.is_empty() {
            return None;
        }
        if let Some(slice) = slices.iter().position(|tokens| *tokens == 0) {
            return Some(format!(
                "sample_slices[{slice}] = 0: each slice has tokens; use a number above 0"
            ));
        }
        let sum: u128 = slices.iter().copied().map(u128::from).sum();
        if sum > u128::from(SAMPLE_TOKENS_MAX) {
            return Some(format!(
                "sample_slices = {sum} tokens in all: too many for a sample; use \
                 {SAMPLE_TOKENS_MAX} at most"
            ));
        }
        let n = slices.len();
        let unit = self.units.iter().position(|of| !of.is_multiple_of(n))?;
        Some(format!(
            "units[{unit}] = {}: units are of whole samples of {n} slices; use multiples of {n}",
            self.units[unit]
        ))
    }

    /// Says of what there are too few computes, before tables are sized by it: a slip in a file
    /// must not ask for all memory.
    pub(crate) fn computes_fault(&self) -> Option<String> {
        let computes: usize = self.ranks.iter().flatten().map(|a| a.computes().count()).sum();
        let micro_batches = self.units.iter().try_fold(0usize, |sum, n| sum.checked_add(*n));
        match micro_batches.and_then(|b| b.checked_mul(self.stages())) {
            Some(least) if least <= computes => None,
            _ => Some(format!(
                "{computes} compute actions are too few for {} stages and {} micro-batches; each \
                 needs an F and a backward",
                self.stages(),
                micro_batches.map_or("too many".into(), |b| b.to_string()),
            )),
        }
    }

    /// Where a micro-batch is in the order of a stage's backwards and so of its sums: that of
    /// samples, and from the last slice of each to the first. A split head's come as its forwards.
    pub(crate) fn backward_place(&self, stage: usize, micro_batch: usize) -> usize {
        match self.wide_stage() == Some(stage) {
            true => micro_batch,
            false => reversed_slices(micro_batch, self.slices_per_sample()),
        }
    }

    /// Whether `rank` computes `stage`.
    pub(crate) fn has(&self, rank: usize, stage: usize) -> bool {
        match self.wide_stage() {
            Some(wide) if wide == stage => self.head_blocks.get(rank).is_some_and(|n| *n > 0),
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

/// Computes of a stage that run layer by layer: W, or a backward with its W.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerRun {
    /// Stage.
    pub stage: usize,
    /// Actions from the first of them to the last.
    pub len: usize,
    /// Whether they are a B and its W, or a BW.
    pub backward: bool,
    /// Whether a sum over the replicas follows their reduction.
    pub sums: bool,
}

impl LayerRun {
    /// Those from `at` on, if they stand before their stage's reduction. Of each layer they come in
    /// their own order, the last layer is the first, and a layer's reduction begins when they have
    /// passed it (Zero Bubble, figure 8). They are one of
    /// * W, with nothing before the reduction but the end of the one before;
    /// * the last BW of a gradient of several, with frees and its send before that, too;
    /// * the last B of such a gradient and its W, with only frees between: no other rank waits for
    ///   what this B gives.
    ///
    /// None where the stage's gradient of an earlier unit is still being reduced. Where the stage
    /// has one layer, or the head is split, a backward runs by itself nevertheless.
    pub fn at(program: &[Action], at: usize) -> Option<LayerRun> {
        let Action::Compute { kind, stage, micro_batch } = *program.get(at)? else { return None };
        let (before, rest) = program.split_at(at);
        let is_w = |action: &&Action| match **action {
            Action::Compute { kind, stage: of, .. } => kind == Compute::W && of == stage,
            _ => false,
        };
        let is_free = |action: &Action| matches!(action, Action::Free { .. });
        let len = match kind {
            Compute::F | Compute::R => return None,
            Compute::W => rest.iter().take_while(is_w).count(),
            Compute::BW => 1,
            Compute::B => {
                let w = 1 + rest[1..].iter().take_while(|action| is_free(action)).count();
                let own = Action::compute(Compute::W, stage, micro_batch);
                (rest.get(w) == Some(&own)).then_some(w + 1)?
            }
        };
        let sent = Action::Send { message: Message::Gradient, stage, micro_batch };
        let passes =
            |action: &&Action| kind == Compute::BW && (is_free(action) || **action == sent);
        let passed = rest[len..].iter().take_while(passes).count();
        let behind = match &rest[len + passed..] {
            [Action::Retire { .. }, behind @ ..] => behind,
            behind => behind,
        };
        let is_followed = behind.first() == Some(&Action::ReduceScatter { stage });
        if !is_followed || is_reducing(before, stage) {
            return None;
        }
        let backward = kind != Compute::W;
        if backward && !has_begun(before, stage) {
            return None;
        }
        let sums = behind.get(1) == Some(&Action::ReplicaReduce { stage });
        Some(LayerRun { stage, len, backward, sums })
    }

    /// Its computes, of the `program` that has it from `at` on.
    pub fn computes<'a>(
        &self,
        program: &'a [Action],
        at: usize,
    ) -> impl Iterator<Item = &'a Action> + use<'a> {
        let of = |action: &&Action| matches!(action, Action::Compute { .. });
        program[at..][..self.len].iter().filter(of)
    }
}

/// Whether the gradient of an earlier unit of `stage` is still being reduced, as where a program
/// does not say when that ends: layers of the next one would take its place.
fn is_reducing(before: &[Action], stage: usize) -> bool {
    let mut latest = before.iter().rev();
    let latest = latest
        .find(|action| matches!(action, Action::ReduceScatter { .. } | Action::Retire { .. }));
    latest == Some(&Action::ReduceScatter { stage })
}

/// Whether a gradient of `stage` has been begun and not reduced `before`: what one micro-batch has
/// alone is begun behind its B, when that has given back what the F kept.
fn has_begun(before: &[Action], stage: usize) -> bool {
    let adds = |task: Task| task.stage == stage && matches!(task.kind, Compute::W | Compute::BW);
    let mut latest = before.iter().rev();
    let latest = latest
        .find(|action| **action == Action::ReduceScatter { stage } || action.computes().any(adds));
    latest.is_some_and(|action| action.computes().next().is_some())
}

/// Actions of a program up to the end of its last compute that is no W.
pub fn backwards_end(program: &[Action]) -> usize {
    let is_one = |action: &Action| action.computes().any(|task| task.kind != Compute::W);
    program.iter().rposition(is_one).map_or(0, |last| last + 1)
}

/// Which of `count` stages a program gathers.
pub(crate) fn gathered(program: &[Action], count: usize) -> Vec<bool> {
    let mut gathered = vec![false; count];
    for action in program {
        if let Action::AllGather { stage } = action {
            gathered[*stage] = true;
        }
    }
    gathered
}

/// The micro-batch of the F that is the first to need what the AG at `at` gathers: it waits for
/// each layer as it comes to it, if the head is not split. None where something else needs it
/// first.
pub fn first_forward(program: &[Action], at: usize) -> Option<usize> {
    let Action::AllGather { stage } = *program.get(at)? else { return None };
    for action in &program[at + 1..] {
        match *action {
            Action::Compute { kind, stage: of, micro_batch }
                if of == stage && kind.needs_weights() =>
            {
                return (kind == Compute::F).then_some(micro_batch);
            }
            // Its two halves are one span.
            Action::Overlap { forward, backward } if [forward.0, backward.0].contains(&stage) => {
                return None;
            }
            Action::Free { stage: of } if of == stage => return None,
            _ => {}
        }
    }
    None
}

/// The number with which a backward of so many slices a sample comes, or the other way round.
pub(crate) fn reversed_slices(micro_batch: usize, slices: usize) -> usize {
    let slice = micro_batch % slices;
    micro_batch - slice + (slices - 1 - slice)
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
