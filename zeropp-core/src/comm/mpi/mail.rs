//! Messages between two ranks of a group, matched by sender and tag in order.
//!
//! A letter announces each message, with its type and length; a short message is in the letter,
//! a longer one in a transfer of its own, which the receiver posts once letter and receive match.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use burn::tensor::{DType, Device};

use super::collective::{from_bytes, room, unpack};
use super::group::Group;
use super::slot::{Output, Slot};
use super::sys::{Comm, Transfer};
use super::wire::Letter;
use crate::comm::CommError;
use crate::comm::signature::{Operation, Signature};

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
    /// World rank of the sender.
    pub(super) from: usize,
    pub(super) kind: DType,
    pub(super) len: usize,
    pub(super) slot: Arc<Slot>,
}

/// Letters or receives of one address: never both at once.
#[derive(Default)]
struct Lane {
    sent: VecDeque<Letter>,
    wanted: VecDeque<Wanted>,
}

/// A message whose data is on its way.
struct Arriving {
    address: Address,
    transfer: Option<Transfer>,
    wanted: Wanted,
}

/// All messages of this rank that are not complete.
pub(super) struct Mail {
    lanes: HashMap<Address, Lane>,
    arriving: Vec<Arriving>,
    /// Messages sent so far to each world rank.
    numbers: Vec<u32>,
    /// Where messages are to arrive.
    device: Device,
}

/// MPI tag of the data of the sender's message `number`: an MPI library need not have more.
pub(super) fn data_tag(number: u32) -> i32 {
    (number % (1 << 20)) as i32
}

impl Mail {
    pub(super) fn new(world_size: usize, device: Device) -> Mail {
        let (lanes, arriving) = (HashMap::new(), Vec::new());
        Mail { lanes, arriving, numbers: vec![0; world_size], device }
    }

    /// Whether a receive is under way.
    pub(super) fn is_busy(&self) -> bool {
        !self.arriving.is_empty() || self.lanes.values().any(|lane| !lane.wanted.is_empty())
    }

    /// The letter for a message to world rank `to`.
    pub(super) fn letter(
        &mut self,
        to: usize,
        address: Address,
        signature: Signature,
        inline: Option<Vec<u8>>,
    ) -> Letter {
        let number = self.numbers[to];
        self.numbers[to] = number.wrapping_add(1);
        let Address { group, from, tag } = address;
        Letter { group, from, tag, signature, number, inline }
    }

    /// Takes a letter from world rank `from` to the receive that has waited longest.
    pub(super) fn deliver(
        &mut self,
        data: Comm,
        from: usize,
        letter: Letter,
    ) -> Result<(), CommError> {
        let address = Address { group: letter.group, from: letter.from, tag: letter.tag };
        let lane = self.lanes.entry(address).or_default();
        let Some(wanted) = lane.wanted.pop_front() else {
            lane.sent.push_back(letter);
            return Ok(());
        };
        self.forget_empty(address);
        debug_assert_eq!(wanted.from, from);
        self.open(data, address, letter, wanted)
    }

    /// Takes the oldest letter for a receive, or lets it wait.
    pub(super) fn want(
        &mut self,
        data: Comm,
        address: Address,
        wanted: Wanted,
    ) -> Result<(), CommError> {
        let lane = self.lanes.entry(address).or_default();
        let Some(letter) = lane.sent.pop_front() else {
            lane.wanted.push_back(wanted);
            return Ok(());
        };
        self.forget_empty(address);
        self.open(data, address, letter, wanted)
    }

    fn forget_empty(&mut self, address: Address) {
        if self.lanes.get(&address).is_some_and(|l| l.sent.is_empty() && l.wanted.is_empty()) {
            self.lanes.remove(&address);
        }
    }

    fn open(
        &mut self,
        data: Comm,
        address: Address,
        letter: Letter,
        wanted: Wanted,
    ) -> Result<(), CommError> {
        let Wanted { ref group, from, kind, len, .. } = wanted;
        let mut transfer = None;
        let result = if letter.signature.buffer != Some((kind, len)) {
            Err(CommError::Mismatch {
                group: group.name.clone(),
                sequence: address.tag,
                rank: group.members[group.place],
                mine: Signature::with(Operation::Recv, kind, len).to_string(),
                peer: from,
                theirs: letter.signature.to_string(),
            })
        } else if let Some(bytes) = letter.inline {
            wanted.slot.put(Ok(Output::Buffer(from_bytes(bytes, kind, &self.device))));
            return Ok(());
        } else {
            let target = room(group, kind, len);
            let posted = Transfer::receive(data, Some(from), data_tag(letter.number), target, kind);
            posted.map(|posted| transfer = Some(posted)).map_err(|e| {
                e.in_operation(format!("{}: {} from rank {from}", group.name, Operation::Recv))
            })
        };
        // Also where it failed, so that the failure reaches who waits for it.
        self.arriving.push(Arriving { address, transfer, wanted });
        result
    }

    /// Completes messages that have arrived. Whether there were any.
    pub(super) fn poll(&mut self) -> Result<bool, CommError> {
        let mut moved = false;
        let mut i = 0;
        while i < self.arriving.len() {
            let Arriving { transfer, wanted, .. } = &mut self.arriving[i];
            let done = transfer.as_mut().map_or(Ok(false), Transfer::test).map_err(|e| {
                let from = wanted.from;
                e.in_operation(format!("{}: recv from rank {from}", wanted.group.name))
            })?;
            if !done {
                i += 1;
                continue;
            }
            let Arriving { transfer, wanted, .. } = self.arriving.swap_remove(i);
            let (_, target) = transfer.expect("tested above").into_memory();
            let target = target.expect("a receive has a target");
            let tensor = unpack(&wanted.group, target, wanted.kind, &self.device);
            wanted.slot.put(Ok(Output::Buffer(tensor)));
            moved = true;
        }
        Ok(moved)
    }

    /// The group of a receive from world rank `rank` that someone waits for.
    pub(super) fn waits_for(&self, rank: usize) -> Option<Arc<Group>> {
        let wanted = self.lanes.values().flat_map(|lane| &lane.wanted);
        // A receive that only this thread still knows has nobody waiting.
        let mut waited = wanted.filter(|w| w.from == rank && Arc::strong_count(&w.slot) > 1);
        waited.next().map(|w| w.group.clone())
    }

    /// The group and sender (a world rank) of the receive at `address` that `slot` waits for, and
    /// whether its letter has come.
    pub(super) fn find(&self, address: Address, slot: &Arc<Slot>) -> Option<(&Wanted, bool)> {
        let lane = self.lanes.get(&address).into_iter().flat_map(|lane| &lane.wanted);
        let arriving = self.arriving.iter().filter(|a| a.address == address).map(|a| &a.wanted);
        let all = lane.map(|w| (w, false)).chain(arriving.map(|w| (w, true)));
        all.into_iter().find(|(wanted, _)| Arc::ptr_eq(&wanted.slot, slot))
    }

    /// Ends every receive with the world's error.
    pub(super) fn fail(&mut self, error: &CommError) {
        let lanes = std::mem::take(&mut self.lanes);
        let waiting = lanes.into_values().flat_map(|lane| lane.wanted);
        let arriving = std::mem::take(&mut self.arriving).into_iter().map(|a| a.wanted);
        waiting.chain(arriving).for_each(|wanted| wanted.slot.fail(error.clone()));
    }
}
