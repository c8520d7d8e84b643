//! Who is to blame for an operation that takes too long.
//!
//! Ranks that have not joined are known from their headers. A rank whose process does not even
//! answer is the likelier cause, wherever it is: those that have not joined may be waiting for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;

use super::driver::{Driver, Late};
use super::slot::Slot;
use super::wire::Frame;
use crate::comm::CommError;
use crate::comm::signature::Operation;

/// How long ranks get to answer.
const ANSWER_TIME: Duration = Duration::from_millis(500);

/// Longest time from asking for the cause of a delay to the answer.
pub(super) const INQUEST_MAX: Duration = Duration::from_secs(3);

/// One late operation, and who has answered since.
pub(super) struct Inquest {
    what: Late,
    slot: Arc<Slot>,
    /// Who only wants to know the missing ranks.
    answer: Option<Sender<Vec<usize>>>,
    deadline: Instant,
    pub(super) answered: Vec<bool>,
}

/// The late operation in words: group, operation, number, and world ranks that have not joined.
type Found = (String, String, u64, Vec<usize>);

impl Driver {
    /// Asks all ranks whether they are alive.
    pub(super) fn open_inquest(
        &mut self,
        what: Late,
        slot: Arc<Slot>,
        answer: Option<Sender<Vec<usize>>>,
    ) {
        if slot.is_done() || self.inquest.is_some() {
            return;
        }
        let size = self.shared.size;
        let mut answered = vec![false; size];
        answered[self.shared.rank] = true;
        let deadline = Instant::now() + ANSWER_TIME;
        self.inquest = Some(Inquest { what, slot, answer, deadline, answered });
        let me = self.shared.rank;
        self.tell((0..size).filter(|rank| *rank != me), &Frame::Ping);
    }

    /// Ends the inquest once all have answered or had the time to.
    pub(super) fn poll_inquest(&mut self) {
        let Some(inquest) = &self.inquest else { return };
        let all = inquest.answered.iter().all(|answered| *answered);
        if !all && Instant::now() < inquest.deadline {
            return;
        }
        let Inquest { what, slot, answer, answered, .. } =
            self.inquest.take().expect("looked at above");
        if slot.is_done() {
            return;
        }
        let Some((group, operation, sequence, missing)) = self.find_late(what, &slot) else {
            return;
        };
        let silent: Vec<usize> =
            (0..answered.len()).filter(|rank| !answered[*rank] && !self.departed[*rank]).collect();
        let missing = if silent.is_empty() { missing } else { silent };
        if let Some(answer) = answer {
            // Who asked may have given up.
            let _ = answer.send(missing);
            return;
        }
        let after_s = self.shared.options.timeout.as_secs_f64();
        let error = CommError::Timeout { group, operation, sequence, after_s, missing };
        self.fail(self.shared.rank, error);
    }

    fn find_late(&self, what: Late, slot: &Arc<Slot>) -> Option<Found> {
        match what {
            Late::Collective { group, sequence } => {
                let channel = self.channels.get(&group)?;
                let meeting = channel.meetings.get(&sequence)?;
                let signature = meeting.flight.as_ref()?.signature;
                let group = &channel.group;
                let missing = meeting.missing().iter().map(|p| group.members[*p]).collect();
                Some((group.name.clone(), signature.to_string(), sequence, missing))
            }
            Late::Receive(address) => {
                let (wanted, announced) = self.mail.find(address, slot)?;
                let missing = if announced { Vec::new() } else { vec![wanted.from] };
                let operation = Operation::Recv.to_string();
                Some((wanted.group.name.clone(), operation, address.tag, missing))
            }
        }
    }
}
