//! W that wait: fillers, run in the order of their B.

use super::ledger::{CollectiveTimes, RankBefore};
use super::problem::{Facts, Problem};
use super::residency::ends_unit;
use super::sequence::RankSequence;

/// The W of one rank, in the order of their B.
pub(super) struct WaitingWeights<'a> {
    pub(super) p: &'a Problem,
    pub(super) r: usize,
    pub(super) sequence: &'a RankSequence,
    pub(super) table: &'a [Facts],
    /// It does not matter which W runs.
    pub(super) same: bool,
}

impl WaitingWeights<'_> {
    /// One W: the next B that waits for it names the stage. `end`: all entries have run.
    #[inline(always)]
    pub(super) fn run_w<const TIMED: bool>(
        &self,
        s: &mut RankBefore,
        lane: &mut CollectiveTimes,
        end: bool,
    ) {
        let (p, entries) = (self.p, &self.sequence.entries);
        if !TIMED && self.same {
            let facts = &self.table[p.v];
            s.now += facts.w;
            s.memory -= facts.freed;
            s.pending -= 1;
            return;
        }
        let mut class = usize::from(entries[s.w as usize]);
        while class < p.v || class == p.classes {
            s.w += 1;
            class = usize::from(entries[s.w as usize]);
        }
        let facts = &self.table[class];
        s.now += facts.w;
        s.memory -= facts.freed;
        s.pending -= 1;
        if TIMED && ends_unit(p, usize::from(self.sequence.batch[s.w as usize])) {
            let stall = lane.reduce(s.now, p.reduce[self.r * p.v + class - p.v]);
            // Nothing waits for the reduction after the rank's last W.
            if s.pending > 0 || !end {
                s.now += stall;
                s.idle += stall;
            }
        }
        s.w += 1;
    }

    /// Runs W until `need` fits; false where none is left.
    #[inline(always)]
    pub(super) fn make_room<const TIMED: bool>(
        &self,
        need: i64,
        s: &mut RankBefore,
        lane: &mut CollectiveTimes,
    ) -> bool {
        while s.memory + need > self.p.memory {
            if s.pending == 0 {
                return false;
            }
            self.run_w::<TIMED>(s, lane, false);
        }
        true
    }
}
