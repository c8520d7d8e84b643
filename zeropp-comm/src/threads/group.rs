//! A group of ranks: its collectives under way, its messages, its buffers.

use std::collections::HashMap;
use std::sync::Arc;

use burn::tensor::Tensor;

use super::barrier::{RankBarrier, RankInput};
use super::collective;
use super::mail::Mail;
use super::world::ThreadsState;
use crate::buffers::Buffers;
use crate::signature::{Operation, Signature};
use crate::sync::Mutex;
use crate::{CommError, CommResult};

/// The state that the ranks of one group share.
pub(crate) struct ThreadsGroup {
    pub(crate) world: Arc<ThreadsState>,
    pub(crate) name: String,
    /// World ranks, in the group's order.
    pub(crate) members: Vec<usize>,
    pub(crate) buffers: Buffers,
    pub(super) mail: Mutex<Mail>,
    barriers: Mutex<HashMap<u64, Arc<RankBarrier>>>,
}

impl ThreadsGroup {
    /// Makes a group and lets the world know it.
    pub(crate) fn new(world: Arc<ThreadsState>, name: String, members: Vec<usize>) -> Arc<Self> {
        let group = Arc::new(Self {
            world,
            name,
            members,
            buffers: Buffers::default(),
            mail: Mutex::default(),
            barriers: Mutex::default(),
        });
        group.world.register(&group);
        group
    }

    pub(super) fn size(&self) -> usize {
        self.members.len()
    }

    /// Fails the world with what the rank at `place` saw, and returns that.
    pub(crate) fn fail<T>(&self, place: usize, error: CommError) -> CommResult<T> {
        self.world.fail(self.members[place], error.clone());
        Err(error)
    }

    /// Brings `input` of the rank at `place` to collective number `sequence`. The rank that
    /// arrives last sets the work going.
    pub(super) fn join(
        self: &Arc<Self>,
        place: usize,
        sequence: u64,
        signature: Signature,
        input: RankInput,
    ) -> CommResult<Arc<RankBarrier>> {
        self.enter_barrier(place, sequence, signature, input, |barrier, inputs| {
            collective::start(self, barrier, inputs);
        })
    }

    /// The same with what the rank that arrives last does: it has all inputs, in rank order, and
    /// leaves the results in the barrier's slots.
    pub(crate) fn enter_barrier(
        self: &Arc<Self>,
        place: usize,
        sequence: u64,
        signature: Signature,
        input: RankInput,
        start: impl FnOnce(&Arc<RankBarrier>, Vec<RankInput>),
    ) -> CommResult<Arc<RankBarrier>> {
        if let Some(error) = self.world.error(self.members[place]) {
            return Err(error);
        }
        let barrier = self.barrier(place, sequence, signature);
        if barrier.signature != signature {
            return self.fail(place, self.mismatch(place, signature, &barrier));
        }
        match barrier.arrive(place, input) {
            Some(inputs) => start(&barrier, inputs),
            None => self.check_missing(place, &barrier)?,
        }
        Ok(barrier)
    }

    /// Forgets a collective whose ranks all have their results.
    pub(crate) fn finish(&self, barrier: &RankBarrier) {
        self.barriers.lock().remove(&barrier.sequence);
    }

    /// Wakes every waiting rank, and lets go of what will never be complete.
    pub(super) fn wake_all(&self) {
        let barriers = std::mem::take(&mut *self.barriers.lock());
        for barrier in barriers.values() {
            barrier.slots.wake_all();
        }
        let mail = std::mem::take(&mut *self.mail.lock());
        mail.wake_all();
    }

    /// The operation, if any, that someone waits for and world rank `rank` has not joined.
    pub(super) fn waits_for(&self, rank: usize) -> Option<String> {
        let place = self.members.iter().position(|&member| member == rank)?;
        // A barrier that only the table holds has no waiter.
        let stuck = |barrier: &&Arc<RankBarrier>| {
            Arc::strong_count(barrier) > 1 && barrier.missing().contains(&place)
        };
        if let Some(barrier) = self.barriers.lock().values().find(stuck) {
            return Some(barrier.signature.to_string());
        }
        self.mail.lock().waits_for(place).then(|| Operation::Recv.to_string())
    }

    fn barrier(&self, place: usize, sequence: u64, signature: Signature) -> Arc<RankBarrier> {
        let new = || Arc::new(RankBarrier::new(sequence, signature, place, self.size()));
        self.barriers.lock().entry(sequence).or_insert_with(new).clone()
    }

    fn mismatch(&self, place: usize, mine: Signature, barrier: &RankBarrier) -> CommError {
        CommError::Mismatch {
            group: self.name.clone(),
            sequence: barrier.sequence,
            rank: self.members[place],
            mine: mine.to_string(),
            peer: self.members[barrier.opener],
            theirs: barrier.signature.to_string(),
        }
    }

    /// Whether all that have not arrived still can.
    fn check_missing(&self, place: usize, barrier: &RankBarrier) -> CommResult<()> {
        let departed = |place: &usize| self.world.has_departed(self.members[*place]);
        let Some(gone) = barrier.missing().into_iter().find(departed) else { return Ok(()) };
        // It may have arrived since, and left with its result: only who left before is missing now.
        if !barrier.missing().contains(&gone) {
            return Ok(());
        }
        self.lost(place, self.members[gone], barrier.signature.to_string())
    }

    /// Fails the world, for the rank at `place` needs world rank `rank`, which has departed. If
    /// that left because the world had failed, the failure is the answer.
    pub(super) fn lost<T>(&self, place: usize, rank: usize, operation: String) -> CommResult<T> {
        if let Some(error) = self.world.error(self.members[place]) {
            return Err(error);
        }
        self.fail(place, CommError::PeerLost { group: self.name.clone(), rank, operation })
    }

    /// World ranks of `places`.
    pub(crate) fn world_ranks(&self, places: &[usize]) -> Vec<usize> {
        places.iter().map(|&place| self.members[place]).collect()
    }
}

/// The buffers among `inputs`, which are all buffers by their signature.
pub(crate) fn buffers_of(inputs: Vec<RankInput>) -> Vec<Tensor<1>> {
    let buffer = |input| match input {
        RankInput::Buffer(tensor) => tensor,
        _ => unreachable!("signatures are equal, so every rank passed a buffer"),
    };
    inputs.into_iter().map(buffer).collect()
}
