//! The cost of a sequence in gathers and in gradients that wait for their reduction.
//!
//! F and B need their stage gathered, W does not. A stage is kept while there is room; which one to
//! drop is Belady's rule, the one needed last, which gathers least where stages are of one size.

use std::ops::Range;

use super::problem::Problem;
use super::sequence::RankSequence;

/// A gather of a rank's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gather {
    /// Entries that have run when it starts: the last use of what it replaces is among them.
    pub(super) gate: u32,
    /// The entry that waits for it.
    pub(super) entry: u32,
    /// The rank's stage, 0..V.
    pub(super) v: u32,
    /// Time it takes.
    pub(super) take: i64,
}

/// A free: after the entry `after` of stage `v`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Free {
    pub(super) after: u32,
    pub(super) v: u32,
}

/// Counts gathers and gradients; keeps its memory between calls.
#[derive(Clone, Debug, Default)]
pub(super) struct ResidencyCounter {
    /// Longest runs of one stage: stage, first and last entry.
    visits: Vec<(u8, u32, u32)>,
    /// For each visit, the next one of its stage.
    next: Vec<u32>,
    /// Stages held: (stage, next visit of it, last entry that used it).
    held: Vec<(u8, u32, u32)>,
    /// The gathers of the last count, in order of need.
    pub(super) gathers: Vec<Gather>,
    pub(super) frees: Vec<Free>,
}

impl ResidencyCounter {
    /// Gathers of `sequence` on rank `r`. `full` writes [`ResidencyCounter::gathers`] and `frees`
    /// too.
    pub(super) fn count(
        &mut self,
        p: &Problem,
        r: usize,
        sequence: &RankSequence,
        full: bool,
    ) -> usize {
        if !full && !p.tight {
            return p.v;
        }
        if !full && let Some(slots) = p.slots[r] {
            return self.count_alike(p, sequence, slots);
        }
        self.visits(p, sequence);
        self.next_uses();
        self.gathers.clear();
        self.frees.clear();
        self.held.clear();
        let (mut used, mut gate, mut count) = (0u64, 0u32, 0);
        for j in 0..self.visits.len() {
            let (v, first, last) = self.visits[j];
            match self.held.iter_mut().find(|held| held.0 == v) {
                Some(held) => (held.1, held.2) = (self.next[j], last),
                None => {
                    count += 1;
                    let weight = p.weight[r * p.v + usize::from(v)];
                    while !self.held.is_empty() && used.saturating_add(weight) > p.room {
                        let drop = (0..self.held.len()).max_by_key(|&h| self.held[h].1);
                        let (gone, _, last_use) = self.held.swap_remove(drop.expect("not empty"));
                        used -= p.weight[r * p.v + usize::from(gone)];
                        gate = gate.max(last_use + 1);
                        if full {
                            self.frees.push(Free { after: last_use, v: u32::from(gone) });
                        }
                    }
                    used += weight;
                    self.held.push((v, self.next[j], last));
                    if full {
                        let take = p.gather[r * p.v + usize::from(v)];
                        self.gathers.push(Gather { gate, entry: first, v: u32::from(v), take });
                    }
                }
            }
        }
        if full {
            let rest = self.held.iter().map(|held| Free { after: held.2, v: u32::from(held.0) });
            self.frees.extend(rest);
        }
        count
    }

    /// Gathers where all stages of a rank are of one size and `slots` fit: all visits but those
    /// before which their stage can be kept since the last one. One slot is for the stage in use,
    /// and keeping as many as the others hold is scheduling intervals: by their ends, each into
    /// the slot that was free for the shortest time.
    fn count_alike(&mut self, p: &Problem, sequence: &RankSequence, slots: usize) -> usize {
        let (mut open, spare, v) = (u8::MAX, p.classes as u8, p.v as u8);
        // Of each stage's last visit, and when each slot is free; visits count from 2.
        let mut last = [0u32; super::sequence::STAGES_MAX];
        let mut free = [1u32; super::sequence::STAGES_MAX];
        let free = &mut free[..slots - 1];
        let (mut visit, mut count) = (1u32, 0);
        for &entry in &sequence.entries {
            let stage = if entry >= v { entry - v } else { entry };
            if stage == open || entry == spare {
                continue;
            }
            open = stage;
            visit += 1;
            let since = std::mem::replace(&mut last[usize::from(stage)], visit);
            let fits = free.iter_mut().filter(|end| **end <= since + 1 && since > 0);
            match fits.max() {
                Some(end) => *end = visit,
                None => count += 1,
            }
        }
        count
    }

    fn visits(&mut self, p: &Problem, sequence: &RankSequence) {
        self.visits.clear();
        let (mut open, spare) = (u8::MAX, p.classes as u8);
        for (j, &entry) in sequence.entries.iter().enumerate() {
            if entry == spare {
                continue;
            }
            let v = if entry >= p.v as u8 { entry - p.v as u8 } else { entry };
            if v != open {
                open = v;
                self.visits.push((v, j as u32, j as u32));
            } else if let Some(visit) = self.visits.last_mut() {
                visit.2 = j as u32;
            }
        }
    }

    fn next_uses(&mut self) {
        let mut next = [u32::MAX; super::sequence::STAGES_MAX];
        self.next.clear();
        self.next.resize(self.visits.len(), 0);
        for j in (0..self.visits.len()).rev() {
            let stage = usize::from(self.visits[j].0);
            self.next[j] = next[stage];
            next[stage] = j as u32;
        }
    }

    /// The most gradients that rank `r` holds at once: those being added to, and the one whose
    /// reduction is on its way until the next one starts. W run in the order of their B.
    pub(super) fn gradients(&mut self, p: &Problem, sequence: &RankSequence) -> usize {
        if p.units.len() == 1 {
            return p.v;
        }
        let (mut open, mut reducing, mut peak) = (0, 0, 0);
        for (&entry, &i) in sequence.entries.iter().zip(&sequence.batch) {
            let class = usize::from(entry);
            if class < p.v || class == p.classes {
                continue;
            }
            let i = usize::from(i);
            open += usize::from(i == 0 || p.unit[i - 1] != p.unit[i]);
            peak = peak.max(open + reducing);
            if ends_unit(p, i) {
                open -= 1;
                reducing = 1;
            }
        }
        peak
    }

    /// By how much a sequence breaks the limits on gathers and gradients.
    pub(super) fn excess(&mut self, p: &Problem, r: usize, sequence: &RankSequence) -> usize {
        let gathers = self.count(p, r, sequence, false).saturating_sub(p.gathers_max);
        let gradients = match p.gradients_max < p.v {
            true => self.gradients(p, sequence).saturating_sub(p.gradients_max),
            false => 0,
        };
        gathers + 2 * gradients
    }
}

/// Whether two sequences that differ within `range` alone visit stages in the same order, so that
/// they gather alike.
pub(super) fn visit_alike(
    p: &Problem,
    a: &RankSequence,
    b: &RankSequence,
    range: Range<usize>,
) -> bool {
    let before = stages(p, &a.entries[..range.start]).next_back().unwrap_or(u8::MAX);
    let (a, b) = (&a.entries[range.clone()], &b.entries[range]);
    visits(p, a, before).eq(visits(p, b, before))
}

/// The stage of every F and B.
fn stages(p: &Problem, entries: &[u8]) -> impl DoubleEndedIterator<Item = u8> {
    let (v, spare) = (p.v as u8, p.classes as u8);
    let used = entries.iter().filter(move |entry| **entry != spare);
    used.map(move |entry| if *entry >= v { entry - v } else { *entry })
}

/// The stages that are visited one after the other, the first being another than `open`.
fn visits(p: &Problem, entries: &[u8], mut open: u8) -> impl Iterator<Item = u8> {
    stages(p, entries).filter(move |stage| std::mem::replace(&mut open, *stage) != *stage)
}

/// Whether a W of micro-batch `i` is the last of its unit.
pub(super) fn ends_unit(p: &Problem, i: usize) -> bool {
    i + 1 == p.b || p.unit[i + 1] != p.unit[i]
}

#[cfg(test)]
mod tests {
    use super::super::random::Random;
    use super::super::{Budgets, Objective};
    use super::*;
    use zeropp_schedule::ir::looping;
    use zeropp_schedule::schedules::{OrderCosts, Shape};

    #[test]
    fn words_that_visit_stages_alike_gather_alike() {
        let mut random = Random::new(7);
        let shape = Shape { pp: 1, virtual_stages: 3, micro_batches: 12, unit: 12 };
        let budgets = Budgets { gathered: Some(2), ..Budgets::default() };
        let costs = OrderCosts::uniform(3, 1, 1, 1, 0);
        let p = Problem::new(&shape, &costs, &budgets, looping(1, 3), Objective::OwnSpan);
        let (mut residency, mut alike) = (ResidencyCounter::default(), 0);
        for _ in 0..2000 {
            let entries = (0..30).map(|_| random.below(p.classes + 1) as u8).collect();
            let old = RankSequence { entries, batch: vec![0; 30], threshold: 1 };
            let mut new = old.clone();
            let from = random.below(28);
            let to = from + 2 + random.below(29 - from).min(3);
            new.entries[from..to].rotate_left(1);
            let of = |residency: &mut ResidencyCounter, sequence: &RankSequence| {
                residency.count(&p, 0, sequence, true);
                residency.visits.iter().map(|visit| visit.0).collect::<Vec<_>>()
            };
            let same = of(&mut residency, &old) == of(&mut residency, &new);
            let reported = visit_alike(&p, &old, &new, from..to);
            assert!(same || !reported, "{old:?} {from}..{to}");
            alike += usize::from(reported);
        }
        assert!((100..1900).contains(&alike), "{alike}");
    }

    #[test]
    fn keeping_stages_by_intervals_gathers_as_often_as_belady() {
        let mut random = Random::new(6);
        let mut fewer = 0;
        for _ in 0..2000 {
            let (v, b) = (2 + random.below(4), 1 + random.below(6));
            let shape = Shape { pp: 1, virtual_stages: v, micro_batches: b, unit: b };
            let gathered = 1 + random.below(v - 1) as u64;
            let budgets = Budgets { gathered: Some(gathered), ..Budgets::default() };
            let costs = OrderCosts::uniform(v, 1, 1, 1, 0);
            let p = Problem::new(&shape, &costs, &budgets, looping(1, v), Objective::OwnSpan);
            let entries = (0..40).map(|_| random.below(p.classes + 1) as u8).collect();
            let sequence = RankSequence { entries, batch: vec![0; 40], threshold: 1 };
            let mut residency = ResidencyCounter::default();
            let count = residency.count(&p, 0, &sequence, false);
            assert_eq!(count, residency.count(&p, 0, &sequence, true), "{gathered}: {sequence:?}");
            fewer += usize::from(count < residency.visits.len());
        }
        assert!(fewer > 500, "{fewer}");
    }
}
