//! Samples in slices, with the costs that plans have: bubbles and memory of long samples.

use zeropp_model::parts::PartKind;
use zeropp_model::presets::Preset;
use zeropp_schedule::costs::{SampleGrowth, SliceCut, TimeGrowth, of_slices, slices_of};
use zeropp_schedule::ir::Schedule;
use zeropp_schedule::metrics::Metrics;
use zeropp_schedule::schedules::{Shape, generate_sliced};
use zeropp_schedule::simulate::simulate;

use super::*;
use crate::layout::ComputeSettings;
use crate::machines;

/// Tokens of a sample.
const SEQ: usize = 1 << 17;

/// Blocks of the model.
const BLOCKS: usize = 32;

/// A block of llama3-8b on an H100 whose products reach 0.65 of its peak.
struct LongBlock {
    /// Seconds of F, B, W and R of a sample, and the part that grows by pairs and by slices.
    seconds: [f64; 4],
    growth: SampleGrowth,
    kept: u64,
    stash: u64,
    /// Bytes of keys and values.
    context: u64,
}

impl LongBlock {
    fn new() -> LongBlock {
        let machine = Machine { flops_share: 0.65, ..machines::named("h100").unwrap() };
        let decoder = Preset::find("llama3-8b").unwrap().decoder;
        let parts = decoder.parts();
        let block = parts.iter().find(|part| matches!(part.kind, PartKind::Block(_))).unwrap();
        let compute = ComputeSettings::GPU;
        let of = |seq| LayerWork::new(block, compute.batch(1, seq), &compute);
        let (whole, half) = (of(SEQ), of(SEQ / 2));
        let (seconds, halves) = (whole.seconds(&machine), half.seconds(&machine));
        let gaps = [1.0, 2.0, 0.0, 1.0].map(|n| n * machine.layer_s);
        let growth: [TimeGrowth; 4] = std::array::from_fn(|i| {
            // What two halves do not have is half of all pairs.
            let pairs = 2.0 * ((seconds[i] - gaps[i]) - 2.0 * (halves[i] - gaps[i]));
            TimeGrowth { pairs: pairs / seconds[i], each: gaps[i] / seconds[i] }
        });
        let [f, b, w, r] = growth;
        LongBlock {
            seconds,
            growth: SampleGrowth { f, b, w, r },
            kept: whole.sizes.cost.activation_bytes,
            stash: whole.sizes.cost.stash_bytes,
            context: (2 * 2 * SEQ * decoder.kv_heads * decoder.head_dim) as u64,
        }
    }

    /// Stages of as many of these blocks each as there are for them.
    fn whole(&self, stages: usize) -> Costs {
        let each = BLOCKS / stages;
        let [f_ns, b_ns, w_ns, r_ns] = self.seconds.map(|s| ns(s * each as f64));
        let times = StageCosts { f_ns, b_ns, w_ns, r_ns, ..StageCosts::default() };
        let n = each as u64;
        let bytes = StageBytes {
            activation: n * self.kept,
            stash: n * self.stash,
            context_gradient: n * 2 * self.context,
            ..StageBytes::default()
        };
        Costs { stages: vec![times; stages], memory: vec![bytes; stages], ..Costs::default() }
    }

    /// Bubble in percent and GiB of the worst rank.
    fn run(&self, kind: &str, shape: Shape, slices: usize, cut: SliceCut) -> [f64; 2] {
        let whole = self.whole(shape.stages());
        let times = [whole.stages[0].f_ns, whole.stages[0].b_ns, whole.stages[0].w_ns];
        let tokens = slices_of(SEQ as u64, slices, cut, times, &self.growth).unwrap();
        let tokens = if slices == 1 { Vec::new() } else { tokens };
        let schedule: Schedule = generate_sliced(kind, &shape, &tokens).unwrap();
        let costs = match slices {
            1 => whole,
            _ => of_slices(&whole, whole.stages.len(), &self.growth, &tokens),
        };
        let timeline = simulate(&schedule, &costs).unwrap();
        let busy: u64 = timeline.ranks.iter().map(|rank| rank.busy_ns()).sum();
        let metrics = Metrics::new(&schedule, &timeline, &costs);
        let all = metrics.makespan_ns as f64 * shape.pp as f64;
        let held = metrics.peak_activation.iter().max().unwrap();
        [100.0 * (1.0 - busy as f64 / all), *held as f64 / (1u64 << 30) as f64]
    }
}

/// Kind; n; P, V, samples, unit; cut; bubble in per cent and GiB.
type Row = (&'static str, usize, [usize; 4], SliceCut, [f64; 2]);

/// The table by which rounds of a sample's slices were chosen: llama3-8b with samples of 131,072
/// tokens, nothing recomputed, equal stages without the head.
#[test]
fn long_samples_in_rounds_of_slices_wait_for_little_and_hold_little() {
    use SliceCut::Work;
    let block = LongBlock::new();
    let mut off = Vec::new();
    let rows: &[Row] = &[
        ("zeropp", 1, [8, 4, 1, 1], Work, [87.0, 68.0]),
        ("zeropp", 1, [8, 4, 2, 2], Work, [75.0, 136.0]),
        ("zeropp", 32, [8, 4, 1, 1], Work, [5.4, 69.0]),
        ("zeropp", 32, [8, 4, 2, 1], Work, [5.4, 69.0]),
        ("zeropp", 32, [8, 4, 2, 2], Work, [2.6, 137.0]),
        ("zeropp", 32, [8, 4, 8, 1], Work, [5.4, 69.0]),
        ("zeropp", 32, [8, 4, 8, 2], Work, [2.6, 137.0]),
        ("zeropp", 32, [4, 8, 4, 1], Work, [1.2, 137.0]),
        ("zeropp", 32, [4, 8, 4, 2], Work, [0.6, 273.0]),
        ("interleaved-zb", 32, [8, 4, 1, 1], Work, [5.4, 69.0]),
        ("interleaved-zb", 32, [8, 4, 2, 1], Work, [2.7, 83.0]),
        ("interleaved-zb", 32, [8, 4, 8, 1], Work, [0.7, 83.0]),
        ("interleaved-zb", 32, [16, 2, 16, 1], Work, [1.5, 57.0]),
        ("interleaved-zb", 32, [4, 8, 4, 1], Work, [0.3, 145.0]),
    ];
    for (kind, n, [pp, virtual_stages, micro_batches, unit], cut, want) in rows {
        let shape = Shape {
            pp: *pp,
            virtual_stages: *virtual_stages,
            micro_batches: *micro_batches,
            unit: *unit,
        };
        let found = block.run(kind, shape, *n, *cut);
        // Those of the table with a digit behind the point are within 0.1 points, the others 0.5.
        let near = if want[0].fract() == 0.0 { 0.5 } else { 0.1 };
        if (found[0] - want[0]).abs() > near + 0.05 || (found[1] - want[1]).abs() > 0.51 {
            off.push(format!("{kind} n {n} {shape:?} {cut}: {found:.2?}, not {want:?}"));
        }
    }
    assert!(off.is_empty(), "{}", off.join("\n"));
}
