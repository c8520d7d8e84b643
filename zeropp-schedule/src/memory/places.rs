//! Where the stages and micro-batches of one rank are in its lists.

use super::StageBytes;
use crate::ir::{Action, Compute, LayerRun, Task, first_forward};

/// Stages that are not the rank's.
const NONE: usize = usize::MAX;

/// One place for each stage and micro-batch that a rank's program has.
#[derive(Debug)]
pub(super) struct MicroBatchSlots {
    /// The first place of each stage.
    first: Vec<usize>,
    len: usize,
}

impl MicroBatchSlots {
    /// Of a program of a pipeline of so many stages. What it only receives has a place, too.
    pub(super) fn new(program: &[Action], stages: usize) -> MicroBatchSlots {
        let mut first = vec![NONE; stages];
        let (mut own, mut batches) = (0, 0);
        let mut see = |stage: usize, micro_batch: usize| {
            batches = batches.max(micro_batch + 1);
            if first[stage] == NONE {
                first[stage] = own;
                own += 1;
            }
        };
        for action in program {
            for (stage, micro_batch) in action.touches() {
                micro_batch.into_iter().for_each(|micro_batch| see(stage, micro_batch));
            }
        }
        first.iter_mut().filter(|at| **at != NONE).for_each(|at| *at *= batches);
        MicroBatchSlots { first, len: own * batches }
    }

    /// Their number.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Whether the rank computes `stage`, or receives for it.
    pub(super) fn has(&self, stage: usize) -> bool {
        self.first[stage] != NONE
    }

    /// The place of a micro-batch of one of the rank's stages.
    pub(super) fn of(&self, stage: usize, micro_batch: usize) -> usize {
        self.first[stage] + micro_batch
    }
}

/// The unit that every micro-batch of a stage whose F makes a part of the gradient is reduced with.
pub(super) fn units(
    program: &[Action],
    stages: &[StageBytes],
    places: &MicroBatchSlots,
) -> Vec<Option<usize>> {
    if stages.iter().all(|s| s.gradient_in_forward == 0) {
        return Vec::new();
    }
    let mut reduced = vec![0; stages.len()];
    let mut units = vec![None; places.len()];
    for action in program {
        if let Action::ReduceScatter { stage } = *action {
            reduced[stage] += 1;
        }
        for Task { kind, stage, micro_batch } in action.computes() {
            if matches!(kind, Compute::W | Compute::BW) && stages[stage].gradient_in_forward > 0 {
                units[places.of(stage, micro_batch)] = Some(reduced[stage]);
            }
        }
    }
    units
}

/// Which W, B and BW begin a run layer by layer; backwards of stages that `have_layers`.
pub(super) fn runs(
    program: &[Action],
    places: &MicroBatchSlots,
    have_layers: impl Fn(usize) -> bool,
) -> Vec<Option<LayerRun>> {
    let mut begins = vec![None; places.len()];
    let mut at = 0;
    while let Some(action) = program.get(at) {
        let run = LayerRun::at(program, at);
        let Some(run) = run.filter(|run| !run.backward || have_layers(run.stage)) else {
            at += 1;
            continue;
        };
        for Task { stage, micro_batch, .. } in action.computes() {
            begins[places.of(stage, micro_batch)] = Some(run);
        }
        at += run.len;
    }
    begins
}

/// Which F wait for each layer of their stage as they come to it.
pub(super) fn layerwise_forwards(
    program: &[Action],
    stages: &[StageBytes],
    places: &MicroBatchSlots,
) -> Vec<bool> {
    let mut wait = vec![false; places.len()];
    for (at, action) in program.iter().enumerate() {
        if let Action::AllGather { stage } = *action
            && stages[stage].in_layers
            && stages[stage].gather_input > 0
            && let Some(micro_batch) = first_forward(program, at)
        {
            wait[places.of(stage, micro_batch)] = true;
        }
    }
    wait
}
