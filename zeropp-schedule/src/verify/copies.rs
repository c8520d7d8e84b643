//! Activations that leave a rank's memory: one copy out, its end, one copy in, in this order,
//! between the F that keeps them and what first needs them again.
//!
//! Copies wait for no other rank and for no compute: those of a rank go one after the other in the
//! order of its program, so that they can stand in no circle of waits. Their buffers outside follow
//! from the program, too: one is used again only when what needed it has waited for its copy in.

use super::tables::Tables;
use super::{Enough, Fault, Faults, VerifyError, VerifyLimits, fault};
use crate::action::ActionKind;
use crate::ir::{Action, Compute, Schedule, Task};

/// Checks every rank's list by itself.
pub(super) fn check(
    schedule: &Schedule,
    tables: &Tables,
    limits: &VerifyLimits,
    faults: &mut Faults,
) -> Result<(), Enough> {
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        let mut out = 0;
        for (index, action) in actions.iter().enumerate() {
            for kind in left_out(tables, action) {
                let action = of(kind, action);
                faults.note(Err(VerifyError::Missing { rank, action, unit: None }))?;
            }
            let is_copy = matches!(action, Action::Out { .. });
            let fits = match is_copy && schedule.slices_per_sample() > 1 {
                true => Err(Fault::OutOfSlice),
                false => follows(tables, index, action),
            };
            let kept = fits.and_then(|()| count(tables, action, limits, &mut out));
            faults.note(kept.or_else(|f| fault(schedule, rank, index, f)))?;
        }
    }
    Ok(())
}

/// The same action of another kind.
fn of(kind: ActionKind, action: &Action) -> Action {
    Action::new(kind, action.parts().1).expect("both name a micro-batch")
}

/// What has to come with a copy out, and is nowhere.
fn left_out(tables: &Tables, action: &Action) -> Vec<ActionKind> {
    let Action::Out { stage, micro_batch } = *action else { return Vec::new() };
    let mut kinds = vec![ActionKind::Gone, ActionKind::In];
    kinds.retain(|kind| tables.of_kind(*kind, stage, micro_batch).is_none());
    kinds
}

/// Each comes behind the one before it: F, OUT, GONE, IN, and what needs it, R or the backward.
fn follows(tables: &Tables, index: usize, action: &Action) -> Result<(), Fault> {
    let is_before = |at: Option<usize>| at.is_some_and(|at| at < index);
    match *action {
        Action::Out { stage, micro_batch } => {
            let task = Task { kind: Compute::F, stage, micro_batch };
            match is_before(tables.compute(Compute::F, stage, micro_batch)) {
                true => Ok(()),
                false => Err(Fault::NothingBefore(task)),
            }
        }
        Action::Gone { stage, micro_batch } | Action::In { stage, micro_batch } => {
            let is_gone = matches!(action, Action::Gone { .. });
            let before = if is_gone { ActionKind::Out } else { ActionKind::Gone };
            match is_before(tables.of_kind(before, stage, micro_batch)) {
                true => Ok(()),
                false => Err(Fault::NoActionBefore(of(before, action))),
            }
        }
        Action::Compute { .. } | Action::Overlap { .. } => {
            action.computes().try_for_each(|task| is_here(tables, index, task))
        }
        Action::Send { .. }
        | Action::Recv { .. }
        | Action::SendHead { .. }
        | Action::RecvHead { .. }
        | Action::AllGather { .. }
        | Action::Free { .. }
        | Action::ReduceScatter { .. }
        | Action::ReplicaReduce { .. }
        | Action::Retire { .. }
        | Action::OptimizerStep
        | Action::Validate => Ok(()),
    }
}

/// R and the backward find what the F has kept.
fn is_here(
    tables: &Tables,
    index: usize,
    Task { kind, stage, micro_batch }: Task,
) -> Result<(), Fault> {
    let needs = matches!(kind, Compute::R | Compute::B | Compute::BW);
    if !needs || tables.of_kind(ActionKind::Out, stage, micro_batch).is_none() {
        return Ok(());
    }
    match tables.of_kind(ActionKind::In, stage, micro_batch) {
        Some(at) if at < index => Ok(()),
        _ => Err(Fault::NoActionBefore(Action::In { stage, micro_batch })),
    }
}

/// How many micro-batches, counted by stage, are out: from the copy out to what needs them.
fn count(
    tables: &Tables,
    action: &Action,
    limits: &VerifyLimits,
    out: &mut usize,
) -> Result<(), Fault> {
    if let Action::Out { .. } = action {
        *out += 1;
    }
    for Task { kind, stage, micro_batch } in action.computes() {
        let redone = tables.compute(Compute::R, stage, micro_batch).is_some();
        let needs = match kind {
            Compute::R => true,
            Compute::B | Compute::BW => !redone,
            Compute::F | Compute::W => false,
        };
        let is_out = tables.of_kind(ActionKind::Out, stage, micro_batch).is_some();
        *out -= usize::from(needs && is_out && *out > 0);
    }
    match limits.out_max {
        Some(limit) if *out > limit => Err(Fault::OutLimit { out: *out, limit }),
        _ => Ok(()),
    }
}
