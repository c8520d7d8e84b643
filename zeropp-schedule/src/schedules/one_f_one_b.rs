//! 1F1B (PipeDream-flush): GPipe's bubble, but rank r keeps P − r micro-batches instead of B.

use super::{ScheduleError, Shape};
use crate::ir::{Action, Compute, Schedule, looping, reversed_slices};

/// 1F1B for any P and B; V must be 1. One unit of B, whole backwards.
pub(super) fn generate(shape: &Shape) -> Result<Schedule, ScheduleError> {
    ahead(shape, 0)
}

/// The same with so many forwards more before each rank's first backward.
pub(super) fn ahead(shape: &Shape, more: usize) -> Result<Schedule, ScheduleError> {
    order(shape, 1, more)
}

/// The same for samples in so many slices (Seq1F1B); `shape` counts slices. A rank begins with
/// backwards when all slices of a sample, and so many `more`, have been there. W follows its B at
/// once, apart from it: the rank before waits for B alone.
pub(super) fn in_slices(
    shape: &Shape,
    slices: usize,
    more: usize,
) -> Result<Schedule, ScheduleError> {
    order(shape, slices, slices - 1 + more)
}

fn order(shape: &Shape, slices: usize, more: usize) -> Result<Schedule, ScheduleError> {
    shape.one_stage_a_rank("1f1b", "`gpipe` or `zeropp`")?;
    let Shape { pp, micro_batches, .. } = *shape;
    let ranks = (0..pp)
        .map(|rank| {
            let warm_up = micro_batches.min(pp - 1 - rank + more);
            let mut actions = Vec::with_capacity(3 * micro_batches);
            actions.extend((0..warm_up).map(|i| Action::compute(Compute::F, rank, i)));
            let backward: &[Compute] = match slices {
                1 => &[Compute::BW],
                _ => &[Compute::B, Compute::W],
            };
            for i in 0..micro_batches {
                if warm_up + i < micro_batches {
                    actions.push(Action::compute(Compute::F, rank, warm_up + i));
                }
                let of = reversed_slices(i, slices);
                actions.extend(backward.iter().map(|kind| Action::compute(*kind, rank, of)));
            }
            actions
        })
        .collect();
    Ok(Schedule {
        kind: "1f1b".into(),
        placement: looping(pp, 1),
        units: vec![micro_batches],
        ranks,
        ..Schedule::default()
    })
}
