//! One rank's end of a group that spans processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::{DType, Tensor};

use super::group::Group;
use super::header::Purpose;
use super::in_progress::InProgress;
use super::split::{Joined, split};
use super::ticket::{Outer, Ticket};
use crate::signature::{Operation, Signature, bytes_of};
use crate::stats::Traffic;
use crate::threads::barrier::{Input, Output, opened};
use crate::threads::communicator::ThreadsCommunicator;
use crate::threads::world::Liveness;
use crate::{AllBytes, CommError, CommResult, CommStats, Communicator, Pending, checks};
use zeropp_core::device::hand_over;

/// The communicator of one rank and group in the mixed engine.
pub(super) struct HybridCommunicator {
    group: Arc<Group>,
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
    pub(super) fn new(group: Arc<Group>, index: usize, liveness: Arc<Liveness>) -> Self {
        let place = group.places[group.here()][index];
        let local = ThreadsCommunicator::new(group.local.clone(), index, liveness.clone());
        let (sequence, traffic) = (AtomicU64::new(0), Traffic::default());
        Self { group, index, place, local, liveness, sequence, traffic }
    }

    fn healthy(&self) -> CommResult<()> {
        self.group.engine.world.error(self.liveness.rank).map_or(Ok(()), Err)
    }

    /// Fails the world where an argument has a problem.
    fn check(&self, operation: Operation, checked: Result<(), String>) -> CommResult<()> {
        let Err(problem) = checked else { return Ok(()) };
        self.healthy()?;
        let error = CommError::Invalid {
            group: self.group.local.name.clone(),
            rank: self.liveness.rank,
            operation: operation.to_string(),
            problem,
        };
        Err(self.group.fail(self.index, error))
    }

    /// Takes part in the group's next collective together with the other ranks of this process;
    /// `open` turns what comes out into the result.
    fn together<T: 'static>(
        &self,
        signature: Signature,
        input: Input,
        open: fn(Output) -> T,
    ) -> Pending<T> {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let group = &self.group;
        let joined =
            group.local.enter_barrier(self.index, sequence, signature, input, |barrier, inputs| {
                match signature.operation {
                    Operation::Split => split(group, barrier, inputs),
                    _ => InProgress::start(group, barrier, inputs),
                }
            });
        match joined {
            Err(error) => Pending::ready(Err(error)),
            Ok(barrier) => {
                let (group, index) = (group.clone(), self.index);
                Pending::in_flight(Box::new(Ticket { group, index, barrier, open }))
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

    /// A collective on a buffer; with a root, only the root passes one in.
    fn on_buffer(
        &self,
        operation: Operation,
        buffer: Tensor<1>,
        root: Option<usize>,
        direct: fn(&dyn Communicator, Tensor<1>, Option<usize>) -> Pending<Tensor<1>>,
    ) -> Pending<Tensor<1>> {
        let signature = Signature { root, ..Signature::of(operation, &buffer) };
        if let Err(error) = self.check(operation, checks::collective(&signature, self.size())) {
            return Pending::ready(Err(error));
        }
        let passes = root.is_none_or(|root| root == self.place);
        let bytes = if passes { bytes_of(&buffer) } else { 0 };
        self.traffic.record(operation, self.size(), bytes);
        if self.group.is_direct() {
            return self.alone(signature.to_string(), |outer| direct(outer, buffer, root));
        }
        self.together(signature, Input::Buffer(hand_over(buffer)), opened(operation))
    }

    /// The tag between two processes for a message between two ranks.
    fn mail_tag(&self, from: usize, to: usize, tag: u64) -> u64 {
        // With one rank a process there is nothing to tell apart.
        if self.group.is_direct() { tag } else { Purpose::Mail { from, to, tag }.tag() }
    }
}

impl Communicator for HybridCommunicator {
    fn name(&self) -> &str {
        &self.group.local.name
    }

    fn rank(&self) -> usize {
        self.place
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn all_gather(&self, shard: Tensor<1>) -> Pending<Tensor<1>> {
        self.on_buffer(Operation::AllGather, shard, None, |outer, b, _| outer.all_gather(b))
    }

    fn reduce_scatter(&self, full: Tensor<1>) -> Pending<Tensor<1>> {
        self.on_buffer(Operation::ReduceScatter, full, None, |outer, b, _| outer.reduce_scatter(b))
    }

    fn all_reduce(&self, buffer: Tensor<1>) -> Pending<Tensor<1>> {
        self.on_buffer(Operation::AllReduce, buffer, None, |outer, b, _| outer.all_reduce(b))
    }

    fn broadcast(&self, root: usize, buffer: Tensor<1>) -> Pending<Tensor<1>> {
        self.on_buffer(Operation::Broadcast, buffer, Some(root), |outer, b, root| {
            outer.broadcast(root.expect("given"), b)
        })
    }

    fn exchange(&self, bytes: Vec<u8>) -> Pending<AllBytes> {
        self.traffic.record(Operation::Exchange, self.size(), bytes.len());
        let signature = Signature::bare(Operation::Exchange);
        if self.group.is_direct() {
            return self.alone(signature.to_string(), |outer| outer.exchange(bytes));
        }
        self.together(signature, Input::Bytes(bytes), Output::bytes)
    }

    fn gather(&self, root: usize, bytes: Vec<u8>) -> Pending<AllBytes> {
        if let Err(error) = self.check(Operation::Gather, checks::rank("root", root, self.size())) {
            return Pending::ready(Err(error));
        }
        let is_root = root == self.place;
        self.traffic.record(Operation::Gather, self.size(), if is_root { 0 } else { bytes.len() });
        let signature = Signature::gather(root);
        if self.group.is_direct() {
            return self.alone(signature.to_string(), |outer| outer.gather(root, bytes));
        }
        self.together(signature, Input::Bytes(bytes), Output::bytes)
    }

    fn send(&self, to: usize, tag: u64, buffer: Tensor<1>) -> Pending<()> {
        let checked = checks::rank("receiver", to, self.size());
        if let Err(error) = self.healthy().and_then(|()| self.check(Operation::Send, checked)) {
            return Pending::ready(Err(error));
        }
        self.traffic.record(Operation::Send, self.size(), bytes_of(&buffer));
        let (home, index) = self.group.homes[to];
        if home == self.group.here() {
            return self.local.send(index, tag, buffer);
        }
        let outer_tag = self.mail_tag(self.place, to, tag);
        let operation = Signature::of(Operation::Send, &buffer).to_string();
        self.on_outer(operation, tag, None, |outer| outer.send(home, outer_tag, buffer))
    }

    fn recv(&self, from: usize, tag: u64, len: usize, dtype: DType) -> Pending<Tensor<1>> {
        let checked = checks::rank("sender", from, self.size());
        if let Err(error) = self.healthy().and_then(|()| self.check(Operation::Recv, checked)) {
            return Pending::ready(Err(error));
        }
        let (home, index) = self.group.homes[from];
        if home == self.group.here() {
            return self.local.recv(index, tag, len, dtype);
        }
        let outer_tag = self.mail_tag(from, self.place, tag);
        let (operation, sender) = (Operation::Recv.to_string(), Some(self.group.members[from]));
        self.on_outer(operation, tag, sender, |outer| outer.recv(home, outer_tag, len, dtype))
    }

    fn barrier(&self) -> CommResult<()> {
        // Also where every rank has its process: an exchange can be waited for in time.
        self.together(Signature::bare(Operation::Barrier), Input::Nothing, |_| ()).wait()
    }

    fn split(&self, name: &str, color: usize, key: usize) -> CommResult<Arc<dyn Communicator>> {
        enum Part {
            Here(ThreadsPart),
            Wide(Joined),
        }
        type ThreadsPart = (Arc<crate::threads::group::Group>, usize);
        let open = |output| match output {
            Output::Group(group, place) => Part::Here((group, place)),
            Output::Own(joined) => Part::Wide(*joined.downcast().expect("made by split")),
            _ => unreachable!("a split gives a group"),
        };
        let input = Input::Split(name.to_owned(), color, key);
        let liveness = self.liveness.clone();
        Ok(match self.together(Signature::bare(Operation::Split), input, open).wait()? {
            Part::Here((group, place)) => {
                Arc::new(ThreadsCommunicator::new(group, place, liveness))
            }
            Part::Wide(Joined { group, index }) => Arc::new(Self::new(group, index, liveness)),
        })
    }

    fn abort(&self, reason: &str) {
        let rank = self.liveness.rank;
        let error = CommError::Aborted { rank, reason: reason.to_owned() };
        self.group.engine.world.fail(rank, error);
    }

    fn failure(&self) -> Option<CommError> {
        self.healthy().err()
    }

    fn stats(&self) -> CommStats {
        self.traffic.snapshot(self.group.local.buffers.fresh())
    }
}
