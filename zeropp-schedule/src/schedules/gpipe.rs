//! GPipe: all forwards of the step, then all backwards; activations of all B micro-batches live.
//!
//! With V > 1 the stages of a rank run breadth-first over the looping placement: each stage's F in
//! ascending order, then each stage's backwards in descending order.

use super::{ScheduleError, Shape};
use crate::ir::{Action, Compute, Schedule, looping};

/// GPipe for any P and V, one unit of B, whole backwards.
pub(super) fn generate(shape: &Shape) -> Result<Schedule, ScheduleError> {
    let Shape { pp, virtual_stages, micro_batches, .. } = *shape;
    let block = |kind, v: usize, rank: usize| {
        (0..micro_batches).map(move |i| Action::compute(kind, v * pp + rank, i))
    };
    let ranks = (0..pp)
        .map(|rank| {
            let forwards = (0..virtual_stages).flat_map(|v| block(Compute::F, v, rank));
            let backwards = (0..virtual_stages).rev().flat_map(|v| block(Compute::BW, v, rank));
            forwards.chain(backwards).collect()
        })
        .collect();
    Ok(Schedule {
        kind: "gpipe".into(),
        placement: looping(pp, virtual_stages),
        units: vec![micro_batches],
        ranks,
    })
}
