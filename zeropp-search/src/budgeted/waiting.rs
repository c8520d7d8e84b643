//! W that wait: fillers, run in the order of their B.

use super::ledger::{Lane, Slot};
use super::problem::{Facts, Problem};
use super::residency::ends_unit;
use super::word::Word;

/// The W of one rank, in the order of their B.
pub(super) struct Waiting<'a> {
    pub(super) p: &'a Problem,
    pub(super) r: usize,
    pub(super) word: &'a Word,
    pub(super) table: &'a [Facts],
    /// It does not matter which W runs.
    pub(super) same: bool,
}

impl Waiting<'_> {
    /// One W: the next B that waits for it names the stage. `end`: all letters have run.
    #[inline(always)]
    pub(super) fn run_w<const TIMED: bool>(&self, s: &mut Slot, lane: &mut Lane, end: bool) {
        let (p, letters) = (self.p, &self.word.letters);
        if !TIMED && self.same {
            let facts = &self.table[p.v];
            s.now += facts.w;
            s.memory -= facts.freed;
            s.pending -= 1;
            return;
        }
        let mut class = usize::from(letters[s.w as usize]);
        while class < p.v || class == p.classes {
            s.w += 1;
            class = usize::from(letters[s.w as usize]);
        }
        let facts = &self.table[class];
        s.now += facts.w;
        s.memory -= facts.freed;
        s.pending -= 1;
        if TIMED && ends_unit(p, usize::from(self.word.batch[s.w as usize])) {
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
        s: &mut Slot,
        lane: &mut Lane,
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
