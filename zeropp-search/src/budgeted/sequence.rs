//! Orders as sequences: what the search changes.
//!
//! An entry is a class (F or B of one of the rank's stages) and stands for that class's next
//! micro-batch; micro-batches being equal, first in first out loses nothing, and the sums of
//! gradients need it. The entry 2V asks for one W there. All other W are fillers: the decoder puts
//! them where the rank would wait, where memory runs out, and at the end.

use super::problem::Problem;

/// The order of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RankSequence {
    /// Classes, and 2V for a W.
    pub(super) entries: Vec<u8>,
    /// Micro-batch of each entry.
    pub(super) batch: Vec<u16>,
    /// The shortest wait that a W fills.
    pub(super) threshold: i64,
}

/// The order of every rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RankOrders {
    pub(super) sequences: Vec<RankSequence>,
    /// Micro-batches after which the order nearly repeats itself; 0 where none are known.
    pub(super) stride: usize,
}

/// A changed sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) rank: usize,
    /// The first entry that is another one now, or has to be timed anew.
    pub(super) from: usize,
    /// From here on all entries are what they were.
    pub(super) to: usize,
}

impl RankSequence {
    /// Writes `from` over it without giving memory back.
    pub(super) fn copy(&mut self, from: &RankSequence) {
        self.entries.clone_from(&from.entries);
        self.batch.clone_from(&from.batch);
        self.threshold = from.threshold;
    }

    /// Numbers all entries; false where a B comes before its F.
    pub(super) fn number(&mut self, v: usize) -> bool {
        let mut counts = [0u16; 2 * STAGES_MAX + 1];
        self.batch.clear();
        for &entry in &self.entries {
            let class = usize::from(entry);
            self.batch.push(counts[class]);
            counts[class] += 1;
            if class >= v && class < 2 * v && counts[class] > counts[class - v] {
                return false;
            }
        }
        true
    }

    /// Moves the `len` entries at `from` so that they start at `to`, and numbers what changed:
    /// false where that cannot be, the sequence then being spoilt.
    pub(super) fn shift(&mut self, v: usize, from: usize, to: isize, len: usize) -> bool {
        let n = self.entries.len();
        if from + len > n || to < 0 || to as usize + len > n || to as usize == from {
            return false;
        }
        let to = to as usize;
        let (low, high) = (from.min(to), from.max(to) + len);
        let mut next = [u16::MAX; 2 * STAGES_MAX + 1];
        for j in low..high {
            let class = usize::from(self.entries[j]);
            if next[class] == u16::MAX {
                next[class] = self.batch[j];
            }
        }
        let range = &mut self.entries[low..high];
        if to > from {
            range.rotate_left(len);
        } else {
            range.rotate_right(len);
        }
        for j in low..high {
            let class = usize::from(self.entries[j]);
            let i = next[class];
            self.batch[j] = i;
            next[class] += 1;
            if class >= v && class < 2 * v && next[class - v] != u16::MAX && i >= next[class - v] {
                return false;
            }
        }
        true
    }

    /// Where the entry of `class` and micro-batch `i` stands.
    pub(super) fn position(&self, class: usize, i: usize) -> Option<usize> {
        let is =
            |(entry, batch): (&u8, &u16)| usize::from(*entry) == class && usize::from(*batch) == i;
        self.entries.iter().zip(&self.batch).position(is)
    }
}

/// The most stages a rank that entries can name.
pub(super) const STAGES_MAX: usize = 32;

impl RankOrders {
    /// Words of these entries, all with one threshold; none where a B comes before its F or a
    /// entry is missing.
    pub(super) fn new(
        problem: &Problem,
        entries: Vec<Vec<u8>>,
        threshold: i64,
    ) -> Option<RankOrders> {
        let sequences = entries.into_iter().map(|entries| {
            let mut sequence = RankSequence { entries, batch: Vec::new(), threshold };
            let spare = u8::try_from(problem.classes).expect("few stages");
            let complete = sequence.entries.iter().filter(|l| **l != spare).count();
            let good = sequence.number(problem.v) && complete == problem.classes * problem.b;
            good.then_some(sequence)
        });
        Some(RankOrders { sequences: sequences.collect::<Option<_>>()?, stride: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(entries: &[u8]) -> RankSequence {
        let mut sequence =
            RankSequence { entries: entries.to_vec(), batch: Vec::new(), threshold: 1 };
        assert!(sequence.number(2));
        sequence
    }

    #[test]
    fn a_shift_numbers_as_a_whole_count_does() {
        // F0 F0 F1 F1 B1 B0 W B1 B0
        let start = sequence(&[0, 0, 1, 1, 3, 2, 4, 3, 2]);
        for from in 0..9 {
            for to in 0..9 {
                for len in 1..4 {
                    let mut moved = start.clone();
                    let good = moved.shift(2, from, to, len);
                    let mut whole = moved.clone();
                    let counted = whole.number(2);
                    if from + len <= 9 && to as usize + len <= 9 && from != to as usize {
                        assert_eq!(good, counted, "{from} {to} {len}");
                        assert!(!good || moved == whole);
                    } else {
                        assert!(!good);
                    }
                }
            }
        }
    }

    #[test]
    fn a_b_before_its_f_is_refused() {
        let mut sequence =
            RankSequence { entries: vec![0, 2, 3, 1], batch: Vec::new(), threshold: 1 };
        assert!(!sequence.number(2));
    }
}
