//! What a rank holds: exactly, by the code that predicts for runs, and from below in closed form,
//! so that what does not fit need not be made.

use zeropp_schedule::ir::Schedule;
use zeropp_schedule::memory::{MemoryBytes, StageBytes, predict_both, predict_warm_up};

use crate::bytes::RankState;
use crate::layout::{Job, Layout, Packing, Recompute};
use crate::stages::Stage;

/// What a rank holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// At the moment when it holds most.
    pub at_once: MemoryBytes,
    /// The most of each kind; they are not all there at the same time.
    pub peaks: MemoryBytes,
}

/// What every pipeline rank holds, as a run of `program` predicts it.
pub fn exact(job: &Job, layout: &Layout, program: &Schedule, stages: &[Stage]) -> Vec<Held> {
    let held = |stages: &[Stage]| held(job, layout, program, stages);
    let packed = held(stages);
    let is_short = packed.iter().any(|rank| rank.at_once.total() > job.memory);
    if !is_short || !matches!(job.compute.packing, Packing::Auto(_)) {
        return packed;
    }
    // A run leaves the copies out where memory is short.
    let without = |s: &Stage| {
        let none =
            StageBytes { packed_forward: 0, packed_backward: 0, packed_in_forward: 0, ..s.bytes };
        Stage { bytes: none, ..s.clone() }
    };
    held(&stages.iter().map(without).collect::<Vec<_>>())
}

fn held(job: &Job, layout: &Layout, program: &Schedule, stages: &[Stage]) -> Vec<Held> {
    let bytes: Vec<_> = stages.iter().map(|s| s.bytes).collect();
    let states: Vec<_> = stages.iter().map(|s| &s.state).collect();
    let held = predict_both(program, &bytes);
    let late = program.validates_late();
    let warm_ups = if late { predict_warm_up(program, &bytes) } else { Vec::new() };
    let how = (layout.cut(), late, job.state.save);
    let of_rank = |(rank, [peaks, at_once]): (usize, [MemoryBytes; 2])| {
        let mine = program.stages_of(rank);
        let state = RankState::new(&states, &mine, &program.placement, how);
        let warm_up = warm_ups.get(rank).copied().unwrap_or_default();
        Held { at_once: state.at_once(at_once, warm_up), peaks: state.peaks(peaks) }
    };
    held.into_iter().enumerate().map(of_rank).collect()
}

/// Bytes that some rank holds at least, in closed form: parameters and moments, gradients, as the
/// optimizer finds them, and the activations that its schedule keeps of its smallest stage and the
/// weights of that stage, with the gradients where there are some by then. No layout that fits is
/// above its memory by this.
pub(crate) fn at_least(layout: &Layout, stages: &[Stage]) -> u64 {
    // Rank 0 keeps the most in flight, but no inputs of its first stage, which are tokens: rank 1
    // does.
    let folded = matches!(layout.schedule, "zeropp" | "zb-v" | "v-half" | "v-min");
    let ranks = if folded { 1 } else { layout.pp.min(2) };
    (0..ranks).map(|rank| rank_at_least(layout, stages, rank)).max().unwrap_or(0)
}

fn rank_at_least(layout: &Layout, stages: &[Stage], rank: usize) -> u64 {
    let indices = stages_of(rank, layout);
    let has_both = [0, stages.len() - 1].iter().all(|s| indices.contains(s));
    let mine: Vec<&Stage> = indices.into_iter().map(|s| &stages[s]).collect();
    let (d, owners) = (layout.zero3 as u64, layout.cut().owners as u64);
    let shard = mine.iter().map(|s| s.state.elements * 4).sum::<u64>() / d;
    let kept = mine.iter().map(|s| s.kept).sum::<u64>();
    let tied = stages.last().and_then(|last| last.state.tied.as_ref()).filter(|_| has_both);
    let twice = tied.map_or(0, |tied| tied.shard);
    let kept_twice = tied.map_or(0, |tied| tied.head.state_of_all(layout.cut().pieces()));
    let fixed = shard - twice + (kept - kept_twice) / d / owners;
    let least = |of: &dyn Fn(&Stage) -> u64| mine.iter().map(|s| of(s)).min().unwrap_or(0);
    // Stage 0 keeps no input: tokens are not counted.
    let inputs = mine.iter().map(|s| s.bytes.input).filter(|n| *n > 0).min().unwrap_or(0);
    let (whole, inputs_kept) = in_flight(rank, layout);
    let full = layout.recompute == Recompute::Full;
    let again = |s: &Stage| s.bytes.layerwise.filter(|_| full);
    let each = least(&|s| again(s).map_or(s.bytes.activation, |layers| layers.inside));
    let computing = whole * each + inputs_kept * inputs + least(&|s| s.bytes.weights);
    // Other kinds than zeropp reduce a stage once a step.
    let gradients = if layout.schedule == "zeropp" { shard } else { shard * d };
    let computing = match is_full_again(layout) {
        true => gradients + computing,
        // The first W makes a whole gradient, when the first of the activations has gone.
        false => {
            computing.max(computing - whole.min(1) * each + least(&|s| s.state.elements * 4 / d))
        }
    };
    fixed + shard.max(computing)
}

/// Whether a rank holds as many activations again after its first W of every stage: whole
/// gradients or their shards are there then.
fn is_full_again(layout: &Layout) -> bool {
    match layout.schedule {
        // A last unit may be a smaller one.
        "zeropp" => layout.micro_batches >= 2 * layout.unit,
        "bf-pp" => false,
        _ => layout.micro_batches >= 2 * layout.pp,
    }
}

fn stages_of(rank: usize, layout: &Layout) -> Vec<usize> {
    let p = layout.pp;
    let folded = matches!(layout.schedule, "zb-v" | "v-half" | "v-min");
    let stage = |v: usize| if folded && v % 2 == 1 { (v + 1) * p - 1 - rank } else { v * p + rank };
    (0..layout.virtual_stages).map(stage).collect()
}

/// Micro-batches of a stage that rank 0 or 1 holds at once: those of which it keeps everything, and
/// those of which it keeps the input.
fn in_flight(rank: usize, layout: &Layout) -> (u64, u64) {
    let (p, v) = (layout.pp, layout.virtual_stages);
    let (b, u) = (layout.micro_batches, layout.unit.min(layout.micro_batches));
    let full = layout.recompute == Recompute::Full;
    let most = b * v;
    // In all, and those among them that may be of stage 0.
    let (at_once, first) = match layout.schedule {
        "zeropp" => {
            let last = u.min(2 * p - 1);
            return match full {
                // Stage 0's inputs are tokens.
                true if v == 1 => (1, last as u64 - 1),
                true => (last as u64, (v.saturating_sub(2) * u) as u64),
                false => (((v - 1) * u + last) as u64, 0),
            };
        }
        "bf-pp" => (most, b),
        "1f1b" | "zb-h1" => (p - rank, p),
        "interleaved" | "interleaved-zb" => (v * p - rank, v * p),
        "zb-v" => (p, p),
        "v-half" => (p.div_ceil(2), p),
        "v-min" => (p.div_ceil(3), p),
        _ => (1, 1),
    };
    let at_once = at_once.min(most).min(if v == 1 { b } else { most });
    if !full {
        return (at_once as u64, 0);
    }
    // Where stages are recomputed one of them is whole at a time.
    let without = if rank == 0 { first } else { 1 };
    (1, at_once.saturating_sub(without) as u64)
}
