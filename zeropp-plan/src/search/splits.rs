//! The layouts whose head is better split over their ranks: by the function that a run asks, with
//! the times of a plan.

use std::sync::Arc;

use super::Models;
use crate::cores;
use crate::exact::{Planned, Simulation};
use crate::layout::{Job, Layout};
use crate::split::{self, Predicted};
use crate::stages::Stage;

/// A layout with its stages, their blocks, and behind the stages the slices of its head.
type Cut<'a> = (&'a Layout, Arc<[Stage]>, Vec<usize>);

impl Models {
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
            Predicted { step: p.step_s, fits }
        };
        let mut begin = 0;
        let of = |(whole, end): (&Option<Planned>, usize)| {
            let mine = all.by_ref().take(end - std::mem::replace(&mut begin, end));
            let mine: Vec<_> = mine
                .flatten()
                .map(|p| {
                    let of = predicted(&p);
                    (p, of)
                })
                .collect();
            let (split, _) = split::chosen(whole.as_ref().map(predicted), mine)?;
            Some(split)
        };
        wholes.iter().zip(ends).map(of).collect()
    }

    /// The slices that are worth a simulation.
    fn candidates<'a>(&mut self, job: &Job, whole: &'a Planned) -> Vec<Cut<'a>> {
        let layout = &whole.layout;
        let ids = job.model.decoder.vocabulary;
        let with_head = self.stages_of(job, whole);
        if !split::may_gain(&busy(layout, &with_head)) && whole.worst().1.total() <= job.memory {
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
