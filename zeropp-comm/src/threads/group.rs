//! A group of ranks: its collectives under way, its messages, its buffers.

use std::collections::HashMap;
use std::sync::Arc;

use burn::tensor::Tensor;
use parking_lot::Mutex;

use super::collective;
use super::mail::Mail;
use super::rendezvous::{Input, Rendezvous};
use super::world::World;
use crate::buffers::Buffers;
use crate::signature::{Operation, Signature};
use crate::{CommError, CommResult};

/// What the ranks of one group share.
pub(crate) struct Group {
    pub(crate) world: Arc<World>,
    pub(crate) name: String,
    /// World ranks, in the group's order.
    pub(crate) members: Vec<usize>,
    pub(crate) buffers: Buffers,
    pub(super) mail: Mutex<Mail>,
    meetings: Mutex<HashMap<u64, Arc<Rendezvous>>>,
}

impl Group {
    /// Makes a group and lets the world know it.
    pub(crate) fn new(world: Arc<World>, name: String, members: Vec<usize>) -> Arc<Self> {
        let group = Arc::new(Self {
            world,
            name,
            members,
            buffers: Buffers::default(),
            mail: Mutex::default(),
            meetings: Mutex::default(),
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
        input: Input,
    ) -> CommResult<Arc<Rendezvous>> {
        self.meet(place, sequence, signature, input, |meeting, inputs| {
            collective::start(self, meeting, inputs);
        })
    }

    /// The same with what the rank that arrives last does: it has all inputs, in rank order, and
    /// leaves the results in the meeting's seats.
    pub(crate) fn meet(
        self: &Arc<Self>,
        place: usize,
        sequence: u64,
        signature: Signature,
        input: Input,
        start: impl FnOnce(&Arc<Rendezvous>, Vec<Input>),
    ) -> CommResult<Arc<Rendezvous>> {
        if let Some(error) = self.world.error(self.members[place]) {
            return Err(error);
        }
        let meeting = self.meeting(place, sequence, signature);
        if meeting.signature != signature {
            return self.fail(place, self.mismatch(place, signature, &meeting));
        }
        match meeting.arrive(place, input) {
            Some(inputs) => start(&meeting, inputs),
            None => self.check_missing(place, &meeting)?,
        }
        Ok(meeting)
    }

    /// Forgets a collective whose ranks all have their results.
    pub(crate) fn finish(&self, meeting: &Rendezvous) {
        self.meetings.lock().remove(&meeting.sequence);
    }

    /// Wakes every waiting rank, and lets go of what will never be complete.
    pub(super) fn wake_all(&self) {
        let meetings = std::mem::take(&mut *self.meetings.lock());
        for meeting in meetings.values() {
            meeting.seats.wake_all();
        }
        let mail = std::mem::take(&mut *self.mail.lock());
        mail.wake_all();
    }

    /// The operation, if any, that someone waits for and world rank `rank` has not joined.
    pub(super) fn waits_for(&self, rank: usize) -> Option<String> {
        let place = self.members.iter().position(|&member| member == rank)?;
        // A meeting that only the table holds has nobody waiting.
        let stuck = |meeting: &&Arc<Rendezvous>| {
            Arc::strong_count(meeting) > 1 && meeting.missing().contains(&place)
        };
        if let Some(meeting) = self.meetings.lock().values().find(stuck) {
            return Some(meeting.signature.to_string());
        }
        self.mail.lock().waits_for(place).then(|| Operation::Recv.to_string())
    }

    fn meeting(&self, place: usize, sequence: u64, signature: Signature) -> Arc<Rendezvous> {
        let new = || Arc::new(Rendezvous::new(sequence, signature, place, self.size()));
        self.meetings.lock().entry(sequence).or_insert_with(new).clone()
    }

    fn mismatch(&self, place: usize, mine: Signature, meeting: &Rendezvous) -> CommError {
        CommError::Mismatch {
            group: self.name.clone(),
            sequence: meeting.sequence,
            rank: self.members[place],
            mine: mine.to_string(),
            peer: self.members[meeting.opener],
            theirs: meeting.signature.to_string(),
        }
    }

    /// Whether all that have not arrived still can.
    fn check_missing(&self, place: usize, meeting: &Rendezvous) -> CommResult<()> {
        let mut missing = self.world_ranks(&meeting.missing()).into_iter();
        let Some(rank) = missing.find(|&rank| self.world.has_departed(rank)) else {
            return Ok(());
        };
        self.lost(place, rank, meeting.signature.to_string())
    }

    /// Fails the world, for the rank at `place` needs world rank `rank`, which has departed. If that
    /// left because the world had failed, the failure is the answer.
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
pub(crate) fn buffers_of(inputs: Vec<Input>) -> Vec<Tensor<1>> {
    let buffer = |input| match input {
        Input::Buffer(tensor) => tensor,
        _ => unreachable!("signatures are equal, so every rank passed a buffer"),
    };
    inputs.into_iter().map(buffer).collect()
}
