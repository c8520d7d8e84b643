//! Messages between two ranks of a group, matched by sender, receiver and tag in order.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use burn::tensor::Tensor;

use super::group::ThreadsGroup;
use super::result_slots::ResultSlots;
use crate::signature::{Operation, Signature, bytes_of};
use crate::{CommError, CommResult};

/// Sender and receiver (places in the group), and the tag.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct MessageAddress {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) tag: u64,
}

/// All messages of one group that are not matched yet.
#[derive(Default)]
pub(super) struct Mail {
    lanes: HashMap<MessageAddress, MailQueue>,
    /// By receiver: bytes of messages that have not been asked for, and the most of them so far.
    early: HashMap<usize, [u64; 2]>,
}

/// Messages of one address: never both kinds at once.
#[derive(Default)]
struct MailQueue {
    sent: VecDeque<Tensor<1>>,
    wanted: VecDeque<Arc<Receive>>,
}

/// A receive that waits for its message.
pub(super) struct Receive {
    pub(super) address: MessageAddress,
    expected: Signature,
    pub(super) slot: ResultSlots<Tensor<1>>,
}

/// The message that a receive found.
pub(super) enum ReceiveOutcome {
    /// Its message was there.
    Message(Tensor<1>),
    /// It waits.
    Waiting(Arc<Receive>),
}

impl Mail {
    /// Largest bytes so far of messages to the rank at `to` that it had not asked for.
    pub(super) fn early_bytes(&self, to: usize) -> u64 {
        self.early.get(&to).map_or(0, |[_, most]| *most)
    }

    /// Wakes every waiting receiver.
    pub(super) fn wake_all(&self) {
        for receive in self.lanes.values().flat_map(|lane| &lane.wanted) {
            receive.slot.wake_all();
        }
    }

    /// Whether someone waits for a message from the rank at `from`.
    pub(super) fn waits_for(&self, from: usize) -> bool {
        let lanes = self.lanes.iter().filter(|(address, _)| address.from == from);
        // A receive that only the lane holds has no waiter.
        lanes.flat_map(|(_, lane)| &lane.wanted).any(|receive| Arc::strong_count(receive) > 1)
    }

    /// Gives `message` to the receive that has waited longest, or keeps it for one to come.
    fn post(
        &mut self,
        address: MessageAddress,
        message: Tensor<1>,
    ) -> Option<(Arc<Receive>, Tensor<1>)> {
        let lane = self.lanes.entry(address).or_default();
        let Some(receive) = lane.wanted.pop_front() else {
            let [now, most] = self.early.entry(address.to).or_default();
            *now += bytes_of(&message) as u64;
            *most = (*most).max(*now);
            lane.sent.push_back(message);
            return None;
        };
        self.forget_empty(address);
        Some((receive, message))
    }

    /// Takes the oldest message, or waits for one.
    fn want(&mut self, address: MessageAddress, expected: Signature) -> ReceiveOutcome {
        let lane = self.lanes.entry(address).or_default();
        if let Some(message) = lane.sent.pop_front() {
            if let Some([now, _]) = self.early.get_mut(&address.to) {
                *now -= bytes_of(&message) as u64;
            }
            self.forget_empty(address);
            return ReceiveOutcome::Message(message);
        }
        let receive = Arc::new(Receive { address, expected, slot: ResultSlots::new(1) });
        lane.wanted.push_back(receive.clone());
        ReceiveOutcome::Waiting(receive)
    }

    fn forget_empty(&mut self, address: MessageAddress) {
        if self.lanes.get(&address).is_some_and(|l| l.sent.is_empty() && l.wanted.is_empty()) {
            self.lanes.remove(&address);
        }
    }
}

/// Sends `message`: the tensor is handed over, nothing is copied.
pub(super) fn send(
    group: &ThreadsGroup,
    address: MessageAddress,
    message: Tensor<1>,
) -> CommResult<()> {
    let matched = group.mail.lock().post(address, message);
    if let Some((receive, message)) = matched {
        if let Err(error) = check(group, address, receive.expected, &message) {
            // It is in no lane any more, so the world's failure did not wake it.
            receive.slot.wake_all();
            return Err(error);
        }
        receive.slot.put([message]);
    }
    Ok(())
}

/// Receives a message whose type and length are `expected`.
pub(super) fn recv(
    group: &ThreadsGroup,
    address: MessageAddress,
    expected: Signature,
) -> CommResult<ReceiveOutcome> {
    let found = group.mail.lock().want(address, expected);
    match &found {
        ReceiveOutcome::Message(message) => check(group, address, expected, message)?,
        ReceiveOutcome::Waiting(receive) => {
            let sender = group.members[address.from];
            // It may have sent the message since, and left.
            if group.world.has_departed(sender) && !receive.slot.has(0) {
                return group.lost(address.to, sender, Operation::Recv.to_string());
            }
        }
    }
    Ok(found)
}

/// Fails the world where the receiver did not expect what the sender sent.
fn check(
    group: &ThreadsGroup,
    address: MessageAddress,
    expected: Signature,
    message: &Tensor<1>,
) -> CommResult<()> {
    let sent = Signature::of(Operation::Send, message);
    if sent.buffer == expected.buffer {
        return Ok(());
    }
    let error = CommError::Mismatch {
        group: group.name.clone(),
        sequence: address.tag,
        rank: group.members[address.to],
        mine: expected.to_string(),
        peer: group.members[address.from],
        theirs: sent.to_string(),
    };
    group.fail(address.to, error)
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use zeropp_core::cpu_tensor::from_vec;

    use crate::threads::{ThreadsOptions, ThreadsWorld};

    #[test]
    fn messages_without_a_receive_yet_are_counted_by_their_receiver() {
        let ranks = ThreadsWorld::new(2, ThreadsOptions::default()).communicators();
        let early = |rank: usize| ranks[rank].stats().early_bytes;
        let recv = |tag| ranks[1].recv(0, tag, 8, DType::F32);
        let first = recv(7);
        for tag in [7, 8, 9] {
            ranks[0].send(1, tag, from_vec(vec![1.0; 8], [8])).wait().unwrap();
        }
        first.wait().unwrap();
        assert_eq!((early(0), early(1)), (0, 64), "the first one was asked for");
        for tag in [8, 9] {
            recv(tag).wait().unwrap();
        }
        ranks[0].send(1, 7, from_vec(vec![1.0; 8], [8])).wait().unwrap();
        assert_eq!(early(1), 64, "two at one time are the most");
    }

    #[test]
    fn idle_buffers_are_counted_once_for_all_ranks_that_share_them() {
        let ranks = ThreadsWorld::new(2, ThreadsOptions::default()).communicators();
        let idle = || [0, 1].map(|rank: usize| ranks[rank].stats().idle_bytes);
        let all = ranks.iter().map(|rank| rank.all_gather(from_vec(vec![1.0; 8], [8])));
        let all: Vec<_> = all.collect();
        let results: Vec<_> = all.into_iter().map(|pending| pending.wait().unwrap()).collect();
        let used = idle();
        drop(results);
        let [first, second] = idle();
        assert!(first >= used[0] + 64 && (used[1], second) == (0, 0), "{used:?}, {first}");
    }
}
