//! The evidence of the records for each kind of failure.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::error::CommError;
use super::folder::Run;
use super::mesh::{Coords, Mesh};
use super::moment::{AT_ONCE_NS, Doing, FailureMoment, common};
use super::operation::{Operation, Outcome};
use super::record::{ActionEntry, EndKind, Entry, Header, OpEntry, Peer, Record};
use super::waits::{Root, operations};

/// A pause that no busy machine explains; with a short timeout, half of that.
const LONG_PAUSE_NS: u64 = 5_000_000_000;
/// A message that is on its way for less is no sign of a loss.
const LOST_NS: u64 = 1_000_000_000;

/// The records of a run, seen at the moment it began to fail.
pub(super) struct Case<'a> {
    pub(super) run: &'a Run,
    pub(super) moment: FailureMoment<'a>,
}

/// Where in the schedule something happened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) step: Option<u64>,
    pub(super) stage: Option<usize>,
    pub(super) action: Option<String>,
}

impl Place {
    pub(super) fn of(action: &ActionEntry) -> Place {
        let ActionEntry { step, stage, action, .. } = action;
        Place { step: Some(*step), stage: *stage, action: Some(action.clone()) }
    }
}

impl<'a> Case<'a> {
    pub(super) fn header(&self) -> &'a Header {
        &self.run.records[0].header
    }

    /// Ranks in the world.
    pub(super) fn world(&self) -> usize {
        self.header().processes.len()
    }

    pub(super) fn process(&self, rank: usize) -> Peer {
        self.header().processes.get(rank).cloned().unwrap_or_default()
    }

    /// Records that ended like this.
    pub(super) fn ended(&self, kind: impl Fn(&EndKind) -> bool) -> Vec<&'a Record> {
        self.run.records.iter().filter(|r| kind(&r.header.end.kind)).collect()
    }

    /// The first rank with a fault of its own, if that came at the very beginning (or `late`, too).
    pub(super) fn own_fault(&self, late: bool) -> Option<&'a Record> {
        let faults = self.run.records.iter().filter(|record| {
            let end = &record.header.end;
            end.is_own_fault()
                && (late || common(&record.header, end.at_ns) <= self.moment.at_ns + AT_ONCE_NS)
        });
        faults.min_by_key(|record| common(&record.header, record.header.end.at_ns))
    }

    /// Ranks whose processes left nothing at all.
    pub(super) fn gone(&self) -> Vec<usize> {
        let wrote = self.moment.records().map(|(rank, _)| rank);
        let wrote: Vec<Peer> =
            wrote.chain(self.run.unknown.iter().copied()).map(|r| self.process(r)).collect();
        (0..self.world()).filter(|rank| !wrote.contains(&self.process(*rank))).collect()
    }

    /// Ranks whose processes stood still as the run failed while others did not: the longest first.
    pub(super) fn frozen(&self) -> Vec<(usize, u64)> {
        let mut frozen: Vec<(usize, u64)> = Vec::new();
        for (rank, record) in self.moment.records() {
            let now = self.moment.of(record);
            let least = LONG_PAUSE_NS.min((record.header.timeout_s * 0.5e9) as u64);
            let long = record
                .header
                .pauses
                .iter()
                .filter(|pause| pause.from_ns < now && pause.to_ns + AT_ONCE_NS > now);
            let longest = long.map(|pause| pause.to_ns - pause.from_ns).max().unwrap_or(0);
            if longest >= least.max(1) {
                frozen.push((rank, longest));
            }
        }
        frozen.sort_by_key(|(rank, ns)| (u64::MAX - ns, *rank));
        // A machine that slept explains nothing about one of its ranks.
        if frozen.len() == self.world() { Vec::new() } else { frozen }
    }

    /// Where all waiting began, and how many ranks waited for each place.
    pub(super) fn roots(&self) -> Vec<(Root, usize)> {
        let mut votes: BTreeMap<Root, usize> = BTreeMap::new();
        for (rank, _) in self.moment.records() {
            let roots: BTreeSet<Root> = self.moment.roots_of(rank);
            roots.into_iter().for_each(|root| *votes.entry(root).or_default() += 1);
        }
        let mut votes: Vec<_> = votes.into_iter().collect();
        votes.sort_by_key(|(_, count)| usize::MAX - count);
        votes
    }

    /// Pairs of ranks between whom something was lost: it had been on its way for much longer than
    /// any message that came through.
    pub(super) fn lost(&self) -> Vec<(usize, usize, u64)> {
        let longest = self.longest_way_ns();
        let mut lost = Vec::new();
        for (root, _) in self.roots() {
            let Root::Lost(to, from) = root else { continue };
            let ns = self.moment.under_way_ns(to);
            if ns >= LOST_NS.max(longest.saturating_mul(3)) {
                lost.push((from, to, ns));
            }
        }
        lost
    }

    /// How long a message was on its way at most, from when both ends were ready for it.
    fn longest_way_ns(&self) -> u64 {
        let key = |from, to, op: &OpEntry| (from, to, op.group.clone(), op.tag, op.number);
        let mut sent = BTreeMap::new();
        for (from, record) in self.moment.records() {
            for op in operations(record).filter(|op| op.operation == Operation::Send) {
                let at = common(&record.header, op.issued_ns);
                sent.insert(key(from, op.peer.unwrap_or(from), op), at);
            }
        }
        let mut longest = 0;
        for (to, record) in self.moment.records() {
            for op in operations(record).filter(|op| op.operation == Operation::Recv) {
                let (Some(waited), Some(ended)) = (op.waited_ns, op.ended_ns) else { continue };
                let Some(issued) = sent.get(&key(op.peer.unwrap_or(to), to, op)) else { continue };
                let [ready, end] = [waited, ended].map(|at| common(&record.header, at));
                if op.outcome == Outcome::Done && end <= self.moment.at_ns {
                    longest = longest.max(end.saturating_sub(ready.max(*issued)));
                }
            }
        }
        longest
    }

    /// The compute action that took longest of those that ended within `window_ns`, and its rank.
    pub(super) fn longest_computation(
        &self,
        window_ns: u64,
    ) -> Option<(usize, &'a ActionEntry, u64)> {
        let mut found: Option<(usize, &ActionEntry, u64)> = None;
        for (rank, record) in self.moment.records() {
            let now = self.moment.of(record);
            for entry in &record.entries {
                let Entry::Action(action) = entry else { continue };
                let Some(begin) = action.compute_ns.filter(|begin| *begin <= now) else { continue };
                let end = action.computed_ns.unwrap_or(now).min(now);
                let ns = end - begin.min(end);
                if end + window_ns >= now && found.is_none_or(|(_, _, most)| ns > most) {
                    found = Some((rank, action, ns));
                }
            }
        }
        found
    }

    /// The first rank that waited in vain until its time was over.
    pub(super) fn first_timeout(&self) -> Option<&'a Record> {
        let timeouts = self.ended(|kind| *kind == EndKind::Timeout).into_iter();
        timeouts.min_by_key(|r| common(&r.header, r.header.end.at_ns))
    }

    /// Where `rank` was, as far as its record or those of others show.
    pub(super) fn place(&self, rank: usize) -> Place {
        match self.moment.action(rank) {
            Some(action) => Place::of(action),
            None => self.place_of_waiter(rank).or_else(|| self.last_seen(rank)).unwrap_or_default(),
        }
    }

    /// Where a rank without a record must have been, as another one waited for it.
    fn place_of_waiter(&self, rank: usize) -> Option<Place> {
        let (waiter, op) = self.awaited(rank)?;
        let action = self.moment.action(waiter);
        let step = action.map(|action| action.step);
        Some(match op.producer() {
            Some((stage, action)) => Place { step, stage: Some(stage), action: Some(action) },
            None => Place { step, stage: self.shared_stage(rank, waiter), action: None },
        })
    }

    /// The stage that `waiter` was at, if `rank` holds that stage, too.
    fn shared_stage(&self, rank: usize, waiter: usize) -> Option<usize> {
        let same = self.coords(rank).pp == self.coords(waiter).pp;
        self.moment.action(waiter)?.stage.filter(|_| same)
    }

    /// The operation in which a rank waited for `rank`: the longest wait.
    pub(super) fn awaited(&self, rank: usize) -> Option<(usize, &'a OpEntry)> {
        let waiting = self.moment.records().filter_map(|(waiter, _)| {
            let Some(Doing::Waiting(op)) = self.moment.doing(waiter) else { return None };
            let parts = self.moment.parts(waiter, op);
            let has_not_joined = parts.gone.contains(&rank) || parts.absent.contains(&rank);
            has_not_joined.then_some((waiter, op))
        });
        // A wait that names a stage is better evidence.
        waiting.max_by_key(|(waiter, op)| {
            let tells = op.producer().is_some() || self.shared_stage(rank, *waiter).is_some();
            (tells, self.moment.doing_for_ns(*waiter), Reverse(*waiter))
        })
    }

    /// The last message that came from `rank`, or the last collective with it.
    fn last_seen(&self, rank: usize) -> Option<Place> {
        let mut newest: Option<(u64, Place)> = None;
        for (_, record) in self.moment.records() {
            let now = self.moment.of(record);
            let done = operations(record).rev().find(|op| {
                op.operation == Operation::Recv
                    && op.peer == Some(rank)
                    && op.ended_ns.is_some_and(|end| end <= now)
            });
            let Some((op, (stage, action))) = done.and_then(|op| Some((op, op.producer()?))) else {
                continue;
            };
            let end = common(&record.header, op.ended_ns.unwrap_or(0));
            let step = self.moment.action(record.header.rank).map(|action| action.step);
            if newest.as_ref().is_none_or(|(at, _)| end > *at) {
                newest = Some((end, Place { step, stage: Some(stage), action: Some(action) }));
            }
        }
        newest.map(|(_, place)| place)
    }

    /// The place of any rank in the mesh, of one without a record, too.
    pub(super) fn coords(&self, rank: usize) -> Coords {
        let Coords { pp, zero3, dp } = self.header().mesh;
        Mesh { pp: pp.max(1), zero3: zero3.max(1), dp: dp.max(1) }.coords(rank)
    }

    /// The ranks whose call differed from what most ranks called, where one error says so.
    pub(super) fn odd_ones_out(&self, error: &CommError) -> Vec<usize> {
        let CommError::Mismatch { group, sequence, rank, peer, .. } = error else {
            return Vec::new();
        };
        let mut calls: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (rank, record) in self.moment.records() {
            let call = operations(record)
                .find(|op| op.group == *group && op.tag.is_none() && op.number == *sequence);
            if let Some(op) = call {
                calls.entry(format!("{} {:?}", op.operation, op.buffer)).or_default().push(rank);
            }
        }
        let (most, least) =
            (calls.values().map(Vec::len).max(), calls.values().min_by_key(|ranks| ranks.len()));
        match (most, least) {
            (Some(most), Some(least)) if least.len() < most => least.clone(),
            _ => vec![*peer, *rank],
        }
    }
}
