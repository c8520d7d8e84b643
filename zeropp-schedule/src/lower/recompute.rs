//! Which stages full recomputation does again: the one rule that lowering follows, and that
//! whoever predicts before there is a program asks.

use crate::ir::{Action, Compute, Schedule};
use crate::schedules::Kind;

/// The stage of `rank` that keeps what its forward makes. Where `splits` says that B and W are
/// apart that is the last of several, whose backward follows its forward closely (ZeroPP §3.3), and
/// an only one whose backwards are not in order: a head that is done again before them has to make
/// its gradient in the order of the micro-batches. So does the last stage of all where samples are
/// cut into slices, whose backwards come from the last to the first.
pub(super) fn kept(schedule: &Schedule, splits: bool, rank: usize) -> Option<usize> {
    let mine = schedule.stages_of(rank);
    let has_head =
        schedule.slices_per_sample() > 1 && mine.last() == Some(&(schedule.stages() - 1));
    let is_kept = mine.len() > 1 || !has_backwards_in_order(schedule, rank);
    mine.last().copied().filter(|_| has_head || splits && is_kept)
}

fn has_backwards_in_order(schedule: &Schedule, rank: usize) -> bool {
    let computes = schedule.ranks[rank].iter().flat_map(Action::computes);
    let backwards = computes.filter(|t| matches!(t.kind, Compute::B | Compute::BW));
    // A slice of a head is never done again.
    backwards
        .filter(|t| schedule.wide_stage() != Some(t.stage))
        .is_sorted_by_key(|t| schedule.backward_place(t.stage, t.micro_batch))
}

/// The stages that full recomputation does again in the program of `schedule`, in order.
pub fn recomputed(schedule: &Schedule) -> Vec<usize> {
    let splits = schedule.splits_backward();
    let kept = |rank| kept(schedule, splits, rank);
    let kept: Vec<usize> = (0..schedule.pp()).filter_map(kept).collect();
    let is_kept = |stage: &usize| kept.contains(stage) || schedule.wide_stage() == Some(*stage);
    (0..schedule.stages()).filter(|stage| !is_kept(stage)).collect()
}

impl Kind {
    /// How many stages full recomputation does again of `pp` ranks with `virtual_stages` each, from
    /// the first on: every placement has the last of each rank's among the last P.
    pub fn recomputed(&self, pp: usize, virtual_stages: usize) -> usize {
        let kept = if self.splits && virtual_stages > 1 { pp } else { 0 };
        pp.saturating_mul(virtual_stages).saturating_sub(kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower::{LowerOptions, lower};
    use crate::schedules::{KINDS, Shape, StagesPerRank, generate};

    #[test]
    fn a_kind_and_its_programs_do_the_same_stages_again() {
        for kind in KINDS.iter().filter(|kind| !kind.is_searched()) {
            let numbers: &[usize] = match kind.stages {
                StagesPerRank::Exactly(_) => &[kind.stages.default_number()],
                StagesPerRank::MultipleOf(_) => &[2, 4],
                StagesPerRank::Any(_) => &[1, 2, 3],
            };
            for (pp, v) in
                [1, 2, 3].into_iter().flat_map(|pp| numbers.iter().map(move |v| (pp, *v)))
            {
                let shape = Shape { pp, virtual_stages: v, micro_batches: 6, unit: 6 };
                let schedule = generate(kind.name, &shape).unwrap();
                let shape = format!("{} on {pp} ranks with {v} stages", kind.name);
                assert_eq!(schedule.splits_backward(), kind.splits, "{shape}");
                let options = LowerOptions { recompute: true, ..LowerOptions::default() };
                let program = lower(&schedule, &options);
                let tasks = || program.ranks.iter().flatten().flat_map(Action::computes);
                let has_r = |s: &usize| tasks().any(|t| (t.kind, t.stage) == (Compute::R, *s));
                let redone: Vec<usize> = (0..pp * v).filter(has_r).collect();
                assert_eq!(redone, recomputed(&schedule), "{shape}");
                assert_eq!(redone, (0..kind.recomputed(pp, v)).collect::<Vec<_>>(), "{shape}");
            }
        }
    }
}
