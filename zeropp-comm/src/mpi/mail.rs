//! Messages between two ranks of a group, matched by sender and tag in order.
//!
//! A envelope announces each message, with its type and length; a short message is in the envelope,
//! a longer one in a transfer of its own, which the receiver posts once envelope and receive match.

use std::sync::Arc;

use burn::tensor::Device;

use super::engine::{MpiEngine, Output, Slot, Wanted};
use super::payload::{from_bytes, room, unpack};
use super::sys::{Comm, Transfer};
use super::wire::Carriage;
use crate::CommError;
use crate::progress::{Envelope, Group, MailAddress, Unmatched};
use crate::signature::{Operation, Signature};

/// A message that a envelope has announced.
struct AnnouncedMessage {
    signature: Signature,
    carriage: Carriage,
}

/// A message whose data is on its way.
struct Arriving {
    transfer: Option<Transfer>,
    wanted: Wanted,
}

/// All messages of this rank that are not complete.
pub(super) struct MpiMail {
    unmatched: Unmatched<MpiEngine, AnnouncedMessage>,
    arriving: Vec<Arriving>,
    /// Transfers to each world rank so far.
    numbers: Vec<u32>,
    /// Where messages are to arrive.
    device: Device,
}

/// MPI tag of the sender's transfer `number`: an MPI library need not have more.
pub(super) fn data_tag(number: u32) -> i32 {
    (number % (1 << 20)) as i32
}

impl MpiMail {
    pub(super) fn new(world_size: usize, device: Device) -> MpiMail {
        let (unmatched, arriving) = (Unmatched::default(), Vec::new());
        MpiMail { unmatched, arriving, numbers: vec![0; world_size], device }
    }

    /// Whether the data of a message is on its way.
    pub(super) fn is_moving(&self) -> bool {
        !self.arriving.is_empty()
    }

    /// A number for the next transfer to world rank `to`.
    pub(super) fn next_number(&mut self, to: usize) -> u32 {
        let number = self.numbers[to];
        self.numbers[to] = number.wrapping_add(1);
        number
    }

    /// Takes a envelope to the receive that has waited longest.
    pub(super) fn deliver(
        &mut self,
        data: Comm,
        envelope: Envelope,
        carriage: Carriage,
    ) -> Result<(), CommError> {
        let message = AnnouncedMessage { signature: envelope.signature, carriage };
        let met = self.unmatched.deliver(envelope.address, message);
        met.map_or(Ok(()), |(wanted, message)| self.open(data, wanted, message))
    }

    /// Takes the oldest envelope for a receive, or lets it wait.
    pub(super) fn want(&mut self, data: Comm, wanted: Wanted) -> Result<(), CommError> {
        let met = self.unmatched.want(wanted);
        met.map_or(Ok(()), |(wanted, message)| self.open(data, wanted, message))
    }

    fn open(
        &mut self,
        data: Comm,
        wanted: Wanted,
        message: AnnouncedMessage,
    ) -> Result<(), CommError> {
        let AnnouncedMessage { signature, carriage } = message;
        let mut transfer = None;
        let mut result = wanted.check(&signature);
        if result.is_ok() {
            let (kind, len) = signature.buffer.expect("a message is a buffer");
            let number = match carriage {
                Carriage::Transfer(number) => number,
                Carriage::Inline(bytes) => {
                    let tensor = from_bytes(bytes, kind, &self.device);
                    wanted.slot.put(Ok(Output::Buffer(tensor)));
                    return Ok(());
                }
            };
            let (from, target) = (Some(wanted.sender()), room(&wanted.group, kind, len));
            match Transfer::receive(data, from, data_tag(number), target, kind) {
                Ok(posted) => transfer = Some(posted),
                Err(error) => result = Err(error.in_operation(receiving(&wanted))),
            }
        }
        // Also where it failed, so that the failure reaches who waits for it.
        self.arriving.push(Arriving { transfer, wanted });
        result
    }

    /// Completes messages that have arrived. Whether there were any.
    pub(super) fn poll(&mut self) -> Result<bool, CommError> {
        let mut moved = false;
        let mut i = 0;
        while i < self.arriving.len() {
            let Arriving { transfer, wanted, .. } = &mut self.arriving[i];
            let done = transfer.as_mut().map_or(Ok(false), Transfer::test);
            let done = done.map_err(|error| error.in_operation(receiving(wanted)))?;
            if !done {
                i += 1;
                continue;
            }
            let Arriving { transfer, wanted, .. } = self.arriving.swap_remove(i);
            let (_, target) = transfer.expect("tested above").into_memory();
            let target = target.expect("a receive has a target");
            let (kind, _) = wanted.signature.buffer.expect("a message is a buffer");
            let tensor = unpack(&wanted.group, target, kind, &self.device);
            wanted.slot.put(Ok(Output::Buffer(tensor)));
            moved = true;
        }
        Ok(moved)
    }

    /// The group of a receive from world rank `rank` whose envelope someone waits for.
    pub(super) fn waits_for(&self, rank: usize) -> Option<Arc<Group>> {
        self.unmatched.waits_for(rank, |_| 0)
    }

    /// The receive at `address` that `slot` waits for, and whether its envelope has come.
    pub(super) fn find(&self, address: MailAddress, slot: &Arc<Slot>) -> Option<(&Wanted, bool)> {
        let waiting = self.unmatched.find(address, slot).map(|wanted| (wanted, false));
        waiting.or_else(|| {
            let mut arriving = self.arriving.iter().map(|arriving| (&arriving.wanted, true));
            arriving.find(|(wanted, _)| Arc::ptr_eq(&wanted.slot, slot))
        })
    }

    /// Ends every receive with the world's error.
    pub(super) fn fail(&mut self, error: &CommError) {
        self.unmatched.fail(error);
        self.arriving.drain(..).for_each(|arriving| arriving.wanted.slot.fail(error.clone()));
    }
}

/// A receive in words.
fn receiving(wanted: &Wanted) -> String {
    format!("{}: {} from rank {}", wanted.group.name, Operation::Recv, wanted.sender())
}
