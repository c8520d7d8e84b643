//! Runs all ranks' lists abstractly: a compute action waits for its message, nothing else waits.

use super::order::producer;
use super::tables::Tables;
use super::{Stuck, VerifyError, is_program, place};
use crate::head::{Edge, End, HeadTree};
use crate::ir::{Compute, Schedule, Task};

/// What a rank waits for: the rank it comes from, the index there that releases it, and the compute
/// action that makes it.
#[derive(Clone, Copy)]
struct BlockedOn {
    rank: usize,
    index: usize,
    task: Task,
}

/// Fails if the ranks cannot all reach their ends.
pub(super) fn check(schedule: &Schedule, tables: &Tables) -> Result<(), VerifyError> {
    let program = is_program(schedule);
    let pp = schedule.pp();
    let awaited = tables.head.as_ref().map(|head| Awaited::new(head, schedule));
    // The next action of each rank, and who waits for that rank to get on.
    let mut next = vec![0usize; pp];
    let mut waiting: Vec<Vec<(usize, usize)>> = vec![Vec::new(); pp];
    let mut waits: Vec<Option<BlockedOn>> = vec![None; pp];
    let mut ready: Vec<usize> = (0..pp).collect();
    while let Some(rank) = ready.pop() {
        waits[rank] = None;
        while let Some(action) = schedule.ranks[rank].get(next[rank]) {
            let blocked = action
                .computes()
                .flat_map(|c| {
                    let of_head = awaited.iter().flat_map(move |head| head.waits(rank, c));
                    let of_head = of_head.map(|w| w.indexed(schedule, tables, program));
                    of_head.chain(wait(schedule, tables, program, c))
                })
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

/// What the computes of a split head wait for.
struct Awaited<'a> {
    head: &'a HeadTree,
    /// By compute: F and B of each rank's slice, B of the stage before; all messages that have to
    /// be sent for it.
    f: Vec<Vec<usize>>,
    b: Vec<Vec<usize>>,
    before: Vec<usize>,
    program: bool,
}

/// A message of a split head that has to be sent, or the compute that it takes in a schedule
/// without messages.
struct Of<'a> {
    head: &'a HeadTree,
    edge: usize,
    micro_batch: usize,
}

impl<'a> Awaited<'a> {
    fn new(head: &'a HeadTree, schedule: &Schedule) -> Awaited<'a> {
        let all = |kind, stage| {
            let needs = |rank| head.with_all_before(head.needs(rank, kind, stage));
            (0..schedule.pp()).map(needs).collect::<Vec<_>>()
        };
        let before = head.with_all_before(head.needs(head.root, Compute::B, head.stage - 1));
        let program = is_program(schedule);
        let (f, b) = (all(Compute::F, head.stage), all(Compute::B, head.stage));
        Awaited { head, f, b, before, program }
    }

    fn waits(&self, rank: usize, task: Task) -> impl Iterator<Item = Of<'_>> {
        let HeadTree { stage, .. } = *self.head;
        let needs: &[usize] = match task.kind {
            Compute::F if task.stage == stage => &self.f[rank],
            Compute::B if task.stage == stage => &self.b[rank],
            Compute::B | Compute::BW if task.stage + 1 == stage => &self.before,
            _ => &[],
        };
        let (head, micro_batch) = (self.head, task.micro_batch);
        let is_made = move |edge: &&usize| self.program || head.edges[**edge].after.is_some();
        needs.iter().filter(is_made).map(move |edge| Of { head, edge: *edge, micro_batch })
    }
}

impl Of<'_> {
    fn indexed(&self, schedule: &Schedule, tables: &Tables, program: bool) -> BlockedOn {
        let Of { head, edge, micro_batch } = *self;
        let Edge { from: rank, after, .. } = head.edges[edge];
        // What is passed on was made by the stage before the head.
        let (kind, stage) = after.unwrap_or((Compute::F, head.stage - 1));
        let end = End { edge, is_send: true, micro_batch };
        let index = match program {
            true => tables.head_end(end),
            false => tables.compute(kind, schedule.cell(rank, stage), micro_batch),
        };
        let task = Task { kind, stage, micro_batch };
        BlockedOn { rank, index: index.expect("completeness was checked"), task }
    }
}

/// What `compute` takes from another rank, if anything. In a program it is there once it was sent.
fn wait(
    schedule: &Schedule,
    tables: &Tables,
    program: bool,
    Task { kind, stage, micro_batch }: Task,
) -> Option<BlockedOn> {
    let message = kind.needs(stage, schedule.stages())?;
    let rank = schedule.source(message, stage)?;
    let from = message.producer(stage, schedule.stages())?;
    let task = producer(tables, kind, from, micro_batch);
    let index = if program {
        tables.send(message, from, micro_batch)
    } else {
        tables.compute(task.kind, from, micro_batch)
    };
    Some(BlockedOn { rank, index: index.expect("completeness was checked"), task })
}

/// The circle of ranks that `start` runs into. A rank at its end would have released its waiters,
/// so every rank on the way is stuck itself.
fn circle(
    schedule: &Schedule,
    next: &[usize],
    waits: &[Option<BlockedOn>],
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
