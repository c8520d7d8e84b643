//! The part of a group's end that all engines share: it checks a call, counts it, and attributes
//! errors to ranks. An engine brings the rest as a [`Front`], and is a [`Communicator`] by that.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};

use crate::patience::Timeout;
use crate::signature::{Operation, Signature, bytes_of};
use crate::stats::{HeldMemory, Traffic};
use crate::{AllBytes, CommError, CommResult, CommStats, Communicator, Pending, checks};

/// Who a rank is in a group.
pub(crate) struct GroupMember<'a> {
    /// Name of the group.
    pub(crate) name: &'a str,
    /// The rank's place in the group.
    pub(crate) place: usize,
    /// Ranks in the group.
    pub(crate) size: usize,
    /// The rank in the world.
    pub(crate) world_rank: usize,
}

impl GroupMember<'_> {
    /// Bytes that the rank brings to a call: with a root, only the root broadcasts.
    fn brings(&self, call: &Signature, bytes: usize) -> usize {
        if call.root.is_none_or(|root| root == self.place) { bytes } else { 0 }
    }
}

/// One rank's end of a group in some engine. Calls that arrive here are within the group, and of
/// what the engine says it can move.
pub(crate) trait Front: Send + Sync {
    /// Who this is.
    fn member(&self) -> GroupMember<'_>;
    /// The traffic that the rank sent through this end.
    fn traffic(&self) -> &Traffic;
    /// The memory that the engine holds for the group, counted for this rank.
    fn held(&self) -> HeldMemory;
    /// The world's first error, as it is reported to this rank.
    fn error(&self) -> Option<CommError>;
    /// Fails the world, unless it has failed.
    fn fail(&self, error: CommError);

    /// How long operations may be waited for.
    fn timeout(&self) -> &Timeout;

    /// As [`Communicator::keeps_order`].
    fn in_order(&self) -> bool {
        false
    }

    /// The problem with the type or length of a buffer, as an error.
    fn movable(&self, _call: &Signature) -> Result<(), String> {
        Ok(())
    }

    /// The problem with so many bytes for all ranks, as an error.
    fn exchangeable(&self, _bytes: usize) -> Result<(), String> {
        Ok(())
    }

    /// A collective on a buffer in a group of several ranks.
    fn on_buffer(&self, call: Signature, buffer: Tensor<1>) -> Pending<Tensor<1>>;
    /// As [`Communicator::together`], in a group of several ranks.
    fn begin_together(&self, _n: usize) {}
    /// A collective on small data.
    fn on_bytes(&self, call: Signature, bytes: Vec<u8>) -> Pending<AllBytes>;
    /// Sends to a place of the group.
    fn post(&self, to: usize, tag: u64, buffer: Tensor<1>) -> Pending<()>;
    /// Receives what `call` says from a place of the group.
    fn fetch(&self, from: usize, tag: u64, call: Signature) -> Pending<Tensor<1>>;
    /// Waits for all ranks of the group.
    fn meet(&self) -> CommResult<()>;
    /// A sub-group of those with one `color`, ordered by `key`.
    fn part(&self, name: &str, color: usize, key: usize) -> CommResult<Arc<dyn Communicator>>;

    /// The world's first error, where there is one.
    fn healthy(&self) -> CommResult<()> {
        self.error().map_or(Ok(()), Err)
    }

    /// Fails the world where an argument has a problem.
    fn check(&self, operation: Operation, checked: Result<(), String>) -> CommResult<()> {
        let Err(problem) = checked else { return Ok(()) };
        self.healthy()?;
        let member = self.member();
        let error = CommError::Invalid {
            group: member.name.into(),
            rank: member.world_rank,
            operation: operation.to_string(),
            problem,
        };
        self.fail(error.clone());
        Err(error)
    }
}

/// A collective on a buffer, checked and counted.
fn on_buffer<F: Front>(
    front: &F,
    operation: Operation,
    buffer: Tensor<1>,
    root: Option<usize>,
) -> Pending<Tensor<1>> {
    let call = Signature { root, ..Signature::of(operation, &buffer) };
    let member = front.member();
    let checked = checks::collective(&call, member.size).and_then(|()| front.movable(&call));
    if let Err(error) = front.check(operation, checked) {
        return Pending::ready(Err(error));
    }
    let brought = member.brings(&call, bytes_of(&buffer));
    front.traffic().record(operation, member.size, brought);
    if member.size == 1 {
        return Pending::ready(front.healthy().map(|()| buffer));
    }
    front.on_buffer(call, buffer)
}

/// A collective on small data, checked and counted: of it the rank sends `sent` bytes.
fn on_bytes<F: Front>(
    front: &F,
    call: Signature,
    sent: usize,
    bytes: Vec<u8>,
) -> Pending<AllBytes> {
    if let Err(error) = front.check(call.operation, front.exchangeable(bytes.len())) {
        return Pending::ready(Err(error));
    }
    front.traffic().record(call.operation, front.member().size, sent);
    front.on_bytes(call, bytes)
}

/// Whether a message can go to or come from `other`.
fn reaches<F: Front>(front: &F, what: &str, other: usize, call: &Signature) -> CommResult<()> {
    front.healthy()?;
    let checked = checks::rank(what, other, front.member().size);
    front.check(call.operation, checked.and_then(|()| front.movable(call)))
}

impl<F: Front> Communicator for F {
    fn name(&self) -> &str {
        self.member().name
    }

    fn rank(&self) -> usize {
        self.member().place
    }

    fn size(&self) -> usize {
        self.member().size
    }

    fn all_gather(&self, shard: Tensor<1>) -> Pending<Tensor<1>> {
        on_buffer(self, Operation::AllGather, shard, None)
    }

    fn reduce_scatter(&self, full: Tensor<1>) -> Pending<Tensor<1>> {
        on_buffer(self, Operation::ReduceScatter, full, None)
    }

    fn all_reduce(&self, buffer: Tensor<1>) -> Pending<Tensor<1>> {
        on_buffer(self, Operation::AllReduce, buffer, None)
    }

    fn broadcast(&self, root: usize, buffer: Tensor<1>) -> Pending<Tensor<1>> {
        on_buffer(self, Operation::Broadcast, buffer, Some(root))
    }

    fn together(&self, n: usize) {
        if self.member().size > 1 && n > 1 {
            self.begin_together(n);
        }
    }

    fn exchange(&self, bytes: Vec<u8>) -> Pending<AllBytes> {
        on_bytes(self, Signature::bare(Operation::Exchange), bytes.len(), bytes)
    }

    fn gather(&self, root: usize, bytes: Vec<u8>) -> Pending<AllBytes> {
        let member = self.member();
        if let Err(error) = self.check(Operation::Gather, checks::rank("root", root, member.size)) {
            return Pending::ready(Err(error));
        }
        let sent = if root == member.place { 0 } else { bytes.len() };
        on_bytes(self, Signature::gather(root), sent, bytes)
    }

    fn send(&self, to: usize, tag: u64, buffer: Tensor<1>) -> Pending<()> {
        let call = Signature::of(Operation::Send, &buffer);
        if let Err(error) = reaches(self, "receiver", to, &call) {
            return Pending::ready(Err(error));
        }
        self.traffic().record(Operation::Send, self.member().size, bytes_of(&buffer));
        self.post(to, tag, buffer)
    }

    fn recv(&self, from: usize, tag: u64, len: usize, dtype: DType) -> Pending<Tensor<1>> {
        let call = Signature::with(Operation::Recv, dtype, len);
        match reaches(self, "sender", from, &call) {
            Err(error) => Pending::ready(Err(error)),
            Ok(()) => self.fetch(from, tag, call),
        }
    }

    fn keeps_order(&self) -> bool {
        self.in_order()
    }

    fn barrier(&self) -> CommResult<()> {
        self.meet()
    }

    fn split(&self, name: &str, color: usize, key: usize) -> CommResult<Arc<dyn Communicator>> {
        self.part(name, color, key)
    }

    fn abort(&self, reason: &str) {
        let rank = self.member().world_rank;
        self.fail(CommError::Aborted { rank, reason: reason.to_owned() });
    }

    fn failure(&self) -> Option<CommError> {
        self.error()
    }

    fn past_first_step(&self) {
        self.timeout().past_first_step();
    }

    fn stats(&self) -> CommStats {
        self.traffic().snapshot(self.held())
    }
}
