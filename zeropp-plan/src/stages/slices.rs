//! Stages whose samples are cut into slices: what each takes and keeps.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use zeropp_model::layer::BatchShape;
use zeropp_schedule::costs::{SampleGrowth, SliceCut, TimeGrowth, of_slices};
use zeropp_schedule::head::HeadTree;
use zeropp_schedule::memory::StageBytes;
use zeropp_schedule::simulate::{Costs, StageCosts};

use super::{ModelCosts, Stage, StageSlice, slice_shape};
use crate::bytes::{LayerSizes, StageForm};
use crate::layout::{Job, Layout};
use crate::parts::Parts;
use crate::slices::SampleSlices;
use crate::split::{slice_bytes, slice_sizes};
use crate::work::{LayerWork, of_parts};

/// What is known of a model's slices.
#[derive(Clone, Debug, Default)]
pub(super) struct OfSlices {
    /// By their number.
    cuts: HashMap<usize, Arc<SampleSlices>>,
    growths: Option<Arc<[LayerGrowth]>>,
}

/// Seconds of a layer's F, B, W and R of a sample that grow by pairs of tokens, and those that each
/// slice has as the sample has them.
#[derive(Clone, Copy, Debug, Default)]
struct LayerGrowth {
    pairs: [f64; 4],
    each: [f64; 4],
}

impl LayerGrowth {
    /// Of a layer that takes so many seconds for a sample, and for a half and a quarter of one:
    /// what grows by pairs of tokens, by tokens, and not at all.
    fn new(whole: [f64; 4], half: [f64; 4], quarter: [f64; 4]) -> LayerGrowth {
        let of = |i: usize| {
            let (first, second) = (whole[i] - half[i], half[i] - quarter[i]);
            let pairs = (8.0 / 3.0 * (first - 2.0 * second)).clamp(0.0, whole[i]);
            let by_tokens = (2.0 * first - 1.5 * pairs).clamp(0.0, whole[i] - pairs);
            (pairs, whole[i] - pairs - by_tokens)
        };
        LayerGrowth {
            pairs: std::array::from_fn(|i| of(i).0),
            each: std::array::from_fn(|i| of(i).1),
        }
    }
}

impl ModelCosts {
    fn growths(&mut self, job: &Job) -> Arc<[LayerGrowth]> {
        let machine = &job.machine;
        let seconds = |seq: usize| -> Vec<[f64; 4]> {
            let batch = job.compute.batch(1, seq);
            let parts = job.model.decoder.parts();
            of_parts(&parts, |part| LayerWork::new(part, batch, &job.compute).seconds(machine))
        };
        let seq = job.model.seq;
        let made = || {
            let (whole, half, quarter) = (seconds(seq), seconds(seq / 2), seconds(seq / 4));
            let layers = whole.iter().zip(&half).zip(&quarter);
            layers
                .map(|((whole, half), quarter)| LayerGrowth::new(*whole, *half, *quarter))
                .collect()
        };
        self.of_slices.growths.get_or_insert_with(made).clone()
    }

    /// How many times as long everything takes in so many slices.
    pub(crate) fn overhead(&mut self, job: &Job, slices: usize) -> f64 {
        if slices == 1 {
            return 1.0;
        }
        let sum = |of: &[f64; 4]| of[..3].iter().sum::<f64>();
        let each: f64 = self.growths(job).iter().map(|layer| sum(&layer.each)).sum();
        let all: f64 = self.layers.iter().map(|layer| sum(&layer.seconds(&job.machine))).sum();
        1.0 + (slices - 1) as f64 * each / all
    }

    /// The cut of a run, and all that it comes to.
    fn sample_slices(&mut self, job: &Job, n: usize) -> Option<Arc<SampleSlices>> {
        if let Some(cut) = self.of_slices.cuts.get(&n) {
            return Some(cut.clone());
        }
        let seq = job.model.seq;
        let batch =
            |seq: usize| BatchShape { keeps_probabilities: false, ..job.compute.batch(1, seq) };
        let half = parts(job, batch(seq / 2));
        let (tokens, growth) = SampleSlices::cut(seq, n, SliceCut::Work, [&self.parts, &half]);
        let made = SampleSlices::new(tokens?, growth, batch, |batch| parts(job, batch));
        let made = Arc::new(made);
        self.of_slices.cuts.insert(n, made.clone());
        Some(made)
    }

    /// Gives stages what they have for each slice; none where there are fewer blocks of the grid
    /// than slices.
    pub(super) fn cut_samples(
        &mut self,
        job: &Job,
        layout: &Layout,
        ranges: &Vec<Range<usize>>,
        stages: &mut [Stage],
    ) {
        let Some(cut) = self.sample_slices(job, layout.slices) else { return };
        let growths = self.growths(job);
        let bytes = cut.bytes(ranges, |stage| self.form(job, layout, stage));
        let each = bytes.chunks_exact(layout.slices);
        for ((stage, range), bytes) in stages.iter_mut().zip(ranges).zip(each) {
            let growth = growth(&growths[range.clone()], &stage.costs);
            let whole = Costs { stages: vec![stage.costs], ..Costs::default() };
            let times = of_slices(&whole, 1, &growth, cut.tokens()).stages;
            // As a run estimates them.
            let by_flop = cut.times(vec![stage.by_flop], 1);
            stage.slices = joined(cut.tokens(), times, bytes.to_vec(), by_flop);
        }
    }

    /// The same for the slices of a head, whose messages are these, of all ranks.
    pub(super) fn cut_head(
        &mut self,
        job: &Job,
        layout: &Layout,
        messages: &HeadTree,
        ranks: &mut [Stage],
    ) {
        let Some(cut) = self.sample_slices(job, layout.slices) else { return };
        let (decoder, form) = (&job.model.decoder, self.form(job, layout, layout.stages()));
        let head = self.layers.last().expect("a model has a head");
        let all: u64 = cut.tokens().iter().sum();
        for (rank, stage) in ranks.iter_mut().enumerate() {
            let shape = slice_shape(decoder, messages, rank);
            let weight = head.sizes.parameters().last().filter(|_| messages.has(rank));
            let bytes = |tokens: &u64| {
                let batch = job.compute.batch(1, *tokens as usize);
                let sizes = weight.map(|weight| slice_sizes(weight, &shape, batch, decoder.tied));
                let form = StageForm { message: form.message / all * tokens, ..form };
                slice_bytes(sizes.as_ref(), &form, *tokens as usize)
            };
            let bytes = cut.tokens().iter().map(bytes).collect();
            let [times, by_flop] =
                [stage.costs, stage.by_flop].map(|whole| cut.times(vec![whole], 0));
            stage.slices = joined(cut.tokens(), times, bytes, by_flop);
        }
    }
}

fn joined(
    tokens: &[u64],
    costs: Vec<StageCosts>,
    bytes: Vec<StageBytes>,
    by_flop: Vec<StageCosts>,
) -> Vec<StageSlice> {
    let each = tokens.iter().zip(costs).zip(bytes).zip(by_flop);
    each.map(|(((tokens, costs), bytes), by_flop)| StageSlice {
        tokens: *tokens,
        costs,
        bytes,
        by_flop,
    })
    .collect()
}

/// How the times of a stage grow that has these layers and takes `costs` for a sample.
fn growth(layers: &[LayerGrowth], costs: &StageCosts) -> SampleGrowth {
    let share = |of: fn(&LayerGrowth) -> &[f64; 4], i: usize, ns: u64| {
        let seconds: f64 = layers.iter().map(|layer| of(layer)[i]).sum();
        (seconds * 1e9 / ns.max(1) as f64).clamp(0.0, 1.0)
    };
    let of = |i: usize, ns: u64| {
        let pairs = share(|layer| &layer.pairs, i, ns);
        TimeGrowth { pairs, each: share(|layer| &layer.each, i, ns).min(1.0 - pairs) }
    };
    SampleGrowth {
        f: of(0, costs.f_ns),
        b: of(1, costs.b_ns),
        w: of(2, costs.w_ns),
        r: of(3, costs.r_ns),
    }
}

fn parts(job: &Job, batch: BatchShape) -> Parts {
    let decoder = &job.model.decoder;
    let all = decoder.parts();
    let sizes = of_parts(&all, |part| {
        let sizes = LayerSizes::new(part.parameters(), part.role(), part.cost(batch));
        (sizes, part.is_block())
    });
    Parts::new(sizes, decoder.tied, batch.tokens())
}
