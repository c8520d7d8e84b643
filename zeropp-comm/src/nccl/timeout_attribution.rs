//! How a world fails: which ranks are informed of what, and which rank is to blame for an operation
//! that takes too long.
//!
//! While all goes well no rank counts for the others. A rank whose operation is late asks the other
//! ranks of the group how many collectives they have called, and how many have begun on their
//! devices: who is behind is missing. A rank whose process does not even answer is the likelier
//! cause, wherever it is.

use std::collections::HashMap;
use std::sync::Arc;

use super::driver::{NcclDriver, Suspicion};
use super::engine::Slot;
use super::lane::LateOperation;
use super::library::abort;
use super::wire::{NcclFrame, Route};
use crate::CommError;
use crate::patience::{Deadline, Moment};
use crate::progress::{ANSWER_TIME, Awaited};
use zeropp_failures::Operation;

/// Which operation is late.
pub(super) enum Late {
    /// One that has not been issued, or whose result has not come.
    Call(Awaited),
    /// An operation on the device.
    InProgress { group: u64, route: Route, late: LateOperation },
}

/// One late operation, and what the others have said about it: collectives called and begun.
pub(super) struct TimeoutAttribution {
    what: Late,
    slot: Option<Arc<Slot>>,
    deadline: Deadline,
    asked: Vec<usize>,
    answers: HashMap<usize, (u64, u64)>,
}

impl Late {
    fn group(&self) -> u64 {
        match self {
            Late::Call(what) => what.group(),
            Late::InProgress { group, .. } => *group,
        }
    }
}

impl NcclDriver {
    /// The world's error.
    pub(super) fn error(&self) -> CommError {
        self.shared.error().expect("the world has failed")
    }

    /// Fails the world where `result` is an error.
    pub(super) fn settle(&mut self, result: Result<(), CommError>) {
        if let Err(error) = result {
            self.fail(self.shared.rank, error);
        }
    }

    /// Fails the world with what world rank `rank` saw, unless it has failed before.
    pub(super) fn fail(&mut self, rank: usize, error: CommError) {
        self.shared.set_failure(rank, error);
        self.spread();
    }

    /// Ends every operation here with the world's first error, and reports it to the other ranks.
    pub(super) fn spread(&mut self) {
        if self.failed_at.is_some() {
            return;
        }
        self.failed_at = Some(Moment::now());
        let error = self.error();
        for channel in self.channels.values_mut() {
            channel.exchanges.clear();
            for (_, (_, slot)) in std::mem::take(&mut channel.waiting) {
                slot.fail(error.clone());
            }
        }
        self.mail.fail(&error);
        self.turns.clear();
        self.attribution = None;
        self.suspicion = None;
        self.report_known(&self.failure());
        // Last, for it may take a while: NCCL waits until its kernels have stopped.
        let lanes = self.lanes.values_mut();
        abort(lanes.filter_map(|lane| lane.end(|slot| slot.fail(error.clone()))).collect());
    }

    fn failure(&self) -> NcclFrame {
        let (rank, error) = self.shared.failure().expect("the world has failed");
        NcclFrame::Failure(*rank, serde_json::to_vec(error).expect("plain data"))
    }

    /// Fails the world in a moment because a rank cannot be reached.
    pub(super) fn unreachable(&mut self, rank: usize, why: &str) {
        if self.is_missed(rank) {
            let (group, operation) = ("world".into(), format!("the run ({why})"));
            self.suspect(Some(rank), CommError::PeerLost { group, rank, operation });
        }
    }

    /// Fails the world with an error in a moment, unless who is to blame says why before.
    pub(super) fn suspect(&mut self, rank: Option<usize>, error: CommError) {
        let fresh = || Suspicion { since: Moment::now(), error, rank };
        self.suspicion.get_or_insert_with(fresh);
    }

    /// Whether the end of a rank is news.
    fn is_missed(&self, rank: usize) -> bool {
        !self.departed[rank] && self.failed_at.is_none() && !self.departed[self.shared.rank]
    }

    /// Sends a frame to all ranks that this one sends to or receives from, and to rank 0.
    pub(super) fn report_known(&mut self, frame: &NcclFrame) {
        let me = self.shared.rank;
        let mut ranks = self.links.known();
        ranks.push(0);
        ranks.dedup();
        for rank in ranks.into_iter().filter(|rank| *rank != me) {
            if !self.departed[rank] {
                self.links.send(rank, frame);
            }
        }
    }

    /// Fails the world because a rank's connection ended, unless it said that it would.
    pub(super) fn gone(&mut self, rank: usize, why: String) {
        if !self.is_missed(rank) {
            return;
        }
        self.departed[rank] = true;
        self.lost(rank);
        if self.failed_at.is_none() {
            let operation = format!("the run ({why})");
            let error = CommError::PeerLost { group: "world".into(), rank, operation };
            self.fail(self.shared.rank, error);
        }
    }

    /// Fails the world if something waits for world rank `rank`, which has departed.
    pub(super) fn lost(&mut self, rank: usize) {
        let stuck = self.channels.values().find_map(|channel| {
            let group = &channel.group;
            let place = group.members.iter().position(|member| *member == rank)?;
            let absent = channel.exchanges.values().find(|m| m.missing().any(|p| p == place));
            // Without its first rank a group has no rank that would send a result.
            let waits = |(_, slot): &&(_, Arc<Slot>)| place == 0 && Arc::strong_count(slot) > 1;
            let waiting = channel.waiting.values().find(waits).map(|(signature, _)| *signature);
            let signature = absent.map(|m| m.signature()).or(waiting)?;
            Some((group.name.clone(), signature.to_string()))
        });
        let stuck = stuck.or_else(|| {
            let group = self.mail.waits_for(rank, |address| self.letters(address))?;
            Some((group.name.clone(), Operation::Recv.to_string()))
        });
        if let (Some((group, operation)), None) = (stuck, self.failed_at) {
            self.fail(self.shared.rank, CommError::PeerLost { group, rank, operation });
        }
    }

    /// How many collectives of a group this rank has called, and how many have begun.
    pub(super) fn progress(&self, group: u64) -> (u64, u64) {
        let called = self.channels.get(&group).map_or(0, |channel| channel.called);
        let lane = self.lanes.get(&(group, Route::All));
        (called, lane.and_then(|lane| lane.first_waiting()).unwrap_or(called))
    }

    /// Asks the other ranks that a late operation needs how far they are.
    pub(super) fn open_attribution(&mut self, what: Late, slot: Option<Arc<Slot>>) {
        let done = slot.as_ref().is_some_and(|slot| slot.is_done());
        // Who waits must have an answer; what is late on the device is asked about again.
        let taken = self.attribution.as_ref().is_some_and(|i| slot.is_none() || i.slot.is_some());
        if done || taken || self.failed_at.is_some() {
            return;
        }
        let (what, slot) = self.behind_a_letter(what, slot);
        let group = self.channels[&what.group()].group.clone();
        let asked: Vec<usize> = match what {
            Late::Call(Awaited::Receive(address)) => vec![group.members[address.from]],
            Late::InProgress { route: Route::Pair { from, to }, .. } => {
                let other = if from == group.place { to } else { from };
                vec![group.members[other]]
            }
            _ => group.others().collect(),
        };
        let deadline = Deadline::after(ANSWER_TIME);
        let me = self.shared.rank;
        let asked: Vec<usize> = asked.into_iter().filter(|rank| *rank != me).collect();
        self.attribution = Some(TimeoutAttribution {
            what,
            slot,
            deadline,
            asked: asked.clone(),
            answers: HashMap::new(),
        });
        for rank in asked {
            self.links.send(rank, &NcclFrame::Ask(group.id));
        }
    }

    /// The operation that holds a late one up: a receive before it whose envelope has not come, or
    /// itself.
    fn behind_a_letter(&self, what: Late, slot: Option<Arc<Slot>>) -> (Late, Option<Arc<Slot>>) {
        let held_up = match &what {
            Late::Call(Awaited::Collective { sequence, .. }) => {
                let lane = self.lanes.get(&(what.group(), Route::All));
                lane.is_some_and(|lane| lane.is_queued(*sequence))
            }
            Late::Call(Awaited::Receive(address)) => self.mail.is_wanted(address),
            Late::InProgress { .. } => false,
        };
        match self.awaited_letter() {
            Some((address, wanted)) if held_up => {
                (Late::Call(Awaited::Receive(address)), Some(wanted))
            }
            _ => (what, slot),
        }
    }

    /// Takes an answer to this rank's question.
    pub(super) fn answer(&mut self, from: usize, group: u64, called: u64, begun: u64) {
        if let Some(attribution) = self.attribution.as_mut().filter(|i| i.what.group() == group) {
            attribution.answers.insert(from, (called, begun));
        }
    }

    /// Ends the attribution once all have answered or had the time to.
    pub(super) fn poll_attribution(&mut self) {
        let Some(attribution) = &self.attribution else { return };
        let silent =
            |rank: &usize| !attribution.answers.contains_key(rank) && !self.departed[*rank];
        if attribution.asked.iter().any(silent) && !attribution.deadline.is_over() {
            return;
        }
        let attribution = self.attribution.take().expect("looked at above");
        if attribution.slot.as_ref().is_some_and(|slot| slot.is_done()) {
            return;
        }
        if let Some(error) = self.judge(&attribution) {
            self.fail(self.shared.rank, error);
        }
    }

    /// The error of an operation that is still late.
    fn judge(&self, attribution: &TimeoutAttribution) -> Option<CommError> {
        let timeout = self.shared.timeout.get();
        let TimeoutAttribution { what, slot, asked, answers, .. } = attribution;
        let group = &self.channels[&what.group()].group;
        let silent: Vec<usize> = asked
            .iter()
            .copied()
            .filter(|rank| !answers.contains_key(rank) && !self.departed[*rank])
            .collect();
        let behind = |count: fn(&(u64, u64)) -> u64, sequence: u64| -> Vec<usize> {
            let late = |rank: &usize| answers.get(rank).is_some_and(|a| count(a) <= sequence);
            asked.iter().copied().filter(late).collect()
        };
        let (operation, sequence, missing) = match what {
            Late::Call(what) => {
                let missing = match what {
                    Awaited::Collective { sequence, .. } => behind(|a| a.0, *sequence),
                    Awaited::Receive(address) => {
                        let slot = slot.as_ref().expect("a receive is waited for at a slot");
                        let unsent = self.mail.find(*address, slot).is_some();
                        if unsent { asked.clone() } else { Vec::new() }
                    }
                };
                (what.operation(), what.sequence(), missing)
            }
            Late::InProgress { group: id, route, late } => {
                // It may have come through while the others answered.
                let still = self.lanes.get(&(*id, *route))?.late(timeout)?;
                if still.label.sequence != late.label.sequence {
                    return None;
                }
                let sequence = late.label.sequence;
                let missing = match (late.begun, route) {
                    (false, _) => vec![self.shared.rank],
                    (true, Route::All) => behind(|a| a.1, sequence),
                    (true, Route::Pair { .. }) => Vec::new(),
                };
                let words = &late.label.operation;
                let operation = words.strip_prefix(&format!("{}: ", group.name)).unwrap_or(words);
                (operation.to_owned(), sequence, missing)
            }
        };
        let missing = if silent.is_empty() { missing } else { silent };
        let group = group.name.clone();
        let after_s = timeout.as_secs_f64();
        Some(CommError::Timeout { group, operation, sequence, after_s, missing })
    }
}
