//! One rank's end of a group.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::Tensor;

use super::barrier::{RankBarrier, RankInput, RankOutput, opened};
use super::group::ThreadsGroup;
use super::mail::{self, MessageAddress, Receive, ReceiveOutcome};
use super::result_slots::WaitEnd;
use super::world::Liveness;
use crate::front::{Front, GroupMember};
use crate::patience::Timeout;
use crate::signature::{Operation, Signature};
use crate::stats::{HeldMemory, Traffic};
use crate::{AllBytes, CommError, CommResult, Communicator, InFlight, Pending};
use zeropp_core::device::{hand_over, take_over};

/// The communicator of one rank and group in the threads engine.
pub(crate) struct ThreadsCommunicator {
    group: Arc<ThreadsGroup>,
    place: usize,
    liveness: Arc<Liveness>,
    sequence: AtomicU64,
    traffic: Traffic,
}

impl ThreadsCommunicator {
    pub(crate) fn new(group: Arc<ThreadsGroup>, place: usize, liveness: Arc<Liveness>) -> Self {
        let sequence = AtomicU64::new(0);
        Self { group, place, liveness, sequence, traffic: Traffic::default() }
    }

    /// Takes part in the group's next collective; `open` turns what comes out into the result.
    fn collective<T: 'static>(
        &self,
        signature: Signature,
        input: RankInput,
        open: fn(RankOutput) -> T,
    ) -> Pending<T> {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        match self.group.join(self.place, sequence, signature, input) {
            Err(error) => Pending::ready(Err(error)),
            Ok(barrier) => {
                let group = self.group.clone();
                Pending::in_flight(Box::new(CollectiveTicket {
                    group,
                    place: self.place,
                    barrier,
                    open,
                }))
            }
        }
    }
}

impl Front for ThreadsCommunicator {
    fn member(&self) -> GroupMember<'_> {
        GroupMember {
            name: &self.group.name,
            place: self.place,
            size: self.group.size(),
            world_rank: self.liveness.rank,
        }
    }

    fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    fn held(&self) -> HeldMemory {
        let buffers = &self.group.buffers;
        HeldMemory {
            fresh_buffers: buffers.fresh(),
            early_bytes: self.group.mail.lock().early_bytes(self.place),
            idle_bytes: if self.place == 0 { buffers.idle_bytes() } else { 0 },
        }
    }

    fn timeout(&self) -> &Timeout {
        &self.group.world.timeout
    }

    fn error(&self) -> Option<CommError> {
        self.group.world.error(self.liveness.rank)
    }

    fn fail(&self, error: CommError) {
        self.group.world.fail(self.liveness.rank, error);
    }

    fn on_buffer(&self, call: Signature, buffer: Tensor<1>) -> Pending<Tensor<1>> {
        self.collective(call, RankInput::Buffer(hand_over(buffer)), opened(call.operation))
    }

    fn on_bytes(&self, call: Signature, bytes: Vec<u8>) -> Pending<AllBytes> {
        self.collective(call, RankInput::Bytes(bytes), RankOutput::bytes)
    }

    fn post(&self, to: usize, tag: u64, buffer: Tensor<1>) -> Pending<()> {
        let address = MessageAddress { from: self.place, to, tag };
        Pending::ready(mail::send(&self.group, address, hand_over(buffer)))
    }

    fn fetch(&self, from: usize, tag: u64, call: Signature) -> Pending<Tensor<1>> {
        let address = MessageAddress { from, to: self.place, tag };
        match mail::recv(&self.group, address, call) {
            Err(error) => Pending::ready(Err(error)),
            Ok(ReceiveOutcome::Message(message)) => Pending::ready(Ok(take_over(message))),
            Ok(ReceiveOutcome::Waiting(receive)) => {
                let group = self.group.clone();
                Pending::in_flight(Box::new(ReceiveTicket { group, receive }))
            }
        }
    }

    fn meet(&self) -> CommResult<()> {
        self.collective(Signature::bare(Operation::Barrier), RankInput::Nothing, |_| ()).wait()
    }

    fn part(&self, name: &str, color: usize, key: usize) -> CommResult<Arc<dyn Communicator>> {
        let open = |output| match output {
            RankOutput::Group(group, place) => (group, place),
            _ => unreachable!("a split gives a group"),
        };
        let input = RankInput::Split(name.to_owned(), color, key);
        let signature = Signature::bare(Operation::Split);
        let (group, place) = self.collective(signature, input, open).wait()?;
        Ok(Arc::new(Self::new(group, place, self.liveness.clone())))
    }
}

/// A rank's request on its result of a collective.
struct CollectiveTicket<T> {
    group: Arc<ThreadsGroup>,
    place: usize,
    barrier: Arc<RankBarrier>,
    open: fn(RankOutput) -> T,
}

impl<T> InFlight<T> for CollectiveTicket<T> {
    fn is_done(&mut self) -> bool {
        let rank = self.group.members[self.place];
        self.barrier.slots.has(self.place) || self.group.world.error(rank).is_some()
    }

    fn missing(&mut self) -> Vec<usize> {
        self.group.world_ranks(&self.barrier.missing())
    }

    fn wait(self: Box<Self>) -> CommResult<T> {
        let world = &self.group.world;
        let (rank, timeout) = (self.group.members[self.place], world.timeout.get());
        match self.barrier.slots.wait(self.place, rank, world, timeout) {
            WaitEnd::Done(output) => Ok((self.open)(output)),
            WaitEnd::Failed(error) => Err(error),
            WaitEnd::Expired => {
                let error = CommError::Timeout {
                    group: self.group.name.clone(),
                    operation: self.barrier.signature.to_string(),
                    sequence: self.barrier.sequence,
                    after_s: timeout.as_secs_f64(),
                    missing: self.group.world_ranks(&self.barrier.missing()),
                };
                self.group.fail(self.place, error)
            }
        }
    }
}

/// A rank's request on a message.
struct ReceiveTicket {
    group: Arc<ThreadsGroup>,
    receive: Arc<Receive>,
}

impl InFlight<Tensor<1>> for ReceiveTicket {
    fn is_done(&mut self) -> bool {
        let rank = self.group.members[self.receive.address.to];
        self.receive.slot.has(0) || self.group.world.error(rank).is_some()
    }

    fn missing(&mut self) -> Vec<usize> {
        match self.receive.slot.has(0) {
            true => Vec::new(),
            false => self.group.world_ranks(&[self.receive.address.from]),
        }
    }

    fn wait(self: Box<Self>) -> CommResult<Tensor<1>> {
        let (world, address) = (&self.group.world, self.receive.address);
        let (rank, timeout) = (self.group.members[address.to], world.timeout.get());
        match self.receive.slot.wait(0, rank, world, timeout) {
            WaitEnd::Done(message) => Ok(take_over(message)),
            WaitEnd::Failed(error) => Err(error),
            WaitEnd::Expired => {
                let error = CommError::Timeout {
                    group: self.group.name.clone(),
                    operation: Operation::Recv.to_string(),
                    sequence: address.tag,
                    after_s: timeout.as_secs_f64(),
                    missing: self.group.world_ranks(&[address.from]),
                };
                self.group.fail(address.to, error)
            }
        }
    }
}
