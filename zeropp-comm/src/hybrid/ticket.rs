//! The handle that a rank waits with: for its threads' barrier, or for the outer engine.

use std::sync::Arc;
use std::time::Duration;

use super::group::HybridGroup;
use super::header::Purpose;
use crate::patience::Deadline;
use crate::threads::barrier::{RankBarrier, RankOutput};
use crate::threads::result_slots::WaitEnd;
use crate::{CommError, CommResult, InFlight, Pending};
use zeropp_core::cpu_tensor::from_vec;

/// A rank's request on its result of a collective that the ranks of its process join together.
pub(super) struct HybridTicket<T> {
    pub(super) group: Arc<HybridGroup>,
    /// The rank's place among those of its process.
    pub(super) index: usize,
    pub(super) barrier: Arc<RankBarrier>,
    pub(super) open: fn(RankOutput) -> T,
}

impl<T> HybridTicket<T> {
    fn rank(&self) -> usize {
        self.group.local.members[self.index]
    }

    fn wait_for(&self, time: Duration) -> WaitEnd<RankOutput> {
        let world = &self.group.engine.world;
        self.barrier.slots.wait(self.index, self.rank(), world, time)
    }

    /// Reports to the other processes, once, which ranks of this one have joined. They could not
    /// know.
    fn note_missing(&self) {
        let (group, sequence) = (&self.group, self.barrier.sequence);
        let missing = self.barrier.missing();
        if missing.is_empty() || !group.noted.lock().insert(sequence) {
            return;
        }
        let here = |index| if missing.contains(&index) { 0.0 } else { 1.0 };
        let note: Vec<f32> = (0..group.local.members.len()).map(here).collect();
        for to in group.others() {
            let note = from_vec(note.clone(), [note.len()]);
            drop(group.outer.send(to, Purpose::Note { sequence }.tag(), note));
        }
    }
}

impl<T> InFlight<T> for HybridTicket<T> {
    fn is_done(&mut self) -> bool {
        self.barrier.slots.has(self.index) || self.group.engine.world.error(self.rank()).is_some()
    }

    fn wait(self: Box<Self>) -> CommResult<T> {
        let (group, timeout) = (&self.group, self.group.engine.world.timeout.get());
        let mut wait = self.wait_for(timeout / 2);
        if let WaitEnd::Expired = wait {
            self.note_missing();
            wait = self.wait_for(timeout / 2);
        }
        let mut missing = Vec::new();
        if let WaitEnd::Expired = wait {
            missing = group.local.world_ranks(&self.barrier.missing());
            if missing.is_empty() {
                missing = group.in_progress(self.barrier.sequence).map_or(missing, |f| f.missing());
            }
            // Finding out takes a while; others may have found it first.
            group.engine.watch();
            wait = self.wait_for(Duration::ZERO);
        }
        match wait {
            WaitEnd::Done(output) => Ok((self.open)(output)),
            WaitEnd::Failed(error) => Err(error),
            WaitEnd::Expired => {
                let error = CommError::Timeout {
                    group: group.local.name.clone(),
                    operation: self.barrier.signature.to_string(),
                    sequence: self.barrier.sequence,
                    after_s: timeout.as_secs_f64(),
                    missing,
                };
                Err(group.fail(self.index, error))
            }
        }
    }
}

/// A rank's request on an operation of the outer engine that is its alone.
pub(super) struct Outer<T> {
    pub(super) group: Arc<HybridGroup>,
    pub(super) index: usize,
    pub(super) pending: Pending<T>,
    /// The operation that is waited for, in words, and its number or tag.
    pub(super) operation: String,
    pub(super) sequence: u64,
    /// World rank that a message is from.
    pub(super) from: Option<usize>,
}

impl<T> Outer<T> {
    /// World ranks behind the processes that are missing: those that this waits for, or all of a
    /// process that has nothing to do with it but does not answer.
    fn missing(&mut self) -> Vec<usize> {
        let Self { group, pending, from, .. } = self;
        let engine = &group.engine;
        let ranks = |process: usize| -> Vec<usize> {
            let of = |rank: &usize| engine.process_of(*rank) == process;
            let awaited: Vec<usize> = match from {
                Some(from) => [*from].into_iter().filter(of).collect(),
                None => group.members.iter().copied().filter(of).collect(),
            };
            if awaited.is_empty() { engine.ranks_of(process).collect() } else { awaited }
        };
        pending.missing().into_iter().flat_map(ranks).collect()
    }
}

impl<T: Send> InFlight<T> for Outer<T> {
    fn is_done(&mut self) -> bool {
        self.pending.is_done()
    }

    fn wait(mut self: Box<Self>) -> CommResult<T> {
        let timeout = self.group.engine.world.timeout.get();
        let in_time = self.pending.wait_until(Deadline::after(timeout));
        let missing = if in_time { Vec::new() } else { self.missing() };
        let Self { group, index, mut pending, operation, sequence, .. } = *self;
        if in_time || pending.is_done() {
            let rank = group.local.members[index];
            return pending.wait().map_err(|error| group.engine.fail_with_outer(rank, error));
        }
        let name = group.local.name.clone();
        let after_s = timeout.as_secs_f64();
        let error = CommError::Timeout { group: name, operation, sequence, after_s, missing };
        Err(group.fail(index, error))
    }
}
