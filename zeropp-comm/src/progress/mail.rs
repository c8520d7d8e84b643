//! Messages between two ranks of a group, matched by sender and tag in order.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::{Engine, Group, Slot};
use crate::signature::Signature;
use crate::{CommError, CommResult};

/// Group, sender's place in it, and tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MailAddress {
    pub(crate) group: u64,
    pub(crate) from: usize,
    pub(crate) tag: u64,
}

/// A receive that waits for its message.
pub(crate) struct PostedReceive<E: Engine> {
    pub(crate) address: MailAddress,
    pub(crate) group: Arc<Group>,
    pub(crate) signature: Signature,
    pub(crate) slot: Arc<Slot<E>>,
}

impl<E: Engine> PostedReceive<E> {
    /// World rank of the sender.
    pub(crate) fn sender(&self) -> usize {
        self.group.members[self.address.from]
    }

    /// Compares with what was sent.
    pub(crate) fn check(&self, sent: &Signature) -> CommResult<()> {
        if self.signature.buffer == sent.buffer {
            return Ok(());
        }
        let (place, peer) = (self.group.place, self.address.from);
        Err(self.group.mismatch(self.address.tag, place, self.signature, peer, sent))
    }
}

/// Messages or receives of one address: never both at once.
struct Pigeonhole<E: Engine, M> {
    sent: VecDeque<M>,
    wanted: VecDeque<PostedReceive<E>>,
}

impl<E: Engine, M> Default for Pigeonhole<E, M> {
    fn default() -> Self {
        Self { sent: VecDeque::new(), wanted: VecDeque::new() }
    }
}

/// All messages to this rank, and receives, that have not found each other.
pub(crate) struct Unmatched<E: Engine, M>(HashMap<MailAddress, Pigeonhole<E, M>>);

impl<E: Engine, M> Default for Unmatched<E, M> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<E: Engine, M> Unmatched<E, M> {
    /// Takes a message to the receive that has waited longest, or keeps it for one to come.
    pub(crate) fn deliver(
        &mut self,
        address: MailAddress,
        message: M,
    ) -> Option<(PostedReceive<E>, M)> {
        let hole = self.0.entry(address).or_default();
        let Some(wanted) = hole.wanted.pop_front() else {
            hole.sent.push_back(message);
            return None;
        };
        self.forget_empty(address);
        Some((wanted, message))
    }

    /// Takes the oldest message to a receive, or lets it wait.
    pub(crate) fn want(&mut self, wanted: PostedReceive<E>) -> Option<(PostedReceive<E>, M)> {
        let address = wanted.address;
        let hole = self.0.entry(address).or_default();
        let Some(message) = hole.sent.pop_front() else {
            hole.wanted.push_back(wanted);
            return None;
        };
        self.forget_empty(address);
        Some((wanted, message))
    }

    fn forget_empty(&mut self, address: MailAddress) {
        if self.0.get(&address).is_some_and(|h| h.sent.is_empty() && h.wanted.is_empty()) {
            self.0.remove(&address);
        }
    }

    /// Whether a receive at `address` waits for its message.
    pub(crate) fn is_wanted(&self, address: &MailAddress) -> bool {
        self.0.get(address).is_some_and(|hole| !hole.wanted.is_empty())
    }

    /// Receives whose messages have not come.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = &PostedReceive<E>> {
        self.0.values().flat_map(|hole| &hole.wanted)
    }

    /// The group of a receive from world rank `rank` that someone waits for, where no more than
    /// `announced` messages of its address are known to come.
    pub(crate) fn waits_for(
        &self,
        rank: usize,
        announced: impl Fn(&MailAddress) -> usize,
    ) -> Option<Arc<Group>> {
        self.0.iter().find_map(|(address, hole)| {
            let mut missing = hole.wanted.iter().skip(announced(address));
            // A receive that only this thread still knows has no waiter.
            let waits =
                |w: &&PostedReceive<E>| w.sender() == rank && Arc::strong_count(&w.slot) > 1;
            missing.find(waits).map(|wanted| wanted.group.clone())
        })
    }

    /// The receive that `slot` belongs to, if its message has not come.
    pub(crate) fn find(
        &self,
        address: MailAddress,
        slot: &Arc<Slot<E>>,
    ) -> Option<&PostedReceive<E>> {
        let wanted = &self.0.get(&address)?.wanted;
        wanted.iter().find(|wanted| Arc::ptr_eq(&wanted.slot, slot))
    }

    /// Ends every receive with the world's error, and forgets every message.
    pub(crate) fn fail(&mut self, error: &CommError) {
        let all = std::mem::take(&mut self.0).into_values();
        all.flat_map(|hole| hole.wanted).for_each(|wanted| wanted.slot.fail(error.clone()));
    }
}
