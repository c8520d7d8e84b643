//! BF-PP: breadth-first pipeline parallelism on looping stages.
//!
//! A rank runs all forwards of one of its stages before those of the next, then all backwards of
//! its stages in reverse. Every stage's weights are needed in two stretches only, so gathers are as
//! few as in one ZeroPP unit of all micro-batches, but activations of all micro-batches are held.

use super::{ScheduleError, Shape};
use crate::ir::{Action, Compute, Schedule, looping};

/// BF-PP for any P, V and B, one unit of B, whole backwards. For m ≥ p the idle time of a rank is
/// (p − 1)(F + B + W) of one stage.
pub(super) fn generate(shape: &Shape) -> Result<Schedule, ScheduleError> {
    let Shape { pp, virtual_stages, micro_batches, .. } = *shape;
    let ranks = (0..pp)
        .map(|rank| {
            let stages = (0..virtual_stages).map(move |v| v * pp + rank);
            let block =
                |kind, stage| (0..micro_batches).map(move |i| Action::compute(kind, stage, i));
            let forward = stages.clone().flat_map(|s| block(Compute::F, s));
            let backward = stages.rev().flat_map(|s| block(Compute::BW, s));
            forward.chain(backward).collect()
        })
        .collect();
    Ok(Schedule {
        kind: "bf-pp".into(),
        placement: looping(pp, virtual_stages),
        units: vec![micro_batches],
        ranks,
    })
}
