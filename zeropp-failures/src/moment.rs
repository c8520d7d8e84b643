//! The actions of every rank at the moment the run began to fail.

use std::collections::BTreeMap;

use super::operation::Outcome;
use super::record::{ActionEntry, Entry, Header, OpEntry, Record};

/// How long after the first sign of a failure a fault may still be its cause: ranks receive each
/// other's faults at once, but clocks of two hosts differ a little.
pub(super) const AT_ONCE_NS: u64 = 200_000_000;

/// The state of a rank at that moment.
#[derive(Clone, Copy, Debug)]
pub enum Doing<'a> {
    /// Blocked for an operation.
    Waiting(&'a OpEntry),
    /// Computing an action.
    Computing(&'a ActionEntry),
    /// Neither: between two actions, or in one that does not say that it computes.
    Other(Option<&'a ActionEntry>),
}

/// All ranks at one moment. Times are by the clock of rank 0's host.
#[derive(Debug)]
pub struct FailureMoment<'a> {
    /// The moment: just before the first rank learnt of the failure.
    pub at_ns: u64,
    records: BTreeMap<usize, &'a Record>,
}

impl<'a> FailureMoment<'a> {
    /// The moment before the first failed operation or end in any of `records`.
    pub fn first_failure(records: &'a [Record]) -> Option<FailureMoment<'a>> {
        let failed = |record: &Record| {
            let ended = |entry: &Entry| match entry {
                Entry::Operation(op) if op.outcome == Outcome::Failed => op.ended_ns,
                _ => None,
            };
            let first = record.entries.iter().find_map(ended).unwrap_or(u64::MAX);
            common(&record.header, first.min(record.header.end.at_ns))
        };
        let at_ns = records.iter().map(failed).min()?.saturating_sub(1);
        Some(FailureMoment { at_ns, records: records.iter().map(|r| (r.header.rank, r)).collect() })
    }

    /// The record of `rank`, if it left one.
    pub fn record(&self, rank: usize) -> Option<&'a Record> {
        self.records.get(&rank).copied()
    }

    /// All records, in rank order.
    pub fn records(&self) -> impl Iterator<Item = (usize, &'a Record)> + '_ {
        self.records.iter().map(|(rank, record)| (*rank, *record))
    }

    /// The moment by the clock of `record`'s host. A rank that failed by its own fault then is
    /// seen just before it did: its own clock is exact, those of two hosts differ a little.
    pub(super) fn of(&self, record: &Record) -> u64 {
        let at_ns = self.at_ns.saturating_add_signed(record.header.ahead_ns);
        let end = &record.header.end;
        let then = end.is_own_fault() && end.at_ns.abs_diff(at_ns) <= AT_ONCE_NS;
        if then { end.at_ns.saturating_sub(1) } else { at_ns }
    }

    /// How long before the moment it was `at_ns` on the host of `record`; none if it was later.
    pub fn before_ns(&self, record: &Record, at_ns: u64) -> Option<u64> {
        self.of(record).checked_sub(at_ns)
    }

    /// The state of `rank`, if it left a record.
    pub fn doing(&self, rank: usize) -> Option<Doing<'a>> {
        let record = self.record(rank)?;
        let now = self.of(record);
        let open = |end: Option<u64>| end.is_none_or(|end| end > now);
        let waiting = record.entries.iter().rev().find_map(|entry| match entry {
            Entry::Operation(op) if op.waited_ns.is_some_and(|t| t <= now) && open(op.ended_ns) => {
                Some(op)
            }
            _ => None,
        });
        if let Some(op) = waiting {
            return Some(Doing::Waiting(op));
        }
        let action = self.action(rank);
        Some(match action {
            Some(a) if a.compute_ns.is_some_and(|t| t <= now) && open(a.computed_ns) => {
                Doing::Computing(a)
            }
            action => Doing::Other(action),
        })
    }

    /// The action that `rank` was at, or came from.
    pub fn action(&self, rank: usize) -> Option<&'a ActionEntry> {
        let record = self.record(rank)?;
        let now = self.of(record);
        record.entries.iter().rev().find_map(|entry| match entry {
            Entry::Action(action) if action.begin_ns <= now => Some(action),
            _ => None,
        })
    }

    /// For how long `rank` had been doing what it did.
    pub fn doing_for_ns(&self, rank: usize) -> u64 {
        let Some((record, doing)) = self.record(rank).zip(self.doing(rank)) else { return 0 };
        let now = self.of(record);
        let since = match doing {
            Doing::Waiting(op) => op.waited_ns,
            Doing::Computing(action) => action.compute_ns,
            Doing::Other(Some(action)) => {
                let ended = action.end_ns.filter(|end| *end <= now);
                ended.or(action.computed_ns.filter(|end| *end <= now)).or(Some(action.begin_ns))
            }
            Doing::Other(None) => record.entries.first().map(Entry::begin_ns),
        };
        now.saturating_sub(since.unwrap_or(now))
    }
}

/// A time of a rank's host by the clock of rank 0's.
pub(super) fn common(header: &Header, at_ns: u64) -> u64 {
    at_ns.saturating_add_signed(header.ahead_ns.saturating_neg())
}
