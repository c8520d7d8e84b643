//! ZB-H1 and ZB-H2: the zero-bubble schedules made by hand (Zero Bubble, section 2).
//!
//! One stage a rank. `depth` 1 gives ZB-H1, which holds no more than 1F1B; `depth` 2 gives ZB-H2,
//! which warms up twice as far and has no bubble between a rank's first F and last W when F, B and
//! W take equally long and m ≥ 2p − 1.

use super::{ScheduleError, Shape};
use crate::ir::{Action, Compute, Schedule, looping};

/// ZB-H1 for any P and B; V must be 1. One unit of B.
pub(super) fn h1(shape: &Shape) -> Result<Schedule, ScheduleError> {
    generate("zb-h1", shape, 1)
}

/// ZB-H1 with so many forwards more before each rank's first backward.
pub(super) fn ahead(shape: &Shape, more: usize) -> Result<Schedule, ScheduleError> {
    made("zb-h1", shape, 1, more)
}

/// ZB-H2 for any P and B; V must be 1. One unit of B.
pub(super) fn h2(shape: &Shape) -> Result<Schedule, ScheduleError> {
    generate("zb-h2", shape, 2)
}

/// The order of `depth` for any P and B, under the name of `kind`.
pub(super) fn generate(
    kind: &'static str,
    shape: &Shape,
    depth: usize,
) -> Result<Schedule, ScheduleError> {
    made(kind, shape, depth, 0)
}

fn made(
    kind: &'static str,
    shape: &Shape,
    depth: usize,
    more: usize,
) -> Result<Schedule, ScheduleError> {
    shape.one_stage_a_rank(kind, "`interleaved-zb`, or `zb-v` with two")?;
    let Shape { pp, micro_batches, .. } = *shape;
    Ok(Schedule {
        kind: kind.into(),
        placement: looping(pp, 1),
        units: vec![micro_batches],
        ranks: (0..pp).map(|rank| rank_order(rank, pp, micro_batches, depth, more)).collect(),
        ..Schedule::default()
    })
}

/// Rank r runs `depth · (p − 1 − r)` forwards, then for every micro-batch F (while any is left) and
/// B, and a W once it is `depth · r` backwards behind. Any number of micro-batches gives a valid
/// order; the closed forms of the papers hold from m ≥ 2p on.
fn rank_order(rank: usize, pp: usize, m: usize, depth: usize, more: usize) -> Vec<Action> {
    let warm_up = (depth * (pp - 1 - rank) + more).min(m);
    let delay = depth * rank;
    let mut order = Vec::with_capacity(3 * m);
    order.extend((0..warm_up).map(|i| Action::compute(Compute::F, rank, i)));
    for i in 0..m {
        if warm_up + i < m {
            order.push(Action::compute(Compute::F, rank, warm_up + i));
        }
        order.push(Action::compute(Compute::B, rank, i));
        if i >= delay {
            order.push(Action::compute(Compute::W, rank, i - delay));
        }
    }
    let done = m.saturating_sub(delay);
    order.extend((done..m).map(|i| Action::compute(Compute::W, rank, i)));
    order
}
