//! Who waits for whom, and where the waiting begins.

use std::collections::BTreeSet;

use super::moment::{Doing, FailureMoment};
use super::operation::Operation;
use super::record::{Entry, OpEntry, Record};

/// Where a chain of waiting ranks begins.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Root {
    /// A rank that left no record. The first number is the rank that waited for it.
    Gone(usize, usize),
    /// A rank that others wait for, and that waits for no other.
    Busy(usize),
    /// Everyone had done their part, but it did not come through: who waited, and for whom.
    Lost(usize, usize),
    /// Ranks that wait for each other.
    Circle(Vec<usize>),
}

/// The state of the ranks of an operation when a rank waited for it.
#[derive(Debug, Default)]
pub(super) struct Parts {
    /// Had not come to it.
    pub(super) absent: Vec<usize>,
    /// Left no record.
    pub(super) gone: Vec<usize>,
    /// Had done their part.
    pub(super) there: Vec<usize>,
}

impl FailureMoment<'_> {
    /// The state of the others in the operation that `rank` waited for.
    pub(super) fn parts(&self, rank: usize, op: &OpEntry) -> Parts {
        let mut parts = Parts::default();
        for other in self.others(rank, op) {
            match self.record(other) {
                None => parts.gone.push(other),
                Some(record) if self.has_joined(record, rank, op) => parts.there.push(other),
                Some(_) => parts.absent.push(other),
            }
        }
        parts
    }

    /// World ranks that an operation of `rank` takes besides itself.
    fn others(&self, rank: usize, op: &OpEntry) -> Vec<usize> {
        if let (Operation::Send | Operation::Recv, Some(peer)) = (op.operation, op.peer) {
            return vec![peer];
        }
        let groups = self.record(rank).map_or(&[][..], |record| &record.header.groups);
        let members = groups.iter().find(|g| g.name == op.group).map_or(&[][..], |g| &g.members);
        members.iter().copied().filter(|member| *member != rank).collect()
    }

    /// Whether `record`'s rank had done its part of an operation of `rank`.
    fn has_joined(&self, record: &Record, rank: usize, op: &OpEntry) -> bool {
        let now = self.of(record);
        let counterpart = match op.operation {
            Operation::Recv => Some(Operation::Send),
            Operation::Send => Some(Operation::Recv),
            _ => None,
        };
        let same_kind = |other: &OpEntry| {
            other.group == op.group
                && match counterpart {
                    Some(operation) => {
                        other.operation == operation
                            && other.tag == op.tag
                            && other.peer == Some(rank)
                    }
                    None => other.tag.is_none(),
                }
        };
        let mut kept = operations(record).filter(|other| same_kind(other)).peekable();
        if kept.peek().is_some() {
            return kept.any(|other| other.number >= op.number && other.issued_ns <= now);
        }
        // None of the kind is remembered: either all are too long ago, or there were none.
        let groups = &record.header.groups;
        let count = groups.iter().find(|group| group.name == op.group).map(|g| g.collectives);
        counterpart.is_none() && count.is_some_and(|count| count > op.number)
    }

    /// Where the waiting of `rank` begins; nothing if it does not wait.
    pub(super) fn roots_of(&self, rank: usize) -> BTreeSet<Root> {
        let mut roots = BTreeSet::new();
        self.follow(rank, &mut Vec::new(), &mut BTreeSet::new(), &mut roots);
        roots
    }

    fn follow(
        &self,
        rank: usize,
        path: &mut Vec<usize>,
        seen: &mut BTreeSet<usize>,
        roots: &mut BTreeSet<Root>,
    ) {
        if let Some(at) = path.iter().position(|r| *r == rank) {
            let mut circle = path[at..].to_vec();
            circle.sort_unstable();
            roots.insert(Root::Circle(circle));
            return;
        }
        if !seen.insert(rank) {
            return;
        }
        let Some(Doing::Waiting(op)) = self.doing(rank) else {
            if !path.is_empty() {
                roots.insert(Root::Busy(rank));
            }
            return;
        };
        let parts = self.parts(rank, op);
        roots.extend(parts.gone.iter().map(|gone| Root::Gone(rank, *gone)));
        if parts.gone.is_empty() && parts.absent.is_empty() {
            roots.extend(parts.there.iter().map(|there| Root::Lost(rank, *there)));
        }
        path.push(rank);
        for absent in parts.absent {
            self.follow(absent, path, seen, roots);
        }
        path.pop();
    }

    /// How long the parts of the operation that `rank` waits for have all been on their way.
    pub(super) fn under_way_ns(&self, rank: usize) -> u64 {
        let Some(Doing::Waiting(op)) = self.doing(rank) else { return 0 };
        let issued = |record: &Record| {
            let same = |other: &&OpEntry| {
                other.group == op.group && other.tag == op.tag && other.number == op.number
            };
            let newest = operations(record).filter(same).map(|other| other.issued_ns).max();
            newest.map(|at| super::moment::common(&record.header, at))
        };
        let ranks = self.others(rank, op).into_iter().chain([rank]);
        let last = ranks.filter_map(|rank| issued(self.record(rank)?)).max();
        self.at_ns.saturating_sub(last.unwrap_or(self.at_ns))
    }
}

/// The operations of a record, oldest first.
pub(super) fn operations(record: &Record) -> impl DoubleEndedIterator<Item = &OpEntry> {
    record.entries.iter().filter_map(|entry| match entry {
        Entry::Operation(op) => Some(op),
        Entry::Action(_) => None,
    })
}
