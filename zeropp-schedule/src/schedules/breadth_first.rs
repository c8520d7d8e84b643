//! Breadth-first: GPipe with one stage a rank, breadth-first pipeline parallelism (BF-PP) with
//! more.
//!
//! A rank runs all forwards of one of its stages before those of the next, then all backwards of
//! its stages in reverse. Every stage's weights are needed in two stretches only, so gathers are as
//! few as in one ZeroPP unit of all micro-batches, but activations of all of them are held. For
//! B ≥ P the idle time of a rank is (P − 1)(F + B + W) of one stage.

use super::{ScheduleError, Shape};
use crate::ir::{Action, Compute, Schedule, looping};

/// Breadth-first for any P, V and B as kind `kind`, one unit of B, whole backwards.
pub(super) fn generate(kind: &str, shape: &Shape) -> Result<Schedule, ScheduleError> {
    let Shape { pp, virtual_stages, micro_batches, .. } = *shape;
    let block = |compute, v: usize, rank: usize| {
        (0..micro_batches).map(move |i| Action::compute(compute, v * pp + rank, i))
    };
    let ranks = (0..pp)
        .map(|rank| {
            let forwards = (0..virtual_stages).flat_map(|v| block(Compute::F, v, rank));
            let backwards = (0..virtual_stages).rev().flat_map(|v| block(Compute::BW, v, rank));
            forwards.chain(backwards).collect()
        })
        .collect();
    Ok(Schedule {
        kind: kind.into(),
        placement: looping(pp, virtual_stages),
        units: vec![micro_batches],
        ranks,
        ..Schedule::default()
    })
}
