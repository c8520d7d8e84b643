//! Messages between two ranks of a group, matched by sender and tag in order.
//!
//! NCCL knows no tags: on one communicator the first message sent is the first received. So a
//! letter goes to the receiver as a message is sent, and the receiver takes messages off the
//! sender's communicator in the order of the letters, wanted or not: one that nobody has asked for
//! yet waits here. Neither side's order of calls can lock the other up.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use burn::tensor::Tensor;

use super::shared::{Group, Output, Slot};
use crate::comm::CommError;
use crate::comm::signature::Signature;

/// Group, sender's place in it, and tag.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Address {
    pub(super) group: u64,
    pub(super) from: usize,
    pub(super) tag: u64,
}

/// A receive that waits for its letter.
pub(super) struct Wanted {
    pub(super) group: Arc<Group>,
    pub(super) signature: Signature,
    pub(super) slot: Arc<Slot>,
}

/// A message that is on its way to this rank, or here.
pub(super) struct Message {
    pub(super) signature: Signature,
    pub(super) tensor: Tensor<1>,
    /// Complete once NCCL has been asked for it.
    pub(super) issued: Arc<Slot>,
}

/// Messages or receives of one address: never both at once.
#[derive(Default)]
struct Pigeonhole {
    sent: VecDeque<Message>,
    wanted: VecDeque<Wanted>,
}

/// All messages of this rank that are not matched.
#[derive(Default)]
pub(super) struct Mail(HashMap<Address, Pigeonhole>);

impl Mail {
    /// Takes a message to the receive that has waited longest, or keeps it for one to come.
    pub(super) fn deliver(&mut self, address: Address, message: Message) -> Result<(), CommError> {
        let place = self.0.entry(address).or_default();
        let Some(wanted) = place.wanted.pop_front() else {
            place.sent.push_back(message);
            return Ok(());
        };
        self.forget_empty(address);
        hand_over(address, wanted, message)
    }

    /// Takes the oldest message to a receive, or lets it wait.
    pub(super) fn want(&mut self, address: Address, wanted: Wanted) -> Result<(), CommError> {
        let place = self.0.entry(address).or_default();
        let Some(message) = place.sent.pop_front() else {
            place.wanted.push_back(wanted);
            return Ok(());
        };
        self.forget_empty(address);
        hand_over(address, wanted, message)
    }

    fn forget_empty(&mut self, address: Address) {
        if self.0.get(&address).is_some_and(|b| b.sent.is_empty() && b.wanted.is_empty()) {
            self.0.remove(&address);
        }
    }

    /// The group of a receive from world rank `rank` that someone waits for.
    pub(super) fn waits_for(&self, rank: usize) -> Option<Arc<Group>> {
        let all = self.0.iter().flat_map(|(a, b)| b.wanted.iter().map(move |w| (a.from, w)));
        // A receive that only this thread still knows has nobody waiting.
        let mut waited = all
            .filter(|(from, w)| w.group.members[*from] == rank && Arc::strong_count(&w.slot) > 1);
        waited.next().map(|(_, w)| w.group.clone())
    }

    /// Whether `slot` belongs to a receive whose letter has not come.
    pub(super) fn is_waiting(&self, address: Address, slot: &Arc<Slot>) -> bool {
        let wanted = self.0.get(&address).into_iter().flat_map(|place| &place.wanted);
        wanted.into_iter().any(|wanted| Arc::ptr_eq(&wanted.slot, slot))
    }

    /// Ends every receive with the world's error, and forgets every message.
    pub(super) fn fail(&mut self, error: &CommError) {
        let all = std::mem::take(&mut self.0).into_values();
        all.flat_map(|place| place.wanted).for_each(|wanted| wanted.slot.fail(error.clone()));
    }
}

fn hand_over(address: Address, wanted: Wanted, message: Message) -> Result<(), CommError> {
    if wanted.signature.buffer == message.signature.buffer {
        wanted.slot.put(Ok(Output::Message(message.tensor, message.issued)));
        return Ok(());
    }
    let group = &wanted.group;
    let error = CommError::Mismatch {
        group: group.name.clone(),
        sequence: address.tag,
        rank: group.members[group.place],
        mine: wanted.signature.to_string(),
        peer: group.members[address.from],
        theirs: message.signature.to_string(),
    };
    wanted.slot.fail(error.clone());
    Err(error)
}
