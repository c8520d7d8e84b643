//! Collectives among the ranks of a group, as frames announce them.
//!
//! Every rank sends the group's first rank the collective that it joins, and with what. That one
//! compares, and sends all ranks the result of those whose data the frames carry. The others go to
//! NCCL at once: no rank waits for the comparison, and a difference that it finds fails the world.

use std::sync::Arc;

use super::driver::{Channel, NcclDriver};
use super::engine::{Input, InputBuffer, Join, Output, Received};
use super::lane::{Label, NcclWork};
use super::wire::{Header, NcclFrame, Route};
use crate::progress::Group;
use crate::signature::{Operation, Signature};
use crate::subgroup::SplitRequest;
use crate::{CommError, CommResult};

/// A collective that not all ranks have joined.
pub(super) struct HeaderExchange {
    headers: Vec<Option<Header>>,
    /// Place that came first: the one others are compared with.
    opener: usize,
}

impl HeaderExchange {
    fn new(size: usize, opener: usize) -> HeaderExchange {
        HeaderExchange { headers: vec![None; size], opener }
    }

    /// Places that have not joined.
    pub(super) fn missing(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.headers.len()).filter(|place| self.headers[*place].is_none())
    }

    /// The signature of the operation that the ranks are about to do.
    pub(super) fn signature(&self) -> Signature {
        self.headers[self.opener].as_ref().expect("the opener has joined").signature
    }
}

impl NcclDriver {
    /// Joins a collective.
    pub(super) fn join(&mut self, join: Join) {
        let Join { group: id, sequence, signature, input, slot } = join;
        let channel = self.channels.get_mut(&id).expect("a member's group");
        let group = channel.group.clone();
        channel.called = sequence + 1;
        let mut brought = Vec::new();
        let mut more = false;
        if let Input::Buffer(_) = input {
            channel.together = channel.together.saturating_sub(1);
            more = channel.together > 0;
        }
        match input {
            Input::Buffer(InputBuffer::Empty) => {
                if !more && let Some(lane) = self.lanes.get_mut(&(id, Route::All)) {
                    lane.end_of_call();
                }
                slot.put(Ok(Output::Buffer(Received::Issued(None))))
            }
            Input::Bytes(own) => {
                brought = own;
                channel.waiting.insert(sequence, (signature, slot));
            }
            Input::Buffer(InputBuffer::Work { job, transfer, count }) => {
                let Some((_, fresh)) = self.lane(id, Route::All) else {
                    return slot.fail(self.error());
                };
                if fresh && group.place == 0 {
                    self.found(id, Route::All);
                }
                let operation = format!("{}: {signature}", group.name);
                let label = Label { operation, sequence };
                let work = NcclWork { job, transfer, count, label, slot: slot.clone(), more };
                self.push(id, Route::All, work);
                if self.failed_at.is_some() {
                    return slot.fail(self.error());
                }
            }
        }
        let header = Header { group: id, sequence, place: group.place, signature, brought };
        let first = group.members[0];
        if group.place == 0 {
            self.note(header);
        } else {
            self.links.send(first, &NcclFrame::Header(header));
            if self.departed[first] {
                self.lost(first);
            }
        }
    }

    /// Notes, on a group's first rank, that a rank has joined a collective.
    pub(super) fn note(&mut self, header: Header) {
        let Header { group: id, sequence, place, signature, .. } = header;
        let channel = self.channels.get_mut(&id).expect("a known group");
        let group = channel.group.clone();
        if place >= group.size() {
            return;
        }
        let new = || HeaderExchange::new(group.size(), place);
        let exchange = channel.exchanges.entry(sequence).or_insert_with(new);
        exchange.headers[place] = Some(header);
        let theirs = exchange.signature();
        if theirs != signature {
            let error = group.mismatch(sequence, place, signature, exchange.opener, theirs);
            return self.fail(group.members[place], error);
        }
        let departed = &self.departed;
        let gone =
            exchange.missing().map(|place| group.members[place]).find(|rank| departed[*rank]);
        if let Some(rank) = gone {
            return self.lost(rank);
        }
        if exchange.missing().next().is_some() {
            return;
        }
        let exchange = channel.exchanges.remove(&sequence).expect("looked at above");
        if matches!(
            signature.operation,
            Operation::Barrier | Operation::Exchange | Operation::Gather | Operation::Split
        ) {
            let parts =
                exchange.headers.into_iter().flatten().map(|header| header.brought).collect();
            self.give_result(id, sequence, signature, parts);
        }
    }

    /// Sends everyone the result of a collective whose data came in frames; of a gather only the
    /// root gets more than the end.
    fn give_result(&mut self, id: u64, sequence: u64, signature: Signature, parts: Vec<Vec<u8>>) {
        let group = self.channels[&id].group.clone();
        let nothing = NcclFrame::Result(id, sequence, Vec::new());
        let all = NcclFrame::Result(id, sequence, parts);
        let gets = |rank: usize| match (signature.operation, signature.root) {
            (Operation::Gather, Some(root)) => group.members[root] == rank,
            _ => true,
        };
        for other in group.others() {
            self.links.send(other, if gets(other) { &all } else { &nothing });
        }
        let own = if gets(self.shared.rank) { all } else { nothing };
        let NcclFrame::Result(_, _, parts) = own else { unreachable!("made above") };
        self.conclude(id, sequence, parts);
    }

    /// Gives this rank the result of a collective whose data came in frames.
    pub(super) fn conclude(&mut self, id: u64, sequence: u64, parts: Vec<Vec<u8>>) {
        let channel = self.channels.get_mut(&id).expect("a known group");
        let Some((signature, slot)) = channel.waiting.remove(&sequence) else { return };
        if signature.operation != Operation::Split {
            return slot.put(Ok(Output::Bytes(parts.into())));
        }
        match sub_group(&channel.group, sequence, &parts) {
            Err(error) => {
                self.fail(self.shared.rank, error);
                slot.fail(self.error());
            }
            Ok(group) => {
                let id = group.id;
                self.channels.insert(id, Channel::new(group.clone()));
                slot.put(Ok(Output::Group(group)));
                for (from, frame) in self.early.remove(&id).into_iter().flatten() {
                    self.read(from, frame);
                }
            }
        }
    }
}

/// The sub-group that the answers of all ranks make for this one.
fn sub_group(group: &Group, sequence: u64, split_requests: &[Vec<u8>]) -> CommResult<Arc<Group>> {
    let unreadable = || CommError::Invalid {
        group: group.name.clone(),
        rank: group.members[group.place],
        operation: Operation::Split.to_string(),
        problem: "an answer that cannot be read; do all ranks run the same build of zeropp?".into(),
    };
    let split_requests: Option<Vec<SplitRequest>> =
        split_requests.iter().map(|bytes| SplitRequest::decode(bytes)).collect();
    let split_requests =
        split_requests.filter(|w| w.len() == group.size()).ok_or_else(unreadable)?;
    group.sub_group(sequence, &split_requests)
}
