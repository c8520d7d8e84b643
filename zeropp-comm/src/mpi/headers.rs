//! Which rank has joined which collective: reported through the tree, compared, and passed on.

use std::ops::Range;

use super::collective::{InProgress, MpiCollective};
use super::driver::MpiDriver;
use super::engine::{Input, Join};
use super::wire::{Header, HeaderShare, INLINE_MAX, MpiFrame, in_frames};
use crate::CommError;
use crate::progress::Group;
use crate::signature::Signature;

impl MpiDriver {
    /// Joins a collective.
    pub(super) fn join(&mut self, join: Join) {
        let Join { group: id, sequence, signature, input, slot } = join;
        let channel = self.channels.get_mut(&id).expect("a member's group");
        let group = channel.comms.group.clone();
        let header = header(&group, sequence, signature, &input);
        channel.called = sequence + 1;
        let new = || MpiCollective::new(group.size(), group.place);
        let exchange = channel.exchanges.entry(sequence).or_insert_with(new);
        exchange.headers[group.place] = Some(header);
        let differing = exchange.differs(&signature).cloned();
        let not_joined: Vec<usize> =
            exchange.not_joined().map(|place| group.members[place]).collect();
        if let Some(other) = differing {
            self.fail(self.shared.rank, mismatch(&group, &signature, &other));
            return slot.fail(self.error());
        }
        exchange.in_progress = Some(InProgress::new(signature, input, slot));
        self.pass_on(id, sequence);
        if let Some(rank) = not_joined.into_iter().find(|rank| self.departed[*rank]) {
            self.lost(rank);
        }
    }

    /// Sends the headers of a collective up the tree, once all from below are here, and down, once
    /// everyone's are.
    fn pass_on(&mut self, id: u64, sequence: u64) {
        let channel = self.channels.get_mut(&id).expect("a member's group");
        let (group, position) = (channel.comms.group.clone(), channel.position.clone());
        let Some(exchange) = channel.exchanges.get_mut(&sequence) else { return };
        let headers = &exchange.headers;
        let has = |range: Range<usize>| headers[range].iter().all(Option::is_some);
        let mut letters: Vec<(usize, Vec<MpiFrame>)> = Vec::new();
        if let Some(parent) = position.parent
            && !exchange.reported_up
            && has(position.subtree.clone())
        {
            exchange.reported_up = true;
            letters.push((parent, in_frames(headers[position.subtree].iter().flatten())));
        }
        if !exchange.reported_down && has(0..group.size()) {
            exchange.reported_down = true;
            for child in position.children {
                let above = |header: &&Header| !child.contains(&header.place);
                let reported = |header: &Header| header.as_reported_to(&child);
                let reported: Vec<Header> =
                    headers.iter().flatten().filter(above).map(reported).collect();
                letters.push((child.start, in_frames(reported.iter())));
            }
        }
        for (place, frames) in letters {
            let to = group.members[place];
            frames.iter().for_each(|frame| self.tell(std::iter::once(to), frame));
        }
    }

    /// Notes that a rank has joined a collective.
    pub(super) fn note(&mut self, header: Header) {
        let Some(channel) = self.channels.get_mut(&header.group) else {
            return self.early.entry(header.group).or_default().push(header);
        };
        let group = channel.comms.group.clone();
        if header.place >= group.size() {
            return;
        }
        let new = || MpiCollective::new(group.size(), header.place);
        let exchange = channel.exchanges.entry(header.sequence).or_insert_with(new);
        let mine = exchange.in_progress.as_ref().map(|in_progress| in_progress.signature);
        let opener = exchange.headers[exchange.opener].as_ref();
        let opener = opener.map(|opener| (opener.place, opener.signature));
        let (id, sequence, theirs) = (header.group, header.sequence, header.signature);
        exchange.headers[header.place] = Some(header.clone());
        if let Some(mine) = mine.filter(|mine| *mine != theirs) {
            return self.fail(self.shared.rank, mismatch(&group, &mine, &header));
        }
        // Two ranks below, while this one has not called it: no other may ever see both.
        if let Some((place, signature)) = opener.filter(|(_, signature)| *signature != theirs) {
            let error = group.mismatch(sequence, header.place, theirs, place, signature);
            return self.fail(group.members[header.place], error);
        }
        self.pass_on(id, sequence);
    }
}

/// The header of a collective; takes a small input along.
fn header(group: &Group, sequence: u64, signature: Signature, input: &Input) -> Header {
    let (len, inline) = match input {
        // The bytes stay: where another rank has more, all go round once more.
        Input::Bytes(bytes) if bytes.len() <= INLINE_MAX => (bytes.len(), bytes.clone()),
        Input::Bytes(bytes) => (bytes.len(), Vec::new()),
        Input::Buffer(payload) if payload.is_small() => {
            let inline = payload.bytes().to_vec();
            (inline.len(), inline)
        }
        Input::Buffer(_) => (0, Vec::new()),
    };
    let brought = HeaderShare { len, inline };
    Header { group: group.id, sequence, place: group.place, signature, brought }
}

fn mismatch(group: &Group, mine: &Signature, other: &Header) -> CommError {
    group.mismatch(other.sequence, group.place, mine, other.place, other.signature)
}
