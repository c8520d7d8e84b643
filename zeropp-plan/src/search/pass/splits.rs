//! The layouts whose head is better split over their ranks: by the function that a run asks, with
//! the times of a plan.

use std::sync::Arc;

use super::Pass;
use crate::cores;
use crate::exact::{Planned, Simulation};
use crate::layout::{Job, Layout};
use crate::search::models::Models;
use crate::search::order::in_order;
use crate::split::{self, PredictedStep};
use crate::stages::Stage;

/// A layout with its stages, their blocks, and behind the stages the slices of its head.
type Cut<'a> = (&'a Layout, Arc<[Stage]>, Vec<usize>);

/// Layouts whose heads are split at once, and at most.
const AT_ONCE: usize = 4;
const SPLIT_MAX: usize = 12;
/// The share of a step that even stages may wait less for each other.
const WAITS: f64 = 0.05;

impl Pass<'_> {
    /// Splits the heads of the layouts that may be faster than all others then: whose step, less
    /// what the rank with the head has more to do, is short enough. Returns whether one is.
    pub(super) fn split_heads(&mut self, memory: u64) -> bool {
        let (job, models, split) = (self.job, &mut self.models, &self.split);
        let may = |p: &&Planned| job.may_split_head(&p.layout) && !split.contains_key(&p.layout);
        let least = |p: &Planned| p.worst().1.total();
        let mut all: Vec<(f64, Planned)> = self
            .known
            .values()
            .flatten()
            .filter(may)
            .cloned()
            .filter_map(|p| Some((models.hope(job, &p)?, p)))
            .collect();
        let fits = self.fitting(memory).next().is_some();
        all.sort_by(|(a, p), (b, q)| {
            let memory = if fits { std::cmp::Ordering::Equal } else { least(p).cmp(&least(q)) };
            memory.then(a.total_cmp(b)).then_with(|| in_order(p, q))
        });
        let best_s = |pass: &Pass<'_>| {
            pass.fitting(memory).map(|p| p.step_s).min_by(f64::total_cmp).unwrap_or(f64::INFINITY)
        };
        let before = best_s(self);
        all.truncate(if self.again { AT_ONCE } else { SPLIT_MAX });
        for some in all.chunks(AT_ONCE) {
            if some[0].0 >= best_s(self) {
                break;
            }
            let wholes: Vec<_> = some.iter().map(|(_, planned)| Some(planned.clone())).collect();
            let found = self.models.splits(self.job, &wholes);
            let layouts = some.iter().map(|(_, planned)| planned.layout.clone());
            self.split.extend(layouts.zip(found));
        }
        best_s(self) < before
    }
}

impl Models {
    /// Seconds that a step takes at least with a split head, about: the busiest rank gives some of
    /// its work away, and stages that are even wait less for each other.
    fn hope(&mut self, job: &Job, whole: &Planned) -> Option<f64> {
        let layout = &whole.layout;
        let mut ranks = busy(layout, &self.stages_of(job, whole));
        let most = ranks.iter().copied().fold(0.0, f64::max);
        let mean = ranks.iter().sum::<f64>() / ranks.len() as f64;
        ranks[*layout.placement().last()?] -= 1e9 * self.head_s(job, layout);
        let least = ranks.into_iter().fold(mean, f64::max);
        Some(whole.step_s * (1.0 - WAITS) * least / most.max(1.0))
    }

    /// Each of these layouts with its head split, where that is worth it.
    pub(crate) fn splits(&mut self, job: &Job, wholes: &[Option<Planned>]) -> Vec<Option<Planned>> {
        let mut cuts: Vec<Cut<'_>> = Vec::new();
        let mut ends = Vec::new();
        for whole in wholes {
            if let Some(whole) = whole.as_ref().filter(|p| job.may_split_head(&p.layout)) {
                cuts.extend(self.candidates(job, whole));
            }
            ends.push(cuts.len());
        }
        let all = cores::map(&cuts, |(layout, stages, blocks)| {
            Some(Simulation::new(job, layout, stages).ok()?.planned(blocks))
        });
        let mut all = all.into_iter();
        let predicted = |p: &Planned| {
            let fits = p.worst().1.total() <= job.memory;
            PredictedStep { step: p.step_s, fits }
        };
        let mut begin = 0;
        let of = |(whole, end): (&Option<Planned>, usize)| {
            let mine = all.by_ref().take(end - std::mem::replace(&mut begin, end));
            let mine: Vec<_> = mine.flatten().map(|p| (p.clone(), predicted(&p))).collect();
            let (split, _) = split::chosen(whole.as_ref().map(predicted), mine)?;
            Some(split)
        };
        wholes.iter().zip(ends).map(of).collect()
    }

    /// The slices that are worth a simulation.
    fn candidates<'a>(&mut self, job: &Job, whole: &'a Planned) -> Vec<Cut<'a>> {
        let layout = &whole.layout;
        let ids = job.model.decoder.vocabulary;
        let fits = whole.worst().1.total() <= job.memory;
        if !split::is_worth_trying(fits, &busy(layout, &self.stages_of(job, whole))) {
            return Vec::new();
        }
        let Some((_, blocks)) = self.stages_but_head(job, layout) else { return Vec::new() };
        let even = split::even(ids, layout.pp);
        let stages = self.stages_with(job, layout, &blocks, &even);
        let (own, slices) = stages.split_at(layout.stages());
        let head = slices.iter().map(of_stage).sum();
        let poured = split::poured(ids, &busy(layout, own), head);
        let mut all = vec![(layout, stages, blocks.clone())];
        if poured != even {
            all.push((layout, self.stages_with(job, layout, &blocks, &poured), blocks));
        }
        all
    }
}

fn of_stage(stage: &Stage) -> f64 {
    (stage.costs.f_ns + stage.costs.b_ns + stage.costs.w_ns) as f64
}

/// What every rank computes for a micro-batch.
fn busy(layout: &Layout, stages: &[Stage]) -> Vec<f64> {
    let mut ranks = vec![0.0; layout.pp];
    for (rank, stage) in layout.placement().into_iter().zip(stages) {
        ranks[rank] += of_stage(stage);
    }
    ranks
}
