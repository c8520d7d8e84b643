//! Cuts beside the one whose longest stage is shortest. That one evens out stages, but a step takes
//! as long as the rank that has most to do, and a head that outlasts a block makes that the last
//! one. These even out ranks, with the head beside blocks or in a stage of its own; which of all is
//! best is for a simulated step to say.

use crate::cut::{BlockGroups, GroupTimes};

/// Cuts that are judged, at most, beside the first.
const MOST: usize = 9;
/// Of the busiest rank's work, so much less makes a cut worth a simulation.
const LESS: f64 = 0.99;
/// A step that takes so much of the first cut's or more is no reason for another.
pub(crate) const SHORTER: f64 = 0.99;

/// A model to be cut into stages that lie on ranks.
pub(crate) struct Recut<'a> {
    pub(crate) groups: &'a BlockGroups,
    pub(crate) times: &'a GroupTimes,
    /// The rank of each stage.
    pub(crate) placement: &'a [usize],
}

impl Recut<'_> {
    /// Blocks of each stage, of cuts whose busiest rank has clearly less to do than that of
    /// `first`, those first that have least; with the share of the first's that it has.
    pub(crate) fn candidates(&self, first: &[usize]) -> Vec<(Vec<usize>, f64)> {
        let most = self.busiest(first);
        let mut all: Vec<(Vec<usize>, f64)> = Vec::new();
        let mut add = |cut: Vec<usize>| {
            let share = self.busiest(&cut) / most;
            if share < LESS && all.iter().all(|(other, _)| *other != cut) {
                all.push((cut, share));
            }
        };
        for alone in [true, false] {
            if alone && (self.groups.tail().is_none() || self.placement.len() < 2) {
                continue;
            }
            if alone {
                self.balanced_but_head().into_iter().for_each(&mut add);
            }
            let ranks = self.ranks();
            let ends = [0, ranks - 1, ranks / 2];
            for (near, early) in ends.into_iter().flat_map(|near| [(near, false), (near, true)]) {
                self.evened(alone, near, early).into_iter().for_each(&mut add);
            }
        }
        all.sort_by(|a, b| a.1.total_cmp(&b.1));
        all.truncate(MOST);
        all
    }

    /// What the busiest rank has to do, of stages with so many blocks each.
    fn busiest(&self, cut: &[usize]) -> f64 {
        let mut ranks = vec![0.0; self.ranks()];
        for (rank, time) in self.placement.iter().zip(self.times.of_stages(cut)) {
            ranks[*rank] += time;
        }
        ranks.into_iter().fold(0.0, f64::max)
    }

    fn ranks(&self) -> usize {
        self.placement.iter().max().map_or(0, |most| most + 1)
    }

    /// The head alone in the last stage, and the others' longest as short as can be.
    fn balanced_but_head(&self) -> Option<Vec<usize>> {
        let stages = self.placement.len() - 1;
        let cut = self.groups.balanced(&self.times.without_tail(), stages, None).ok()??;
        let mut cut = self.groups.sizes(&cut);
        cut.push(0);
        Some(cut)
    }

    /// Ranks that have about as much to do each, the head `alone` in its stage or not: of ranks
    /// that tie the nearest to one get a block more, and a rank has what does not divide evenly in
    /// its early rounds or its late ones.
    fn evened(&self, alone: bool, near: usize, early: bool) -> Option<Vec<usize>> {
        let (stages, blocks) = (self.placement.len(), self.groups.len());
        let with_blocks = stages - usize::from(alone);
        let mut left = blocks.checked_sub(with_blocks)?;
        let rank_of = |stage: usize| self.placement[stage];
        // Blocks are about alike, but not where they are recomputed.
        let of_block = self.times.of_blocks();
        let each = |stage: usize| of_block[usize::from(stage < self.times.recomputing)];
        let mut cut = vec![1; stages];
        cut[with_blocks..].fill(0);
        let mut loads = vec![0.0; self.ranks()];
        (0..with_blocks).for_each(|stage| loads[rank_of(stage)] += each(stage));
        loads[rank_of(stages - 1)] += self.times.tail;
        let mine: Vec<Vec<usize>> = (0..self.ranks())
            .map(|rank| (0..with_blocks).filter(|stage| rank_of(*stage) == rank).collect())
            .collect();
        while left > 0 {
            let less = |a: &usize, b: &usize| {
                loads[*a].total_cmp(&loads[*b]).then(a.abs_diff(near).cmp(&b.abs_diff(near)))
            };
            let with_stages = (0..loads.len()).filter(|rank| !mine[*rank].is_empty());
            let rank = with_stages.min_by(less)?;
            let fewest = mine[rank].iter().map(|stage| cut[*stage]).min()?;
            let mut stages = mine[rank].iter().filter(|stage| cut[**stage] == fewest);
            let stage = *if early { stages.next() } else { stages.next_back() }?;
            cut[stage] += 1;
            loads[rank] += each(stage);
            left -= 1;
        }
        Some(cut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zeropp_schedule::ir::{looping, vee};

    /// An embedding, so many blocks that take 1 each, and a head that takes `tail`.
    fn model(blocks: usize, tail: f64) -> (BlockGroups, GroupTimes) {
        let is_block = (0..blocks + 2).map(|part| (1..=blocks).contains(&part));
        let mut kept = vec![1.0; blocks];
        kept[blocks - 1] += tail;
        let times = GroupTimes { recomputed: kept.clone(), kept, recomputing: 0, tail };
        (BlockGroups::new(is_block), times)
    }

    fn candidates(blocks: usize, tail: f64, placement: &[usize]) -> Vec<(Vec<usize>, f64)> {
        let (groups, times) = model(blocks, tail);
        let first = groups.balanced(&times, placement.len(), None).unwrap().unwrap();
        let first = groups.sizes(&first);
        Recut { groups: &groups, times: &times, placement }.candidates(&first)
    }

    #[test]
    fn a_long_head_gets_a_stage_of_its_own_where_that_evens_out_ranks() {
        // 32 stages of a block each: the last rank has the head beside its four.
        let all = candidates(32, 1.6, &looping(8, 4));
        assert!(!all.is_empty() && all.len() <= MOST);
        for (cut, share) in &all {
            assert_eq!((cut.iter().sum::<usize>(), cut[31]), (32, 0), "{cut:?}");
            assert!((share - 5.0 / 5.6).abs() < 1e-9, "{share}");
        }
        // No rank can have less than its four blocks and the head's share.
        assert!(candidates(32, 0.5, &looping(8, 4)).is_empty());
    }

    #[test]
    fn ranks_are_evened_out_where_stages_are_even_already() {
        // On 4 ranks in a V the first has both ends: 2 blocks beside a head that is as long as 4.
        let all = candidates(20, 4.0, &vee(4, 2));
        for (cut, share) in all.iter().filter(|(_, share)| *share < 0.76) {
            assert!((share - 6.0 / 8.0).abs() < 1e-9 && cut[0] + cut[7] == 2, "{all:?}");
        }
        assert!(all[0].1 < 0.76, "{all:?}");
        assert!(candidates(64, 0.0, &looping(8, 2)).is_empty(), "it is even");
        let alone = vec![(vec![2, 0], 0.9)];
        assert_eq!(candidates(2, 9.0, &looping(2, 1)), alone, "the last may have none");
    }
}
