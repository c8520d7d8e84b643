//! One rank's end of a group.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::{DType, Tensor};

use super::barrier::{Input, Output, RankBarrier, opened};
use super::group::Group;
use super::mail::{self, Address, Found, Receive};
use super::result_slots::Wait;
use super::world::Liveness;
use crate::signature::{Operation, Signature, bytes_of};
use crate::stats::Traffic;
use crate::{AllBytes, CommError, CommResult, CommStats, Communicator, InFlight, Pending, checks};
use zeropp_core::device::{hand_over, take_over};

/// The communicator of one rank and group in the threads engine.
pub(crate) struct ThreadsCommunicator {
    group: Arc<Group>,
    place: usize,
    liveness: Arc<Liveness>,
    sequence: AtomicU64,
    traffic: Traffic,
}

impl ThreadsCommunicator {
    pub(crate) fn new(group: Arc<Group>, place: usize, liveness: Arc<Liveness>) -> Self {
        let sequence = AtomicU64::new(0);
        Self { group, place, liveness, sequence, traffic: Traffic::default() }
    }

    /// Takes part in the group's next collective; `open` turns what comes out into the result.
    fn collective<T: 'static>(
        &self,
        signature: Signature,
        input: Input,
        open: fn(Output) -> T,
    ) -> Pending<T> {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        match self.group.join(self.place, sequence, signature, input) {
            Err(error) => Pending::ready(Err(error)),
            Ok(barrier) => {
                let group = self.group.clone();
                Pending::in_flight(Box::new(Ticket { group, place: self.place, barrier, open }))
            }
        }
    }

    /// A collective on a buffer; with a root, only the root passes one in.
    fn on_buffer(
        &self,
        operation: Operation,
        buffer: Tensor<1>,
        root: Option<usize>,
    ) -> Pending<Tensor<1>> {
        let signature = Signature { root, ..Signature::of(operation, &buffer) };
        if let Err(error) = self.check(operation, checks::collective(&signature, self.size())) {
            return Pending::ready(Err(error));
        }
        let passes = root.is_none_or(|root| root == self.place);
        let bytes = if passes { bytes_of(&buffer) } else { 0 };
        self.traffic.record(operation, self.size(), bytes);
        if self.size() == 1 {
            return Pending::ready(self.healthy().map(|()| buffer));
        }
        self.collective(signature, Input::Buffer(hand_over(buffer)), opened(operation))
    }

    /// The world's first error, if there is one.
    fn healthy(&self) -> CommResult<()> {
        self.group.world.error(self.liveness.rank).map_or(Ok(()), Err)
    }

    /// Fails the world with a call that cannot be carried out.
    fn invalid<T>(&self, operation: Operation, problem: String) -> CommResult<T> {
        self.healthy()?;
        let error = CommError::Invalid {
            group: self.group.name.clone(),
            rank: self.liveness.rank,
            operation: operation.to_string(),
            problem,
        };
        self.group.fail(self.place, error)
    }

    /// Fails the world where an argument has a problem.
    fn check(&self, operation: Operation, checked: Result<(), String>) -> CommResult<()> {
        checked.or_else(|problem| self.invalid(operation, problem))
    }
}

impl Communicator for ThreadsCommunicator {
    fn name(&self) -> &str {
        &self.group.name
    }

    fn rank(&self) -> usize {
        self.place
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn all_gather(&self, shard: Tensor<1>) -> Pending<Tensor<1>> {
        self.on_buffer(Operation::AllGather, shard, None)
    }

    fn reduce_scatter(&self, full: Tensor<1>) -> Pending<Tensor<1>> {
        self.on_buffer(Operation::ReduceScatter, full, None)
    }

    fn all_reduce(&self, buffer: Tensor<1>) -> Pending<Tensor<1>> {
        self.on_buffer(Operation::AllReduce, buffer, None)
    }

    fn broadcast(&self, root: usize, buffer: Tensor<1>) -> Pending<Tensor<1>> {
        self.on_buffer(Operation::Broadcast, buffer, Some(root))
    }

    fn exchange(&self, bytes: Vec<u8>) -> Pending<AllBytes> {
        self.traffic.record(Operation::Exchange, self.size(), bytes.len());
        self.collective(Signature::bare(Operation::Exchange), Input::Bytes(bytes), Output::bytes)
    }

    fn gather(&self, root: usize, bytes: Vec<u8>) -> Pending<AllBytes> {
        if let Err(error) = self.check(Operation::Gather, checks::rank("root", root, self.size())) {
            return Pending::ready(Err(error));
        }
        let is_root = root == self.place;
        self.traffic.record(Operation::Gather, self.size(), if is_root { 0 } else { bytes.len() });
        self.collective(Signature::gather(root), Input::Bytes(bytes), Output::bytes)
    }

    fn send(&self, to: usize, tag: u64, buffer: Tensor<1>) -> Pending<()> {
        let sent = self
            .healthy()
            .and_then(|()| self.check(Operation::Send, checks::rank("receiver", to, self.size())))
            .and_then(|()| {
                self.traffic.record(Operation::Send, self.size(), bytes_of(&buffer));
                let address = Address { from: self.place, to, tag };
                mail::send(&self.group, address, hand_over(buffer))
            });
        Pending::ready(sent)
    }

    fn recv(&self, from: usize, tag: u64, len: usize, dtype: DType) -> Pending<Tensor<1>> {
        let found = self
            .healthy()
            .and_then(|()| self.check(Operation::Recv, checks::rank("sender", from, self.size())))
            .and_then(|()| {
                let address = Address { from, to: self.place, tag };
                mail::recv(&self.group, address, (dtype, len))
            });
        match found {
            Err(error) => Pending::ready(Err(error)),
            Ok(Found::Message(message)) => Pending::ready(Ok(take_over(message))),
            Ok(Found::Waiting(receive)) => {
                let group = self.group.clone();
                Pending::in_flight(Box::new(Envelope { group, receive }))
            }
        }
    }

    fn barrier(&self) -> CommResult<()> {
        self.collective(Signature::bare(Operation::Barrier), Input::Nothing, |_| ()).wait()
    }

    fn split(&self, name: &str, color: usize, key: usize) -> CommResult<Arc<dyn Communicator>> {
        let open = |output| match output {
            Output::Group(group, place) => (group, place),
            _ => unreachable!("a split gives a group"),
        };
        let input = Input::Split(name.to_owned(), color, key);
        let signature = Signature::bare(Operation::Split);
        let (group, place) = self.collective(signature, input, open).wait()?;
        Ok(Arc::new(Self::new(group, place, self.liveness.clone())))
    }

    fn abort(&self, reason: &str) {
        let rank = self.liveness.rank;
        self.group.world.fail(rank, CommError::Aborted { rank, reason: reason.to_owned() });
    }

    fn failure(&self) -> Option<CommError> {
        self.healthy().err()
    }

    fn stats(&self) -> CommStats {
        self.traffic.snapshot(self.group.buffers.fresh())
    }
}

/// A rank's request on its result of a collective.
struct Ticket<T> {
    group: Arc<Group>,
    place: usize,
    barrier: Arc<RankBarrier>,
    open: fn(Output) -> T,
}

impl<T> InFlight<T> for Ticket<T> {
    fn is_done(&mut self) -> bool {
        let rank = self.group.members[self.place];
        self.barrier.slots.has(self.place) || self.group.world.error(rank).is_some()
    }

    fn missing(&mut self) -> Vec<usize> {
        self.group.world_ranks(&self.barrier.missing())
    }

    fn wait(self: Box<Self>) -> CommResult<T> {
        let world = &self.group.world;
        match self.barrier.slots.wait(self.place, self.group.members[self.place], world) {
            Wait::Done(output) => Ok((self.open)(output)),
            Wait::Failed(error) => Err(error),
            Wait::Expired => {
                let error = CommError::Timeout {
                    group: self.group.name.clone(),
                    operation: self.barrier.signature.to_string(),
                    sequence: self.barrier.sequence,
                    after_s: world.options.timeout.as_secs_f64(),
                    missing: self.group.world_ranks(&self.barrier.missing()),
                };
                self.group.fail(self.place, error)
            }
        }
    }
}

/// A rank's request on a message.
struct Envelope {
    group: Arc<Group>,
    receive: Arc<Receive>,
}

impl InFlight<Tensor<1>> for Envelope {
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
        match self.receive.slot.wait(0, self.group.members[address.to], world) {
            Wait::Done(message) => Ok(take_over(message)),
            Wait::Failed(error) => Err(error),
            Wait::Expired => {
                let error = CommError::Timeout {
                    group: self.group.name.clone(),
                    operation: Operation::Recv.to_string(),
                    sequence: address.tag,
                    after_s: world.options.timeout.as_secs_f64(),
                    missing: self.group.world_ranks(&[address.from]),
                };
                self.group.fail(address.to, error)
            }
        }
    }
}
