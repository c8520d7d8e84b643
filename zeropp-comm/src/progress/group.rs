//! A group of ranks as one of them sees it.

use std::fmt::Display;
use std::sync::Arc;

use crate::buffers::Buffers;
use crate::subgroup::{SplitRequest, sub_group_id};
use crate::{CommError, CommResult};
use zeropp_failures::Operation;

/// A communicator's view of its group.
pub(crate) struct Group {
    /// Equal on all members, different from every other group's.
    pub(crate) id: u64,
    pub(crate) name: String,
    /// World ranks, in the group's order.
    pub(crate) members: Vec<usize>,
    /// This rank's place among them.
    pub(crate) place: usize,
    /// Of an engine that leaves its results in the CPU's memory.
    pub(crate) buffers: Buffers,
}

impl Group {
    pub(crate) fn new(id: u64, name: String, members: Vec<usize>, place: usize) -> Arc<Group> {
        Arc::new(Group { id, name, members, place, buffers: Buffers::default() })
    }

    /// The group of all ranks.
    pub(crate) fn world(rank: usize, size: usize) -> Arc<Group> {
        Group::new(0, "world".into(), (0..size).collect(), rank)
    }

    pub(crate) fn size(&self) -> usize {
        self.members.len()
    }

    /// World ranks of all members but this one.
    pub(crate) fn others(&self) -> impl Iterator<Item = usize> + '_ {
        let me = self.members[self.place];
        self.members.iter().copied().filter(move |rank| *rank != me)
    }

    /// The error of two places that differ in what they call: who saw it, and the other.
    pub(crate) fn mismatch(
        &self,
        sequence: u64,
        place: usize,
        mine: impl Display,
        peer: usize,
        theirs: impl Display,
    ) -> CommError {
        CommError::Mismatch {
            group: self.name.clone(),
            sequence,
            rank: self.members[place],
            mine: mine.to_string(),
            peer: self.members[peer],
            theirs: theirs.to_string(),
        }
    }

    /// The sub-group that collective number `sequence` makes for this rank out of the requests of
    /// all: the ranks that asked for the same color, ordered by key, then by their order here.
    pub(crate) fn sub_group(
        &self,
        sequence: u64,
        split_requests: &[SplitRequest],
    ) -> CommResult<Arc<Group>> {
        let mine = &split_requests[self.place];
        let mut ranks: Vec<(usize, usize)> = (0..split_requests.len())
            .filter(|place| split_requests[*place].color == mine.color)
            .map(|place| (split_requests[place].key, place))
            .collect();
        ranks.sort_unstable();
        let words = |split_request: &SplitRequest| {
            format!("{} into {}", Operation::Split, split_request.name)
        };
        if let Some((_, peer)) =
            ranks.iter().find(|(_, place)| split_requests[*place].name != mine.name)
        {
            let theirs = words(&split_requests[*peer]);
            return Err(self.mismatch(sequence, self.place, words(mine), *peer, theirs));
        }
        let place = ranks.iter().position(|(_, p)| *p == self.place).expect("mine is among them");
        let id = sub_group_id(self.id, sequence, mine.color as u64);
        let members = ranks.iter().map(|(_, place)| self.members[*place]).collect();
        Ok(Group::new(id, mine.name.clone(), members, place))
    }
}
