//! A model cut in every way that was asked for.

use std::collections::HashMap;
use std::sync::Arc;

use crate::exact::{MadePrograms, Planned};
use crate::layout::{Job, Layout};
use crate::stages::{ModelCosts, Stage};

/// The model cut in every way that was asked for.
pub struct Models {
    of_samples: HashMap<usize, ModelCosts>,
    /// By samples and stages, and whether the last one has the head.
    cuts: HashMap<(usize, usize, bool), Option<Vec<usize>>>,
    /// The last stages, which many layouts in a row have: those of all kinds and units. Cut without
    /// the head, and with it; each of kinds that split B, and of others.
    last: [[Option<Last>; 2]; 2],
    /// Programs that were made.
    pub(crate) made: MadePrograms,
}

/// What all layouts with the same stages share: one that stands for them, and bytes of an element
/// of packed weights.
type Alike = ((Layout, bool), u64);

/// Stages that were cut, and of which layouts.
type Last = (Alike, Arc<[Stage]>);

impl Models {
    /// None yet.
    pub fn new(job: &Job) -> Models {
        let of_samples = HashMap::from([(1, ModelCosts::new(job, 1))]);
        let (cuts, made) = (HashMap::new(), MadePrograms::default());
        Models { of_samples, cuts, last: Default::default(), made }
    }

    /// Whether a run cuts by itself as `planned` is cut, where that is known.
    pub(crate) fn is_cut_of_run(&mut self, job: &Job, planned: &Planned) -> bool {
        let layout = &planned.layout;
        let model = self.model(job, layout.micro_batch_size);
        let cut = model.cut_of_run(layout, planned.head_blocks.is_empty());
        cut.is_some_and(|cut| cut == planned.blocks)
    }

    /// Seconds that the head's F, B and W of a micro-batch take.
    pub(crate) fn head_s(&mut self, job: &Job, layout: &Layout) -> f64 {
        self.model(job, layout.micro_batch_size).head_s(&job.machine)
    }

    /// Cuts of a layout beside `first` that are worth a simulation, each with the share of the
    /// busiest rank's work that is left.
    pub(crate) fn recuts(
        &mut self,
        job: &Job,
        layout: &Layout,
        first: &[usize],
    ) -> Vec<(Vec<usize>, f64)> {
        self.model(job, layout.micro_batch_size).recuts(layout, &job.machine, first)
    }

    /// How many times as long everything takes in the slices of a layout as in whole samples.
    pub(crate) fn overhead(&mut self, job: &Job, layout: &Layout) -> f64 {
        self.model(job, layout.micro_batch_size).overhead(job, layout.slices)
    }

    /// The stages of a layout that was simulated, as it was cut.
    pub fn stages_of(&mut self, job: &Job, planned: &Planned) -> Arc<[Stage]> {
        let Planned { layout, blocks, head_blocks, .. } = planned;
        self.stages_with(job, layout, blocks, head_blocks)
    }

    /// The stages of a layout with so many blocks each, and of ranks so many of the head's rows.
    pub(super) fn stages_with(
        &mut self,
        job: &Job,
        layout: &Layout,
        blocks: &[usize],
        head_blocks: &[usize],
    ) -> Arc<[Stage]> {
        let model = self.model(job, layout.micro_batch_size);
        model.with_head(job, layout, blocks, head_blocks).into()
    }

    fn model(&mut self, job: &Job, samples: usize) -> &mut ModelCosts {
        self.of_samples.entry(samples).or_insert_with(|| ModelCosts::new(job, samples))
    }

    /// The stages of a layout, and the blocks of each; none where there are too few blocks.
    pub fn stages(&mut self, job: &Job, layout: &Layout) -> Option<(Arc<[Stage]>, Vec<usize>)> {
        self.cut(job, layout, true)
    }

    /// The same, cut as if there were no head.
    pub(super) fn stages_but_head(
        &mut self,
        job: &Job,
        layout: &Layout,
    ) -> Option<(Arc<[Stage]>, Vec<usize>)> {
        self.cut(job, layout, false)
    }

    fn cut(
        &mut self,
        job: &Job,
        layout: &Layout,
        has_head: bool,
    ) -> Option<(Arc<[Stage]>, Vec<usize>)> {
        let samples = layout.micro_batch_size;
        let model = self.of_samples.entry(samples).or_insert_with(|| ModelCosts::new(job, samples));
        let stages = layout.stages();
        let cut = self.cuts.entry((samples, stages, has_head));
        let cut = cut.or_insert_with(|| model.cut(stages, &job.machine, has_head)).clone()?;
        let key = (layout.of_stages(), layout.packed_bytes(job.compute.packing));
        let last = &mut self.last[usize::from(has_head)][usize::from(key.0.1)];
        if let Some((of, stages)) = last
            && *of == key
        {
            return Some((stages.clone(), cut));
        }
        let stages: Arc<[Stage]> = model.stages(job, layout, &cut).into();
        *last = Some((key, stages.clone()));
        Some((stages, cut))
    }
}
