//! A model cut in every way that was asked for.

use std::collections::HashMap;
use std::sync::Arc;

use crate::layout::{Job, Layout};
use crate::stages::{ModelCosts, Stage};

/// The model cut in every way that was asked for.
pub struct Models {
    of_samples: HashMap<usize, ModelCosts>,
    cuts: HashMap<(usize, usize), Option<Vec<usize>>>,
    /// The last stages, which many layouts in a row have: those of all kinds and units.
    last: Option<(Alike, Arc<[Stage]>)>,
}

/// What all layouts with the same stages share: one that stands for them, and bytes of an element
/// of packed weights.
type Alike = ((Layout, bool), u64);

impl Models {
    /// None yet.
    pub fn new(job: &Job) -> Models {
        let of_samples = HashMap::from([(1, ModelCosts::new(job, 1))]);
        Models { of_samples, cuts: HashMap::new(), last: None }
    }

    /// The blocks of each stage as a run of `layout` cuts by itself, where that is known.
    pub(crate) fn cut_of_run(&mut self, job: &Job, layout: &Layout) -> Option<Vec<usize>> {
        self.model(job, layout.micro_batch_size).cut_of_run(layout)
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

    /// The stages of a layout with so many blocks each.
    pub fn stages_of(&mut self, job: &Job, layout: &Layout, blocks: &[usize]) -> Arc<[Stage]> {
        self.model(job, layout.micro_batch_size).stages(job, layout, blocks).into()
    }

    fn model(&mut self, job: &Job, samples: usize) -> &mut ModelCosts {
        self.of_samples.entry(samples).or_insert_with(|| ModelCosts::new(job, samples))
    }

    /// The stages of a layout, and the blocks of each; none where there are too few blocks.
    pub fn stages(&mut self, job: &Job, layout: &Layout) -> Option<(Arc<[Stage]>, Vec<usize>)> {
        let samples = layout.micro_batch_size;
        let model = self.of_samples.entry(samples).or_insert_with(|| ModelCosts::new(job, samples));
        let stages = layout.stages();
        let cut = self.cuts.entry((samples, stages));
        let cut = cut.or_insert_with(|| model.cut(stages, &job.machine)).clone()?;
        let key = (layout.of_stages(), layout.packed_bytes(job.compute.packing));
        if let Some((of, stages)) = &self.last
            && *of == key
        {
            return Some((stages.clone(), cut));
        }
        let stages: Arc<[Stage]> = model.stages(job, layout, &cut).into();
        self.last = Some((key, stages.clone()));
        Some((stages, cut))
    }
}
