//! ZeroPP: blockwise units, so that ZeRO-3 gathers a stage's weights once per stage and unit and
//! pass instead of once per micro-batch (ZeroPP §3.1, DESIGN.md section 3).

use std::collections::VecDeque;

use super::{ScheduleError, Shape};
use crate::ir::{Action, Compute, Schedule, looping, reversed_slices};

/// ZeroPP for any P, V and U; the last unit of the step may be short.
pub(super) fn generate(shape: &Shape) -> Result<Schedule, ScheduleError> {
    ahead(shape, 0)
}

/// The same with so many forwards more before the first gradient of each unit.
pub(super) fn ahead(shape: &Shape, more: usize) -> Result<Schedule, ScheduleError> {
    Ok(order(shape, 1, more))
}

/// The same for samples in so many slices; `shape` counts slices, as does `more`.
pub(super) fn in_slices(
    shape: &Shape,
    slices: usize,
    more: usize,
) -> Result<Schedule, ScheduleError> {
    // The last rank has all slices of a sample before it can begin with the last one's B.
    Ok(order(shape, slices, slices - 1 + more))
}

fn order(shape: &Shape, slices: usize, more: usize) -> Schedule {
    let units = shape.units();
    let ranks = (0..shape.pp)
        .map(|rank| {
            let mut actions = Vec::with_capacity(3 * shape.virtual_stages * shape.micro_batches);
            let mut first = 0;
            for &size in &units {
                unit(&mut actions, shape, rank, more, slices, first, size);
                first += size;
            }
            actions
        })
        .collect();
    let placement = looping(shape.pp, shape.virtual_stages);
    Schedule { kind: "zeropp".into(), placement, units, ranks, ..Schedule::default() }
}

/// The actions of one rank for the micro-batches `first..first + size`.
fn unit(
    actions: &mut Vec<Action>,
    shape: &Shape,
    rank: usize,
    more: usize,
    slices: usize,
    first: usize,
    size: usize,
) {
    let Shape { pp, virtual_stages, .. } = *shape;
    let mut push = |kind, v: usize, i: usize| {
        actions.push(Action::compute(kind, v * pp + rank, first + i));
    };
    let last = virtual_stages - 1;
    let backwards = (0..size).map(|i| reversed_slices(i, slices));

    // 1. Forward of every stage but the last of this rank, a whole unit at a time.
    for v in 0..last {
        (0..size).for_each(|i| push(Compute::F, v, i));
    }

    // 2. The last stage: as many F as it takes the first gradient to come back, then each B is
    // followed by one F while there is one, by one W after that.
    let warm_up = size.min(2 * (pp - rank) - 1 + more);
    (0..warm_up).for_each(|i| push(Compute::F, last, i));
    let mut next_f = warm_up;
    // W in the order of their B: the gradient of one stage is whole, and on its way, before that of
    // the next one is begun.
    let mut left = VecDeque::new();
    // With one stage W of slices waits no longer than the tail needs it, or stashes of nearly a
    // whole unit would be kept. With more, they are of the last one alone.
    let waiting = if slices > 1 && last == 0 { rank } else { size };
    for (done, i) in backwards.clone().enumerate() {
        push(Compute::B, last, i);
        left.push_back((last, i));
        let has_f = next_f < size;
        if (if has_f { left.len() > waiting } else { done + 1 < size })
            && let Some((v, i)) = left.pop_front()
        {
            push(Compute::W, v, i);
        }
        if has_f {
            push(Compute::F, last, next_f);
            next_f += 1;
        }
    }

    // 3. Backward of the other stages, each B followed by the W that waits longest.
    for v in (0..last).rev() {
        for i in backwards.clone() {
            push(Compute::B, v, i);
            left.push_back((v, i));
            left.pop_front().into_iter().for_each(|(v, i)| push(Compute::W, v, i));
        }
    }

    // 4. The W that are left fill the tail, where this rank would wait.
    left.into_iter().for_each(|(v, i)| push(Compute::W, v, i));
}
