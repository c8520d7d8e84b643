//! Runs all ranks' lists abstractly: a compute action waits for its message, nothing else waits.

use super::order::producer;
use super::tables::Tables;
use super::{Stuck, VerifyError, is_program, place};
use crate::ir::{Schedule, Task};

/// What a rank waits for: the rank it comes from, the index there that releases it, and the compute
/// action that makes it.
#[derive(Clone, Copy)]
struct Wait {
    rank: usize,
    index: usize,
    task: Task,
}

/// Fails if the ranks cannot all reach their ends.
pub(super) fn check(schedule: &Schedule, tables: &Tables) -> Result<(), VerifyError> {
    let program = is_program(schedule);
    let pp = schedule.pp();
    // The next action of each rank, and who waits for that rank to get on.
    let mut next = vec![0usize; pp];
    let mut waiting: Vec<Vec<(usize, usize)>> = vec![Vec::new(); pp];
    let mut waits: Vec<Option<Wait>> = vec![None; pp];
    let mut ready: Vec<usize> = (0..pp).collect();
    while let Some(rank) = ready.pop() {
        waits[rank] = None;
        while let Some(action) = schedule.ranks[rank].get(next[rank]) {
            let blocked = action
                .computes()
                .filter_map(|c| wait(schedule, tables, program, c))
                .find(|w| next[w.rank] <= w.index);
            if let Some(wait) = blocked {
                waits[rank] = Some(wait);
                waiting[wait.rank].push((wait.index, rank));
                break;
            }
            next[rank] += 1;
        }
        waiting[rank].retain(|(index, waiter)| {
            let released = *index < next[rank];
            if released {
                ready.push(*waiter);
            }
            !released
        });
    }
    match waits.iter().position(Option::is_some) {
        Some(stuck) => Err(circle(schedule, &next, &waits, stuck)),
        None => Ok(()),
    }
}

/// What `compute` takes from another rank, if anything. In a program it is there once it was sent.
fn wait(
    schedule: &Schedule,
    tables: &Tables,
    program: bool,
    Task { kind, stage, micro_batch }: Task,
) -> Option<Wait> {
    let message = kind.needs(stage, schedule.stages())?;
    let rank = schedule.source(message, stage)?;
    let from = message.producer(stage, schedule.stages())?;
    let task = producer(tables, kind, from, micro_batch);
    let index = if program {
        tables.send(message, from, micro_batch)
    } else {
        tables.compute(task.kind, from, micro_batch)
    };
    Some(Wait { rank, index: index.expect("completeness was checked"), task })
}

/// The circle of ranks that `start` runs into. A rank at its end would have released its waiters,
/// so every rank on the way is stuck itself.
fn circle(
    schedule: &Schedule,
    next: &[usize],
    waits: &[Option<Wait>],
    start: usize,
) -> VerifyError {
    let mut path: Vec<usize> = Vec::new();
    let mut rank = start;
    while !path.contains(&rank) {
        path.push(rank);
        rank = waits[rank].expect("stuck").rank;
    }
    let first = path.iter().position(|r| *r == rank).expect("it is on the path");
    let stuck = |rank: &usize| Stuck {
        place: place(schedule, *rank, next[*rank]),
        waits_for: waits[*rank].expect("stuck").task,
    };
    VerifyError::Deadlock(path[first..].iter().map(stuck).collect())
}
