//! A rank with two chunks in the shape of a V, written action by action.

use super::{ScheduleError, Shape};
use crate::ir::{Action, Compute};

/// Refuses any V but 2.
pub(super) fn two_chunks(kind: &'static str, shape: &Shape) -> Result<(), ScheduleError> {
    if shape.virtual_stages == 2 {
        return Ok(());
    }
    let works = "it must be 2: each rank holds both arms of the V".into();
    let (field, value) = ("virtual", shape.virtual_stages);
    Err(ScheduleError::Field { kind, field, value, works })
}

/// Builds the order of one rank; every kind takes the micro-batches of a chunk in order.
pub(super) struct VeeRank {
    /// What has been written so far.
    pub(super) order: Vec<Action>,
    stages: [usize; 2],
    micro_batches: usize,
    /// Next micro-batch of F, B and W of each chunk; a BW counts as both B and W.
    next: [[usize; 2]; 3],
}

fn row(kind: Compute) -> usize {
    match kind {
        Compute::F => 0,
        Compute::B | Compute::BW => 1,
        Compute::W => 2,
        Compute::R => unreachable!("generators write no recomputation"),
    }
}

impl VeeRank {
    /// Rank `rank` of `pp`: chunk 0 is stage r, chunk 1 stage 2p − 1 − r.
    pub(super) fn new(rank: usize, pp: usize, micro_batches: usize) -> VeeRank {
        let stages = [rank, 2 * pp - 1 - rank];
        VeeRank { order: Vec::new(), stages, micro_batches, next: [[0; 2]; 3] }
    }

    /// How many of `kind` chunk `chunk` still has to run.
    pub(super) fn left(&self, kind: Compute, chunk: usize) -> usize {
        self.micro_batches - self.next[row(kind)][chunk]
    }

    /// Appends the next `kind` of `chunk`.
    pub(super) fn push(&mut self, kind: Compute, chunk: usize) {
        let (stage, micro_batch) = self.take(kind, chunk);
        self.order.push(Action::compute(kind, stage, micro_batch));
    }

    /// Appends the next F of `forward` overlapped with the next BW of `backward`.
    pub(super) fn push_pair(&mut self, forward: usize, backward: usize) {
        let forward = self.take(Compute::F, forward);
        let backward = self.take(Compute::BW, backward);
        self.order.push(Action::Overlap { forward, backward });
    }

    /// Appends `pattern` `times` times.
    pub(super) fn repeat(&mut self, times: usize, pattern: &[(Compute, usize)]) {
        for _ in 0..times {
            for &(kind, chunk) in pattern {
                self.push(kind, chunk);
            }
        }
    }

    fn take(&mut self, kind: Compute, chunk: usize) -> (usize, usize) {
        let next = &mut self.next[row(kind)][chunk];
        let micro_batch = *next;
        assert!(micro_batch < self.micro_batches, "no {kind:?} left on chunk {chunk}");
        *next += 1;
        if kind == Compute::BW {
            self.next[row(Compute::W)][chunk] += 1;
        }
        (self.stages[chunk], micro_batch)
    }
}
