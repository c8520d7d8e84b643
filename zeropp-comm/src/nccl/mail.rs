//! Messages between two ranks of a group, matched by sender and tag in order.
//!
//! NCCL knows no tags: on one communicator the first message sent is the first received. So a
//! envelope goes to the receiver as a message is sent. Once it asks for one, the receiver takes
//! messages off the sender's communicator in the order of the envelopes up to that one; those that
//! have not been asked for yet wait here, and later ones with the sender: there is room only for
//! what is asked for and what must come before it. A receive keeps its [turn](super::turns) until
//! its envelope has come.

use std::sync::Arc;

use super::engine::{NcclEngine, Output, Received, Room, Slot, Wanted};
use crate::CommResult;
use crate::progress::Unmatched;
use crate::signature::Signature;

/// A message that is on its way to this rank, or here.
pub(super) struct IncomingMessage {
    pub(super) signature: Signature,
    pub(super) room: Room,
    /// Complete once NCCL has been asked for it.
    pub(super) issued: Arc<Slot>,
}

/// All messages of this rank that are not matched.
pub(super) type Mail = Unmatched<NcclEngine, IncomingMessage>;

/// Gives a message to the receive that it has met.
pub(super) fn give(wanted: Wanted, message: IncomingMessage) -> CommResult<()> {
    let checked = wanted.check(&message.signature);
    let given = Output::Buffer(Received::Message(message.room, message.issued));
    wanted.slot.put(checked.clone().map(|()| given));
    checked
}
