//! One layer's F, B, W and R, the head's F and the optimizer, from a short real run.

use burn::tensor::Tensor;
use zeropp_pipeline::costs::{BlockTimes, measured};
use zeropp_pipeline::ir::Action;
use zeropp_pipeline::simulate::{Costs, StageCosts};
use zeropp_pipeline::timeline::Timeline;

use super::bare;
use super::products::repeated;
use super::together::together;
use crate::Error;
use crate::config::{Config, Recompute};
use crate::trainer::Trainer;

/// Blocks of the run's stages: one with the embedding, some alone, one with the head. A run's
/// stages have several, too, of which one displaces the other's weights from the caches.
const BLOCKS: [usize; 3] = [1, 2, 1];
/// Micro-batches of a step.
const MICRO_BATCHES: usize = 4;
/// How many times as small the micro-batches of a third run are, or as large where they are of one
/// sample: what a block takes beside its FLOP is what does not grow with them. Small ones show it:
/// larger ones leave the caches, too.
const RATIO: usize = 3;
/// Steps; the median of them is reported.
const STEPS: u64 = 8;
/// Bytes that an update moves of each parameter: parameter, gradient and two moments are read,
/// three of them written.
const UPDATE_BYTES: f64 = 28.0;
/// Elements of the tensors that passes are measured with.
const PASS: usize = 1 << 22;

/// A rank's work in a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerRates {
    /// Seconds of F, B, W and R of one block for a micro-batch.
    pub block_s: BlockTimes,
    /// Of them, seconds that are the same for larger micro-batches.
    pub block_fixed_s: BlockTimes,
    /// Floating-point operations in a second of the rest of them.
    pub block_flops_per_s: BlockTimes,
    /// Seconds of the head's F, which makes its gradients too.
    pub head_s: f64,
    /// Floating-point operations in a second of it.
    pub head_flops_per_s: f64,
    /// Bytes in a second that an update moves.
    pub update_bytes_per_s: f64,
    /// Bytes in a second that a pass over tensors reads and writes.
    pub memory_bytes_per_s: f64,
    /// Seconds between the actions of two steps: ranks tell each other how it went.
    pub step_end_s: f64,
}

/// Measures with so many ranks at once, each with the whole of a small model.
///
/// # Errors
/// Too little memory, or a run that fails.
pub(super) fn measure(config: &Config, ranks: usize) -> Result<LayerRates, Error> {
    let samples = config.micro_batch_size;
    let recomputed = TimedRun::new(config, ranks, Recompute::Full, samples)?;
    // What takes more memory is done without where there is too little.
    let fitting = |samples| match TimedRun::new(config, ranks, Recompute::None, samples) {
        Err(Error::Memory(_)) => Ok(None),
        run => run.map(Some),
    };
    let plain = fitting(samples)?;
    let others = if samples == 1 { RATIO } else { (samples / RATIO).max(1) };
    let other = if plain.is_some() { fitting(others)? } else { None };
    let plain = plain.as_ref().unwrap_or(&recomputed);
    let blueprint = &plain.trainer.blueprint;
    let parts = &blueprint.model.parts;
    let of = |part: usize| blueprint.parts.flops(part, false);
    let block = of(parts.iter().position(|part| part.is_block()).expect("blocks"));
    let whole = plain.times[1];
    // Recomputation leaves in the caches what B and W read next. R is charged with what a block
    // takes longer by it, all in all, and other kinds' B and W stay what they are without.
    let r = (total(&recomputed.times[1]) - compute(&whole)).max(0.5 * whole[0]);
    let block_s = [whole[0], whole[1], whole[2], r].map(|s| s / BLOCKS[1] as f64);
    let other = other.map(|run| run.times[1].map(|s| s / BLOCKS[1] as f64));
    let ratio = others as f64 / samples as f64;
    let mut fixed = other.map_or([0.0; 4], |other| fixed_s(&block_s, &other, ratio));
    fixed[3] = fixed[0].min(0.5 * block_s[3]);
    let head = of(parts.len() - 1);
    // What the last stage takes beside a block, F, B and W together, is the head's: its share of F
    // alone would carry the noise of three.
    let last = compute(&plain.times[2]);
    let head_s = (last - compute(&block_s)).max(0.01 * last);
    let elements: u64 = blueprint.plan.ranks[0].held.peaks.parameter_shard / 4;
    let update_s = (plain.costs.step_ns as f64 / 1e9).max(1e-9);
    Ok(LayerRates {
        step_end_s: plain.step_end_s,
        block_s,
        block_fixed_s: fixed,
        block_flops_per_s: std::array::from_fn(|i| block[i] / (block_s[i] - fixed[i]).max(1e-9)),
        head_s,
        head_flops_per_s: head[0] / head_s,
        update_bytes_per_s: UPDATE_BYTES * elements as f64 / update_s,
        memory_bytes_per_s: passes(blueprint.config.devices()?, &blueprint.config, ranks)?,
    })
}

/// Seconds of `times` that do not grow with a micro-batch, as those of one `ratio` times as large
/// tell; between none and half.
fn fixed_s(times: &BlockTimes, other: &BlockTimes, ratio: f64) -> BlockTimes {
    std::array::from_fn(|i| {
        let fixed = (ratio * times[i] - other[i]) / (ratio - 1.0);
        fixed.clamp(0.0, 0.5 * times[i])
    })
}

/// Seconds of F, B and W together.
fn compute(times: &BlockTimes) -> f64 {
    times[..3].iter().sum()
}

/// Seconds of F, B, W and R together.
fn total(times: &BlockTimes) -> f64 {
    times.iter().sum()
}

/// A short run, and what its actions took.
struct TimedRun {
    trainer: Trainer,
    costs: Costs,
    /// Seconds of each stage's F, B, W and R.
    times: Vec<BlockTimes>,
    /// Seconds between the actions of two steps.
    step_end_s: f64,
}

impl TimedRun {
    fn new(
        config: &Config,
        ranks: usize,
        recompute: Recompute,
        micro_batch_size: usize,
    ) -> Result<TimedRun, Error> {
        let config = Config {
            dp: ranks,
            layers: BLOCKS.iter().sum(),
            virtual_stages: Some(BLOCKS.len()),
            micro_batches: Some(MICRO_BATCHES),
            unit: Some(MICRO_BATCHES),
            stages: Some(BLOCKS.map(|blocks| blocks.to_string()).join(",")),
            micro_batch_size,
            recompute,
            steps: STEPS,
            ..bare(config)
        };
        let trainer = Trainer::new(config)?;
        let (_, timeline) = trainer.train_to_timeline(|_| ())?;
        let costs = measured(&timeline).map_err(|e| Error::Model(e.to_string()))?;
        let seconds = |s: &StageCosts| [s.f_ns, s.b_ns, s.w_ns, s.r_ns].map(|ns| ns as f64 / 1e9);
        let times = costs.stages.iter().map(seconds).collect();
        Ok(TimedRun { trainer, costs, times, step_end_s: between_steps(&timeline) })
    }
}

/// Seconds from the end of a step's last action to the first one of the next, in the middle of all
/// ranks' steps.
fn between_steps(timeline: &Timeline) -> f64 {
    let mut gaps = Vec::new();
    for rank in &timeline.ranks {
        let ends = rank.spans.iter().filter(|span| span.action == Action::OptimizerStep);
        for end in ends.map(|span| span.end_ns) {
            let starts = rank.spans.iter().map(|span| span.start_ns);
            let next = starts.filter(|start| *start >= end).min();
            gaps.extend(next.map(|next| (next - end) as f64 / 1e9));
        }
    }
    if gaps.is_empty() { 0.0 } else { super::median(gaps) }
}

/// Bytes in a second of sums of two tensors, on all ranks at once.
///
/// # Errors
/// The system grants too few threads.
fn passes(
    devices: zeropp_core::device::Devices,
    config: &Config,
    ranks: usize,
) -> Result<f64, Error> {
    let dtype = config.compute_type();
    let seconds = together(ranks, |rank, ready| {
        let x = Tensor::<1>::ones([PASS], (&devices.of(rank), dtype));
        ready();
        repeated(|| {
            zeropp_core::device::wait_for(x.clone() + x.clone());
        })
    });
    Ok(3.0 * (PASS * dtype.size()) as f64 / super::median(seconds?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use zeropp_pipeline::timeline::{Lane, RankTimeline, Span};

    #[test]
    fn the_gap_between_steps_is_measured_from_action_to_action() {
        let lane = Lane::Compute;
        let span = |action, start_ns, end_ns| Span { lane, action, start_ns, end_ns };
        let work = Action::AllGather { stage: 0 };
        let step = |at| [span(work, at, at + 10), span(Action::OptimizerStep, at + 10, at + 30)];
        // The last step is followed by nothing.
        let spans = [step(0), step(37), step(72)].concat();
        let rank = RankTimeline { spans, ..RankTimeline::default() };
        let timeline = Timeline { ranks: vec![rank], ..Timeline::default() };
        // 7 and 5 ns.
        assert!([5e-9, 7e-9].contains(&between_steps(&timeline)));
        assert_eq!(between_steps(&Timeline::default()), 0.0);
    }

    #[test]
    fn fixed_time_does_not_grow_with_the_micro_batch() {
        // 1 + 2 n, 3 n, and what noise may make of it: less than in proportion, and more than that.
        let (times, larger) = ([3.0, 3.0, 4.0, 1.0], [7.0, 9.0, 4.0, 9.0]);
        assert_eq!(fixed_s(&times, &larger, 3.0), [1.0, 0.0, 2.0, 0.0]);
        // The first two as smaller ones tell.
        let times = fixed_s(&larger, &times, 1.0 / 3.0);
        for (found, fixed) in times.iter().zip([1.0, 0.0]) {
            assert!((found - fixed).abs() < 1e-9, "{times:?}");
        }
    }
}
