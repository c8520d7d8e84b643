//! One rank's end of a group that spans processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::Tensor;

use super::group::HybridGroup;
use super::header::Purpose;
use super::in_progress::HybridInProgress;
use super::split::{Joined, split};
use super::ticket::{HybridTicket, Outer};
use crate::front::{Front, GroupMember};
use crate::patience::Timeout;
use crate::signature::{Operation, Signature};
use crate::stats::{HeldMemory, Traffic};
use crate::threads::barrier::{RankInput, RankOutput, opened};
use crate::threads::communicator::ThreadsCommunicator;
use crate::threads::world::Liveness;
use crate::{AllBytes, CommError, CommResult, Communicator, Pending};
use zeropp_core::device::hand_over;

/// The communicator of one rank and group in the hybrid engine.
pub(super) struct HybridCommunicator {
    group: Arc<HybridGroup>,
    /// The rank's place among those of its process.
    index: usize,
    /// Its place in the group.
    place: usize,
    /// The same rank among those of its process: for messages between them.
    local: ThreadsCommunicator,
    liveness: Arc<Liveness>,
    sequence: AtomicU64,
    traffic: Traffic,
}

impl HybridCommunicator {
    pub(super) fn new(group: Arc<HybridGroup>, index: usize, liveness: Arc<Liveness>) -> Self {
        let place = group.places[group.here()][index];
        let local = ThreadsCommunicator::new(group.local.clone(), index, liveness.clone());
        let (sequence, traffic) = (AtomicU64::new(0), Traffic::default());
        Self { group, index, place, local, liveness, sequence, traffic }
    }

    /// Takes part in the group's next collective together with the other ranks of this process;
    /// `open` turns what comes out into the result.
    fn together<T: 'static>(
        &self,
        signature: Signature,
        input: RankInput,
        open: fn(RankOutput) -> T,
    ) -> Pending<T> {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let group = &self.group;
        let joined =
            group.local.enter_barrier(self.index, sequence, signature, input, |barrier, inputs| {
                match signature.operation {
                    Operation::Split => split(group, barrier, inputs),
                    _ => HybridInProgress::start(group, barrier, inputs),
                }
            });
        match joined {
            Err(error) => Pending::ready(Err(error)),
            Ok(barrier) => {
                let (group, index) = (group.clone(), self.index);
                Pending::in_flight(Box::new(HybridTicket { group, index, barrier, open }))
            }
        }
    }

    /// Takes part in the group's next collective as the only rank of this process.
    fn alone<T: Send + 'static>(
        &self,
        operation: String,
        start: impl FnOnce(&dyn Communicator) -> Pending<T>,
    ) -> Pending<T> {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        self.on_outer(operation, sequence, None, start)
    }

    fn on_outer<T: Send + 'static>(
        &self,
        operation: String,
        sequence: u64,
        from: Option<usize>,
        start: impl FnOnce(&dyn Communicator) -> Pending<T>,
    ) -> Pending<T> {
        if let Err(error) = self.healthy() {
            return Pending::ready(Err(error));
        }
        let pending = start(self.group.outer.as_ref());
        let (group, index) = (self.group.clone(), self.index);
        Pending::in_flight(Box::new(Outer { group, index, pending, operation, sequence, from }))
    }

    /// The tag between two processes for a message between two ranks.
    fn mail_tag(&self, from: usize, to: usize, tag: u64) -> u64 {
        // With one rank per process there is nothing to distinguish.
        if self.group.is_direct() { tag } else { Purpose::Mail { from, to, tag }.tag() }
    }
}

impl Front for HybridCommunicator {
    fn member(&self) -> GroupMember<'_> {
        GroupMember {
            name: &self.group.local.name,
            place: self.place,
            size: self.group.size(),
            world_rank: self.liveness.rank,
        }
    }

    fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    fn held(&self) -> HeldMemory {
        self.local.held()
    }

    fn timeout(&self) -> &Timeout {
        &self.group.engine.world.timeout
    }

    fn error(&self) -> Option<CommError> {
        self.group.engine.world.error(self.liveness.rank)
    }

    fn fail(&self, error: CommError) {
        self.group.engine.world.fail(self.liveness.rank, error);
    }

    fn on_buffer(&self, call: Signature, buffer: Tensor<1>) -> Pending<Tensor<1>> {
        if self.group.is_direct() {
            return self.alone(call.to_string(), |outer| match call.operation {
                Operation::AllGather => outer.all_gather(buffer),
                Operation::ReduceScatter => outer.reduce_scatter(buffer),
                Operation::AllReduce => outer.all_reduce(buffer),
                _ => outer.broadcast(call.root.expect("a broadcast names its root"), buffer),
            });
        }
        self.together(call, RankInput::Buffer(hand_over(buffer)), opened(call.operation))
    }

    fn on_bytes(&self, call: Signature, bytes: Vec<u8>) -> Pending<AllBytes> {
        if self.group.is_direct() {
            return self.alone(call.to_string(), |outer| match call.root {
                Some(root) => outer.gather(root, bytes),
                None => outer.exchange(bytes),
            });
        }
        self.together(call, RankInput::Bytes(bytes), RankOutput::bytes)
    }

    fn post(&self, to: usize, tag: u64, buffer: Tensor<1>) -> Pending<()> {
        let (home, index) = self.group.homes[to];
        if home == self.group.here() {
            return self.local.send(index, tag, buffer);
        }
        let outer_tag = self.mail_tag(self.place, to, tag);
        let operation = Signature::of(Operation::Send, &buffer).to_string();
        self.on_outer(operation, tag, None, |outer| outer.send(home, outer_tag, buffer))
    }

    fn fetch(&self, from: usize, tag: u64, call: Signature) -> Pending<Tensor<1>> {
        let (dtype, len) = call.buffer.expect("a receive says its buffer");
        let (home, index) = self.group.homes[from];
        if home == self.group.here() {
            return self.local.recv(index, tag, len, dtype);
        }
        let outer_tag = self.mail_tag(from, self.place, tag);
        let (operation, sender) = (Operation::Recv.to_string(), Some(self.group.members[from]));
        self.on_outer(operation, tag, sender, |outer| outer.recv(home, outer_tag, len, dtype))
    }

    fn meet(&self) -> CommResult<()> {
        // Also where every rank has its process: an exchange can be waited for in time.
        self.together(Signature::bare(Operation::Barrier), RankInput::Nothing, |_| ()).wait()
    }

    fn part(&self, name: &str, color: usize, key: usize) -> CommResult<Arc<dyn Communicator>> {
        enum NewGroup {
            Here(ThreadsPart),
            Wide(Joined),
        }
        type ThreadsPart = (Arc<crate::threads::group::ThreadsGroup>, usize);
        let open = |output| match output {
            RankOutput::Group(group, place) => NewGroup::Here((group, place)),
            RankOutput::Own(joined) => NewGroup::Wide(*joined.downcast().expect("made by split")),
            _ => unreachable!("a split gives a group"),
        };
        let input = RankInput::Split(name.to_owned(), color, key);
        let liveness = self.liveness.clone();
        Ok(match self.together(Signature::bare(Operation::Split), input, open).wait()? {
            NewGroup::Here((group, place)) => {
                Arc::new(ThreadsCommunicator::new(group, place, liveness))
            }
            NewGroup::Wide(Joined { group, index }) => Arc::new(Self::new(group, index, liveness)),
        })
    }
}
