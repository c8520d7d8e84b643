//! The ranks' side of all engines with a communication thread.
//!
//! The communication thread of a rank makes all calls to the engine's library. The rank's other
//! threads hand it [commands](Command) and sleep at a [slot](Slot) until it has left a result
//! there. One that has slept for too long asks it for the cause, which ends the world.
//!
//! An [`Engine`] says how buffers get to its thread and back. What the thread does with them, and
//! the frames between ranks, is the engine's own.

mod communicator;
mod group;
mod mail;
mod request;
mod shared;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Tensor;

pub(super) use communicator::ProgressCommunicator;
pub(super) use group::Group;
pub(super) use mail::{MailAddress, PostedReceive, Unmatched};
pub(super) use request::{Awaited, OpRequest};
pub(super) use shared::{RankLiveness, Shared};
pub(super) use wire::{Envelope, Header, read_error};

use super::signature::Signature;
use super::{AllBytes, CommResult, Pending};

/// How long ranks get to answer when an operation is late.
pub(super) const ANSWER_TIME: Duration = Duration::from_millis(500);

/// Longest time from asking for the cause of a delay to the answer.
pub(super) const INQUEST_MAX: Duration = Duration::from_secs(3);

/// An engine with a communication thread; a value is what its communicators know of it.
pub(super) trait Engine: Sized + Send + Sync + 'static {
    /// The engine's name in errors.
    const NAME: &'static str;
    /// The library's name in errors.
    const LIBRARY: &'static str;
    /// Longest name of a group, in bytes.
    const GROUP_NAME_MAX: usize;
    /// As [`Communicator::keeps_order`](crate::Communicator::keeps_order).
    const IN_ORDER: bool = false;

    /// A buffer on its way into a collective.
    type Buffer: Send;
    /// A buffer on its way to another rank.
    type Payload: Send;
    /// The communication thread's result for a buffer.
    type Received: Send;
    /// A command that only this engine's communication thread knows.
    type Command: Send;

    /// The problem with the type or length of a buffer for a call in a group of `size` ranks.
    fn movable(call: &Signature, size: usize) -> Result<(), String>;

    /// The problem with an exchange in which this rank, of `size`, brings so many bytes.
    fn exchangeable(bytes: usize, size: usize) -> Result<(), String>;

    /// A collective on a buffer in a group of several ranks.
    fn collective(
        front: &ProgressCommunicator<Self>,
        call: Signature,
        buffer: Tensor<1>,
    ) -> Pending<Tensor<1>>;

    /// As [`Communicator::together`](crate::Communicator::together), in a group of several ranks.
    fn together(_shared: &Shared<Self>, _group: u64, _n: usize) {}

    /// Gets a buffer ready to be sent, to this rank itself or to another.
    fn payload(shared: &Shared<Self>, buffer: Tensor<1>, to_itself: bool) -> Self::Payload;

    /// The message that a receive has been given.
    fn open(given: Self::Received, request: &OpRequest<Self>) -> CommResult<Tensor<1>>;

    /// Called before the rank waits for the result of an operation: an engine lets its device begin
    /// what the rank has asked of it so far.
    fn before_wait(_request: &OpRequest<Self>) -> CommResult<()> {
        Ok(())
    }

    /// World ranks that have not taken part so far, as [`InFlight`](super::InFlight) has it.
    fn missing(_claim: &OpRequest<Self>) -> Vec<usize> {
        Vec::new()
    }
}

/// A command to the communication thread.
pub(super) enum Command<E: Engine> {
    /// Join a collective of a group.
    Join(Join<E>),
    /// Send a message to a place of its group.
    Send { to: usize, envelope: Envelope, payload: E::Payload },
    /// Receive a message.
    Receive(PostedReceive<E>),
    /// The operation of this slot has been waited for too long.
    Expired { what: Awaited, slot: Arc<Slot<E>> },
    /// The world failed here.
    Fail,
    /// The last communicator is gone.
    Depart,
    /// The program has nothing more to do, or has reported a failure to its user.
    Finish,
    /// A command that only this engine knows.
    Engine(E::Command),
}

/// A rank's part in a collective.
pub(super) struct Join<E: Engine> {
    pub(super) group: u64,
    pub(super) sequence: u64,
    pub(super) signature: Signature,
    pub(super) input: CollectiveInput<E>,
    pub(super) slot: Arc<Slot<E>>,
}

/// The data that a rank brings to a collective.
pub(super) enum CollectiveInput<E: Engine> {
    /// A flat buffer.
    Buffer(E::Buffer),
    /// Small data.
    Bytes(Vec<u8>),
}

/// The result of an operation for its rank.
pub(super) enum OpOutput<E: Engine> {
    /// A flat buffer.
    Buffer(E::Received),
    /// The bytes that all ranks brought.
    Bytes(AllBytes),
    /// A sub-group that this rank has just become a member of.
    Group(Arc<Group>),
}

impl<E: Engine> OpOutput<E> {
    /// The result of an operation on a buffer.
    pub(super) fn buffer(self) -> E::Received {
        match self {
            OpOutput::Buffer(given) => given,
            _ => unreachable!("an operation on a buffer gives one"),
        }
    }
}

/// The place for one result.
pub(super) type Slot<E> = super::slot::Slot<OpOutput<E>>;

#[cfg(test)]
pub(super) use wire::tests;
