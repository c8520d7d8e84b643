//! Who is to blame for an operation that takes too long.
//!
//! Every rank is asked whether it has called the operation: headers may be on their way through the
//! tree, or stuck below a rank that is late. A rank whose process does not even answer is the
//! likelier cause, wherever it is: those that have not joined may be waiting for it.

use std::sync::Arc;

use crossbeam_channel::Sender;

use super::driver::MpiDriver;
use super::engine::Slot;
use super::timeout::MpiTimeout;
use super::wire::MpiFrame;
use crate::CommError;
use crate::patience::Deadline;
use crate::progress::{ANSWER_TIME, Awaited};

impl MpiDriver {
    /// Asks all ranks whether they are alive.
    pub(super) fn open_attribution(
        &mut self,
        what: Awaited,
        slot: Arc<Slot>,
        answer: Option<Sender<Vec<usize>>>,
    ) {
        if slot.is_done() || self.attribution.is_some() {
            return;
        }
        let size = self.shared.size;
        let mut answered = vec![false; size];
        answered[self.shared.rank] = true;
        let deadline = Deadline::after(ANSWER_TIME);
        let called = answered.clone();
        let question = MpiFrame::Ping(what.group(), what.sequence());
        self.attribution = Some(MpiTimeout { what, slot, answer, deadline, answered, called });
        let me = self.shared.rank;
        self.tell((0..size).filter(|rank| *rank != me), &question);
    }

    /// Ends the attribution once all have answered or had the time to.
    pub(super) fn poll_attribution(&mut self) {
        let Some(attribution) = &self.attribution else { return };
        let all = attribution.answered.iter().all(|answered| *answered);
        if !all && !attribution.deadline.is_over() {
            return;
        }
        let MpiTimeout { what, slot, answer, answered, called, .. } =
            self.attribution.take().expect("looked at above");
        if slot.is_done() {
            return;
        }
        let Some((group, missing)) = self.find_late(what, &slot, &called) else { return };
        let silent: Vec<usize> =
            (0..answered.len()).filter(|rank| !answered[*rank] && !self.departed[*rank]).collect();
        let missing = if silent.is_empty() { missing } else { silent };
        if let Some(answer) = answer {
            // Who asked may have given up.
            let _ = answer.send(missing);
            return;
        }
        let (operation, sequence) = (what.operation(), what.sequence());
        let after_s = self.shared.timeout.get().as_secs_f64();
        let error = CommError::Timeout { group, operation, sequence, after_s, missing };
        self.fail(self.shared.rank, error);
    }

    /// The name of a late operation's group, and world ranks that have not joined it or sent.
    fn find_late(
        &self,
        what: Awaited,
        slot: &Arc<Slot>,
        called: &[bool],
    ) -> Option<(String, Vec<usize>)> {
        match what {
            Awaited::Collective { group, sequence, .. } => {
                let channel = self.channels.get(&group)?;
                let exchange = channel.exchanges.get(&sequence)?;
                exchange.in_progress.as_ref()?;
                let group = &channel.comms.group;
                let not_joined = exchange.not_joined().map(|place| group.members[place]);
                let missing = not_joined.filter(|rank| !called[*rank]).collect();
                Some((group.name.clone(), missing))
            }
            Awaited::Receive(address) => {
                let (wanted, announced) = self.mail.find(address, slot)?;
                let missing = if announced { Vec::new() } else { vec![wanted.sender()] };
                Some((wanted.group.name.clone(), missing))
            }
        }
    }
}
