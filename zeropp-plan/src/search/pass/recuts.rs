//! Other cuts of the layouts that may be the best: whether one makes a step shorter is simulated.

use super::super::order::in_order;
use super::Pass;
use crate::cores;
use crate::exact::{self, Planned, Simulation};
use crate::recut::SHORTER;

/// Layouts that may be cut again: actions of those that are, and how far their steps may be above
/// the best.
const RECUT_BUDGET: usize = 60_000;
const RECUT_AGAIN: usize = 10_000;
const RECUT_NEAR: f64 = 1.5;

impl Pass<'_> {
    /// Cuts the layouts again that may be faster than all others then: whose step, less what the
    /// busiest rank has less to do, is short enough. Which cuts there are, [`Recut`] says; ties go
    /// to the cut whose longest stage is shortest.
    ///
    /// [`Recut`]: crate::recut::Recut
    pub(super) fn cut_again(&mut self, memory: u64) {
        let mut budget = if self.again { RECUT_AGAIN } else { RECUT_BUDGET };
        let Some(best_s) = self.fitting(memory).map(|p| p.step_s).min_by(f64::total_cmp) else {
            return;
        };
        let (job, models, recut) = (self.job, &mut self.models, &self.recut);
        let near = self.known.values().flatten().filter(|p| {
            let is_new = !recut.contains_key(&p.layout);
            is_new && p.layout.pp > 1 && p.step_s < RECUT_NEAR * best_s
        });
        let mut hopes: Vec<(f64, Planned, Vec<Vec<usize>>)> = Vec::new();
        for planned in near {
            let others = models.recuts(job, &planned.layout, &planned.blocks);
            let Some((_, share)) = others.first() else { continue };
            // All the rest of a step may shrink with the busiest rank's work, but hardly does.
            let hope = planned.step_s * share;
            hopes.push((hope, planned.clone(), others.into_iter().map(|(cut, _)| cut).collect()));
        }
        hopes.sort_by(|a, b| a.0.total_cmp(&b.0).then_with(|| in_order(&a.1, &b.1)));
        for (_, planned, cuts) in hopes {
            let each = exact::actions(&planned.layout);
            if budget == 0 {
                break;
            }
            budget = budget.saturating_sub(each);
            let found = self.recuts_of(&planned, cuts);
            self.recut.insert(planned.layout, found);
        }
    }

    /// `planned` with those of these cuts that are shorter.
    pub(super) fn recuts_of(&mut self, planned: &Planned, cuts: Vec<Vec<usize>>) -> Vec<Planned> {
        let layout = &planned.layout;
        let with_stages =
            |blocks: Vec<usize>| (self.models.stages_with(self.job, layout, &blocks, &[]), blocks);
        let cuts: Vec<_> = cuts.into_iter().map(with_stages).collect();
        let (job, made) = (self.job, &self.models.made);
        let found = cores::map(&cuts, |(stages, blocks)| {
            Some(Simulation::of(job, layout, stages, made).ok()?.planned(blocks))
        });
        let is_shorter = |p: &Planned| p.step_s < SHORTER * planned.step_s;
        found.into_iter().flatten().filter(is_shorter).collect()
    }
}
