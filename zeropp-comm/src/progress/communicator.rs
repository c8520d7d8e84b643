//! One rank's end of a group.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use parking_lot::Mutex;

use super::request::Ticket;
use super::{
    Address, Awaited, Command, Engine, Envelope, Group, Input, Join, Liveness, Output, Request,
    Shared, Slot, Wanted,
};
use crate::signature::{Operation, Signature, bytes_of};
use crate::stats::Traffic;
use crate::subgroup::SplitRequest;
use crate::{AllBytes, CommError, CommResult, CommStats, Communicator, Pending, checks};

/// The communicator of this rank for one group.
pub(crate) struct ProgressCommunicator<E: Engine> {
    group: Arc<Group>,
    liveness: Arc<Liveness<E>>,
    sequence: Mutex<u64>,
    traffic: Traffic,
}

impl<E: Engine> ProgressCommunicator<E> {
    pub(crate) fn new(group: Arc<Group>, liveness: Arc<Liveness<E>>) -> Self {
        Self { group, liveness, sequence: Mutex::new(0), traffic: Traffic::default() }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared<E>> {
        &self.liveness.0
    }

    fn healthy(&self) -> CommResult<()> {
        self.shared().error().map_or(Ok(()), Err)
    }

    /// Fails the world with a call that cannot be carried out.
    fn invalid(&self, operation: Operation, problem: String) -> CommResult<()> {
        self.healthy()?;
        let error = CommError::Invalid {
            group: self.group.name.clone(),
            rank: self.shared().rank,
            operation: operation.to_string(),
            problem,
        };
        self.fail(error.clone());
        Err(error)
    }

    fn fail(&self, error: CommError) {
        if self.shared().set_failure(self.shared().rank, error) {
            // The communication thread has ended if nobody listens.
            let _ = self.shared().commands.send(Command::Fail);
        }
    }

    fn check(&self, operation: Operation, checked: Result<(), String>) -> CommResult<()> {
        checked.or_else(|problem| self.invalid(operation, problem))
    }

    /// Takes part in the group's next collective; `open` turns what comes out into the result.
    pub(crate) fn join<T: 'static>(
        &self,
        signature: Signature,
        input: Input<E>,
        open: impl FnOnce(Output<E>, &Request<E>) -> CommResult<T> + Send + 'static,
    ) -> Pending<T> {
        if let Err(error) = self.healthy() {
            return Pending::ready(Err(error));
        }
        let (group, slot) = (self.group.id, Arc::new(Slot::default()));
        // Under the lock, the numbers go to the communication thread in order.
        let mut next = self.sequence.lock();
        let sequence = *next;
        *next += 1;
        let join = Join { group, sequence, signature, input, slot: slot.clone() };
        let sent = self.shared().commands.send(Command::Join(join));
        drop(next);
        if sent.is_err() {
            return Pending::ready(Err(self.ended()));
        }
        self.in_flight(Awaited::Collective { group, sequence, signature }, slot, open)
    }

    fn in_flight<T: 'static>(
        &self,
        what: Awaited,
        slot: Arc<Slot<E>>,
        open: impl FnOnce(Output<E>, &Request<E>) -> CommResult<T> + Send + 'static,
    ) -> Pending<T> {
        let (shared, group) = (self.shared().clone(), self.group.clone());
        Pending::in_flight(Box::new(Ticket {
            request: Request { shared, group, what, slot },
            open,
        }))
    }

    fn ended(&self) -> CommError {
        self.shared().error().unwrap_or_else(|| CommError::Unavailable {
            engine: E::NAME.into(),
            reason: "the communication thread has ended".into(),
        })
    }

    /// Whether this rank passes in a buffer: with a root, only the root does.
    pub(crate) fn passes(&self, root: Option<usize>) -> bool {
        root.is_none_or(|root| root == self.group.place)
    }

    /// A collective on small data.
    fn on_bytes(&self, signature: Signature, bytes: Vec<u8>) -> Pending<AllBytes> {
        let checked = E::exchangeable(bytes.len(), self.size());
        if let Err(error) = self.check(signature.operation, checked) {
            return Pending::ready(Err(error));
        }
        self.join(signature, Input::Bytes(bytes), |output, _| match output {
            Output::Bytes(all) => Ok(all),
            _ => unreachable!("the operation gives bytes"),
        })
    }

    /// A collective on a buffer.
    fn on_buffer(
        &self,
        operation: Operation,
        buffer: Tensor<1>,
        root: Option<usize>,
    ) -> Pending<Tensor<1>> {
        let signature = Signature { root, ..Signature::of(operation, &buffer) };
        let size = self.size();
        let checked = checks::collective(&signature, size);
        let checked = checked.and_then(|()| E::movable(&signature, size));
        if let Err(error) = self.check(operation, checked) {
            return Pending::ready(Err(error));
        }
        let bytes = if self.passes(root) { bytes_of(&buffer) } else { 0 };
        self.traffic.record(operation, size, bytes);
        if size == 1 {
            return Pending::ready(self.healthy().map(|()| buffer));
        }
        E::collective(self, signature, buffer)
    }
}

impl<E: Engine> Communicator for ProgressCommunicator<E> {
    fn name(&self) -> &str {
        &self.group.name
    }

    fn rank(&self) -> usize {
        self.group.place
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
        self.on_bytes(Signature::bare(Operation::Exchange), bytes)
    }

    fn gather(&self, root: usize, bytes: Vec<u8>) -> Pending<AllBytes> {
        if let Err(error) = self.check(Operation::Gather, checks::rank("root", root, self.size())) {
            return Pending::ready(Err(error));
        }
        let is_root = root == self.group.place;
        self.traffic.record(Operation::Gather, self.size(), if is_root { 0 } else { bytes.len() });
        self.on_bytes(Signature::gather(root), bytes)
    }

    fn send(&self, to: usize, tag: u64, buffer: Tensor<1>) -> Pending<()> {
        let signature = Signature::of(Operation::Send, &buffer);
        let checked = checks::rank("receiver", to, self.size())
            .and_then(|()| E::movable(&signature, self.size()));
        let checked = self.healthy().and_then(|()| self.check(Operation::Send, checked));
        if let Err(error) = checked {
            return Pending::ready(Err(error));
        }
        self.traffic.record(Operation::Send, self.size(), bytes_of(&buffer));
        let address = Address { group: self.group.id, from: self.group.place, tag };
        let payload = E::payload(self.shared(), buffer, to == self.group.place);
        let command = Command::Send { to, envelope: Envelope { address, signature }, payload };
        Pending::ready(self.shared().commands.send(command).map_err(|_| self.ended()))
    }

    fn recv(&self, from: usize, tag: u64, len: usize, dtype: DType) -> Pending<Tensor<1>> {
        let signature = Signature::with(Operation::Recv, dtype, len);
        let checked = checks::rank("sender", from, self.size())
            .and_then(|()| E::movable(&signature, self.size()));
        let checked = self.healthy().and_then(|()| self.check(Operation::Recv, checked));
        if let Err(error) = checked {
            return Pending::ready(Err(error));
        }
        let slot = Arc::new(Slot::default());
        let address = Address { group: self.group.id, from, tag };
        let (group, at) = (self.group.clone(), slot.clone());
        let command = Command::Receive(Wanted { address, group, signature, slot: at });
        if self.shared().commands.send(command).is_err() {
            return Pending::ready(Err(self.ended()));
        }
        self.in_flight(Awaited::Receive(address), slot, |output, request| {
            E::open(output.buffer(), request)
        })
    }

    fn barrier(&self) -> CommResult<()> {
        let signature = Signature::bare(Operation::Barrier);
        self.join(signature, Input::Bytes(Vec::new()), |_, _| Ok(())).wait()
    }

    fn split(&self, name: &str, color: usize, key: usize) -> CommResult<Arc<dyn Communicator>> {
        if name.len() > E::GROUP_NAME_MAX {
            let (len, most) = (name.len(), E::GROUP_NAME_MAX);
            let problem = format!("a name of {len} bytes; use at most {most}");
            self.invalid(Operation::Split, problem)?;
        }
        let split_request = SplitRequest { color, key, name: name.to_owned() }.encode();
        let signature = Signature::bare(Operation::Split);
        let group = self.join(signature, Input::Bytes(split_request), |output, _| match output {
            Output::Group(group) => Ok(group),
            _ => unreachable!("a split gives a group"),
        });
        Ok(Arc::new(Self::new(group.wait()?, self.liveness.clone())))
    }

    fn abort(&self, reason: &str) {
        let rank = self.shared().rank;
        self.fail(CommError::Aborted { rank, reason: reason.to_owned() });
    }

    fn failure(&self) -> Option<CommError> {
        self.shared().error()
    }

    fn stats(&self) -> CommStats {
        self.traffic.snapshot(self.group.buffers.fresh())
    }
}
