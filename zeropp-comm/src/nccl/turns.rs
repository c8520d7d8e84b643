//! The order in which a rank comes to its operations on all communicators together.
//!
//! NCCL may let an operation wait until those that were issued before it on other communicators of
//! the device have found their other ends. So a rank issues everything in the order in which its
//! program calls it, and a receive keeps its turn until its letter, which says what to make room
//! for, has come. All ranks' programs have one order between them (`lower::in_issue_order`).

use std::sync::Arc;

use super::driver::NcclDriver;
use super::engine::{Output, Received, Room, Slot};
use super::lane::{Label, LaneError, NcclWork};
use super::library::NcclTransfer;
use super::mail::{IncomingMessage, give};
use super::wire::Route;
use crate::progress::{Envelope, MailAddress};
use zeropp_core::device::hand_over;
use zeropp_failures::Operation;

/// The operation that is this rank's next.
pub(super) enum NextOperation {
    /// The operation of this job, on the communicator of this group and route.
    Issue((u64, Route), u64),
    /// The message of a receive: it and what its sender sent before it become operations once its
    /// letter is here.
    Letter(MailAddress),
}

impl NcclDriver {
    /// Issues operations as far as they are ready, each after all that were called before it.
    pub(super) fn take_turns(&mut self) -> Result<(), LaneError> {
        while let Some(turn) = self.turns.pop_front() {
            let taken = match turn {
                NextOperation::Issue(key, job) => match self.lanes.get_mut(&key) {
                    Some(lane) => lane.issue(job, &mut self.pinned)?,
                    None => true,
                },
                NextOperation::Letter(address) => self.take_wanted(address),
            };
            if !taken {
                self.turns.push_front(turn);
                break;
            }
        }
        Ok(())
    }

    /// The receive whose letter everything here waits for, and where its result goes.
    pub(super) fn awaited_letter(&self) -> Option<(MailAddress, Arc<Slot>)> {
        let Some(NextOperation::Letter(address)) = self.turns.front() else { return None };
        let wanted = self.mail.waiting().find(|wanted| wanted.address == *address)?;
        Some((*address, wanted.slot.clone()))
    }

    /// Letters that are here for receives at `address`.
    pub(super) fn letters(&self, address: &MailAddress) -> usize {
        let announced = self.announced.get(&(address.group, address.from));
        announced.into_iter().flatten().filter(|letter| letter.address == *address).count()
    }

    /// Takes in the messages of a sender up to the one that is wanted at `address`, in the place of
    /// this turn: NCCL gives them in the order in which they were sent. Whether its letter is here,
    /// or was taken in before.
    fn take_wanted(&mut self, address: MailAddress) -> bool {
        if !self.mail.is_wanted(&address) {
            return true;
        }
        let Some(queue) = self.announced.get_mut(&(address.group, address.from)) else {
            return false;
        };
        let Some(last) = queue.iter().position(|envelope| envelope.address == address) else {
            return false;
        };
        let taken: Vec<Envelope> = queue.drain(..=last).collect();
        let later = std::mem::take(&mut self.turns);
        taken.into_iter().for_each(|envelope| self.take_in(envelope));
        self.turns.extend(later);
        true
    }

    /// After this rank has left: takes in messages that will not be asked for, so that their
    /// senders can end, and waits for no envelope.
    pub(super) fn take_the_rest(&mut self) {
        self.turns.retain(|turn| matches!(turn, NextOperation::Issue(..)));
        let rest = std::mem::take(&mut self.announced).into_values().flatten();
        rest.for_each(|envelope| self.take_in(envelope));
    }

    /// Asks NCCL for a message that has been announced. Another thread makes room for it: the
    /// device may let that wait for what is under way there, and this thread ends what is under
    /// way where a rank is lost.
    fn take_in(&mut self, Envelope { address, signature }: Envelope) {
        let MailAddress { group, from, tag } = address;
        let members = self.channels[&group].group.clone();
        let Some((kind, len)) = signature.buffer else { return };
        let (room, issued) = (Room::default(), Arc::new(Slot::default()));
        let (shared, made, empty) = (self.shared.clone(), room.clone(), issued.clone());
        let job = shared.next_job();
        self.rooms.give(move || {
            let tensor = shared.engine.accelerator.room(len, kind);
            let _ = made.set(hand_over(tensor.clone()));
            // Who takes the message has it alone.
            drop(made);
            match len {
                0 => empty.put(Ok(Output::Buffer(Received::Issued(None)))),
                _ => shared.pin_for(job, vec![tensor]),
            }
        });
        if len > 0 {
            let route = Route::Pair { from, to: members.place };
            let (transfer, count) = (NcclTransfer::Recv { from: 0 }, len * kind.size());
            let operation = format!("{}: {}", members.name, Operation::Recv);
            let (label, slot) = (Label { operation, sequence: tag }, issued.clone());
            self.push(group, route, NcclWork { job, transfer, count, label, slot, more: false });
        }
        let met = self.mail.deliver(address, IncomingMessage { signature, room, issued });
        self.settle(met.map_or(Ok(()), |(wanted, message)| give(wanted, message)));
    }

    /// Gives an operation its turn, after all that have been called before it.
    pub(super) fn push(&mut self, group: u64, route: Route, work: NcclWork) {
        let Some((lane, _)) = self.lane(group, route) else { return };
        let job = work.job;
        lane.push(work);
        self.turns.push_back(NextOperation::Issue((group, route), job));
    }
}
