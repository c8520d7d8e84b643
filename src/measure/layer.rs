//! One layer's F, B, W and R, the head's F and the optimizer, from a short real run.

use std::sync::{Arc, Barrier};

use burn::tensor::{DType, Tensor};
use zeropp_core::layer::Part;
use zeropp_pipeline::costs::{BlockTimes, measured};

use super::bare;
use super::products::repeated;
use crate::Error;
use crate::config::{Config, Precision, Recompute};
use crate::plan::times::flops;
use crate::trainer::Trainer;

/// Blocks of the run's stages: one with the embedding, some alone, one with the head. A run's
/// stages have several, too, of which one displaces the other's weights from the caches.
const BLOCKS: [usize; 3] = [1, 2, 1];
/// Micro-batches of a step.
const MICRO_BATCHES: usize = 4;
/// Steps, the first of which is not counted.
const STEPS: u64 = 6;
/// Bytes that an update moves of each parameter: parameter, gradient and two moments are read,
/// three of them written.
const UPDATE_BYTES: f64 = 28.0;
/// Elements of the tensors that passes are measured with.
const PASS: usize = 1 << 22;

/// What a rank does in a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerRates {
    /// Seconds of F, B, W and R of one block for a micro-batch.
    pub block_s: BlockTimes,
    /// Floating-point operations in a second of each of them, everything that they do included.
    pub block_flops_per_s: BlockTimes,
    /// Seconds of the head's F, which makes its gradients too.
    pub head_s: f64,
    /// Floating-point operations in a second of it.
    pub head_flops_per_s: f64,
    /// Bytes in a second that an update moves.
    pub update_bytes_per_s: f64,
    /// Bytes in a second that a pass over tensors reads and writes.
    pub memory_bytes_per_s: f64,
    /// Seconds of a step that no action takes: ranks tell each other how it went.
    pub step_end_s: f64,
}

/// Measures with so many ranks at once, each with the whole of a small model.
///
/// # Errors
/// Too little memory, or a run that fails.
pub(super) fn measure(config: &Config, ranks: usize) -> Result<LayerRates, Error> {
    let config = Config {
        dp: ranks,
        layers: BLOCKS.iter().sum(),
        virtual_stages: Some(BLOCKS.len()),
        micro_batches: Some(MICRO_BATCHES),
        unit: Some(MICRO_BATCHES),
        stages: Some(BLOCKS.map(|blocks| blocks.to_string()).join(",")),
        recompute: Recompute::Full,
        steps: STEPS,
        ..bare(config)
    };
    let trainer = Trainer::new(config)?;
    let mut steps = Vec::new();
    let (_, timeline) = trainer.train_to_timeline(|step| steps.push(step.step_s))?;
    let costs = measured(&timeline).map_err(|e| Error::Model(e.to_string()))?;
    let blueprint = &trainer.blueprint;
    let times: Vec<BlockTimes> = costs
        .stages
        .iter()
        .map(|s| [s.f_ns, s.b_ns, s.w_ns, s.r_ns].map(|ns| ns as f64 / 1e9))
        .collect();
    let parts = &blueprint.model.parts;
    let of = |part: &Part| flops(part, blueprint.batch, false);
    let block = of(parts.iter().find(|part| part.is_block()).expect("blocks"));
    let block_s = times[1].map(|s| s / BLOCKS[1] as f64);
    let head = of(parts.last().expect("a head"));
    // What the last stage takes beside a block, F, B and W together, is the head's: its share of F
    // alone would carry the noise of three.
    let sum = |times: &BlockTimes| times[..3].iter().sum::<f64>();
    let head_s = (sum(&times[2]) - sum(&block_s)).max(0.01 * sum(&times[2]));
    let elements: u64 = blueprint.plan.ranks[0].memory.parameter_shard / 4;
    let update_s = (costs.step_ns as f64 / 1e9).max(1e-9);
    let recomputed = &blueprint.recomputed.whole;
    let stage = |(s, times): (usize, &BlockTimes)| {
        sum(times) + if recomputed.contains(&s) { times[3] } else { 0.0 }
    };
    let work = MICRO_BATCHES as f64 * times.iter().enumerate().map(stage).sum::<f64>();
    let sums: u64 = costs.stages.iter().map(|s| s.replica_reduce_ns).sum();
    let actions = work + update_s + sums as f64 / 1e9;
    Ok(LayerRates {
        step_end_s: (super::median(steps.split_off(1)) - actions).max(0.0),
        block_s,
        block_flops_per_s: std::array::from_fn(|i| block[i] / block_s[i].max(1e-9)),
        head_s,
        head_flops_per_s: head[0] / head_s,
        update_bytes_per_s: UPDATE_BYTES * elements as f64 / update_s,
        memory_bytes_per_s: passes(blueprint.config.devices()?, &blueprint.config, ranks),
    })
}

/// Bytes in a second of sums of two tensors, on all ranks at once.
fn passes(devices: zeropp_core::device::Devices, config: &Config, ranks: usize) -> f64 {
    let dtype = if config.precision == Precision::Fp32 { DType::F32 } else { DType::BF16 };
    let barrier = Arc::new(Barrier::new(ranks));
    let seconds = std::thread::scope(|scope| {
        let of = |rank: usize| {
            let (device, barrier) = (devices.of(rank), barrier.clone());
            scope.spawn(move || {
                let x = Tensor::<1>::ones([PASS], (&device, dtype));
                barrier.wait();
                repeated(|| {
                    let y = x.clone() + x.clone();
                    drop(y.slice([0..1]).into_data());
                })
            })
        };
        let threads: Vec<_> = (0..ranks).map(of).collect();
        super::median(threads.into_iter().map(|t| t.join().expect("a sum")).collect())
    });
    3.0 * (PASS * dtype.size()) as f64 / seconds
}
