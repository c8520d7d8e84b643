//! What a rank holds: exactly, by the code that predicts for runs, and from below in closed form,
//! so that what does not fit need not be made.

use zeropp_model::optimizer::{Cut, Out};
use zeropp_schedule::ir::Schedule;
use zeropp_schedule::memory::{HeldBytes, MemoryBytes, StageBytes, predict_both, predict_warm_up};
use zeropp_schedule::schedules::FewestHeld;

use crate::bytes::{RankState, StageState};
use crate::layout::{Job, Layout, Packing, Recompute};
use crate::stages::{Stage, StageSlice, bytes_of};

/// What every pipeline rank holds, as a run of `program` predicts it.
pub fn exact(job: &Job, layout: &Layout, program: &Schedule, stages: &[Stage]) -> Vec<HeldBytes> {
    let held = |stages: &[Stage]| held(job, layout, program, stages);
    let packed = held(stages);
    let is_short = packed.iter().any(|rank| rank.at_once.total() > job.memory);
    if !is_short || !matches!(job.compute.packing, Packing::Auto(_)) {
        return packed;
    }
    // A run leaves the copies out where memory is short.
    let without = |s: &Stage| {
        let none = |bytes: StageBytes| StageBytes {
            packed_forward: 0,
            packed_output: 0,
            packed_redone: 0,
            packed_backward: 0,
            packed_in_forward: 0,
            ..bytes
        };
        let slice = |of: &StageSlice| StageSlice { bytes: none(of.bytes), ..*of };
        Stage { bytes: none(s.bytes), slices: s.slices.iter().map(slice).collect(), ..s.clone() }
    };
    held(&stages.iter().map(without).collect::<Vec<_>>())
}

fn held(job: &Job, layout: &Layout, program: &Schedule, stages: &[Stage]) -> Vec<HeldBytes> {
    let bytes = bytes_of(stages);
    let states: Vec<_> = stages.iter().map(|s| &s.state).collect();
    let ranks = rank_states(&states, program, job.cut(layout), job.state.save);
    of_ranks([program], &bytes, &ranks)
}

/// What every pipeline rank of `program` has all the time; checkpoints that are written meanwhile
/// take `save` bytes.
pub fn rank_states(
    stages: &[&StageState],
    program: &Schedule,
    cut: Cut,
    save: u64,
) -> Vec<RankState> {
    let late = program.validates_late();
    let of = |rank| {
        let mut mine = program.stages_of(rank);
        if program.head_blocks.get(rank).is_some_and(|blocks| *blocks > 0) {
            mine.push(program.cell(rank, program.stages()));
        }
        RankState::new(stages, &mine, &program.placement, cut, late, save)
    };
    (0..program.pp()).map(of).collect()
}

/// Bytes of the stages of `program` with what comes in for their updates.
pub(crate) fn with_updates(
    bytes: &[StageBytes],
    ranks: &[RankState],
    program: &Schedule,
) -> Vec<StageBytes> {
    let mut bytes = bytes.to_vec();
    for (cell, update) in ranks.iter().flat_map(RankState::updates) {
        bytes[cell * program.slices_per_sample()].update = *update;
    }
    bytes
}

/// What every pipeline rank holds, of replicas that run any of these programs, of stages with these
/// `bytes`: the most of all replicas.
pub fn of_ranks<'a>(
    programs: impl IntoIterator<Item = &'a Schedule>,
    bytes: &[StageBytes],
    ranks: &[RankState],
) -> Vec<HeldBytes> {
    let larger = |a: MemoryBytes, b: MemoryBytes| if b.total() > a.total() { b } else { a };
    let mut all = vec![(HeldBytes::default(), MemoryBytes::default()); ranks.len()];
    for program in programs {
        let bytes = with_updates(bytes, ranks, program);
        let late = program.validates_late();
        let warm_ups = if late { predict_warm_up(program, &bytes) } else { Vec::new() };
        for (rank, HeldBytes { peaks, at_once }) in
            predict_both(program, &bytes).into_iter().enumerate()
        {
            let (most, warm) = &mut all[rank];
            *most =
                HeldBytes { peaks: most.peaks.max(&peaks), at_once: larger(most.at_once, at_once) };
            *warm = larger(*warm, warm_ups.get(rank).copied().unwrap_or_default());
        }
    }
    let of = |(rank, (held, warm_up)): (&RankState, (HeldBytes, MemoryBytes))| HeldBytes {
        at_once: rank.at_once(held.at_once, warm_up),
        peaks: rank.peaks(held.peaks),
    };
    ranks.iter().zip(all).map(of).collect()
}

/// Bytes that some rank holds at least, in closed form: parameters and moments, gradients, as the
/// optimizer finds them, and the activations that its schedule keeps of its smallest stage and the
/// weights of that stage, with the gradients where there are some by then. No layout that fits is
/// above its memory by this, nor one whose head `may_be_split`.
pub(crate) fn at_least(layout: &Layout, stages: &[Stage], may_be_split: bool) -> u64 {
    // Rank 0 keeps the most in flight, but no inputs of its first stage, which are tokens: rank 1
    // does.
    let full = layout.recompute == Recompute::Full;
    let known = |rank| Some((rank, (layout.forms().in_flight)(&layout.shape(), rank, full)?));
    let first = if may_be_split && layout.pp == 2 { 1 } else { layout.pp.min(2) };
    // Slices keep what the optimizer has of an embedding that they are tied to.
    let tied = stages.last().and_then(|last| last.state.tied.as_ref()).filter(|_| may_be_split);
    let less = tied.map_or(0, |tied| tied.head.state_of_all(layout.cut().pieces()));
    let less = less.div_ceil(layout.cut().pieces() as u64);
    let without = |rank, bytes: u64| if rank == 0 { bytes.saturating_sub(less) } else { bytes };
    if layout.slices > 1 {
        let ranks = [0, layout.pp - 1].into_iter().take(if may_be_split { 1 } else { 2 });
        let of = |rank| without(rank, at_least_in_slices(layout, stages, rank));
        return ranks.map(of).max().unwrap_or(0);
    }
    let of = |(rank, held)| without(rank, rank_at_least(layout, stages, rank, held));
    (0..first).filter_map(known).map(of).max().unwrap_or(0)
}

/// Copies of activations that have not begun or are under way when most are out: what the last
/// forward keeps, and what the one before it does.
const NOT_OUT_YET: usize = 2;

/// Bytes that some rank has out of its memory at once, at the least: states, and of what its
/// schedule has in flight the share that goes out.
pub(crate) fn outside(job: &Job, layout: &Layout, stages: &[Stage]) -> u64 {
    let share = |part: usize| part as f64 / layout.unit as f64;
    let redone = layout.inputs_out();
    let of = |rank: usize| {
        let mine = stages_of(layout, stages, rank);
        let sum = |of: &dyn Fn(&Stage) -> u64| mine.iter().map(|(_, s)| of(s)).sum::<u64>() as f64;
        let each = |again: bool| sum(&|s| s.bytes.kept(again)) / mine.len().max(1) as f64;
        let in_flight = |full| (layout.forms().in_flight)(&layout.shape(), rank, full);
        let [all, inputs] = [(false, layout.out - redone), (true, redone)].map(|(again, part)| {
            let held = in_flight(again).filter(|_| part > 0);
            let held = held.map_or(0, |held| if again { held.inputs } else { held.whole });
            held.saturating_sub(NOT_OUT_YET) as f64 * share(part) * each(again)
        });
        let (cut, d) = (job.cut(layout), layout.zero3 as f64);
        let gradients = if cut.out == Out::All { 4 } else { 0 };
        let parameters = if cut.out.has_parameters() { 4 } else { 0 };
        let kept = if cut.out.is_any() { sum(&|s| s.kept) / cut.owners as f64 } else { 0.0 };
        let shards = sum(&|s| parameters * s.state.elements + gradients * s.state.trained);
        all + inputs + (shards + kept) / d
    };
    (0..layout.pp.min(2)).map(of).fold(0.0, f64::max) as u64
}

/// The stages of a rank, with their numbers.
fn stages_of<'a>(layout: &Layout, stages: &'a [Stage], rank: usize) -> Vec<(usize, &'a Stage)> {
    let all = layout.placement().into_iter().zip(stages.iter().enumerate());
    all.filter(|(of, _)| *of == rank).map(|(_, stage)| stage).collect()
}

/// Bytes of a rank's shards, and those of its parameters and moments, as far as they are in memory.
fn always(layout: &Layout, stages: &[Stage], rank: usize) -> [u64; 2] {
    let out = stages.first().map(|s| s.state.out).unwrap_or_default();
    if out.has_parameters() {
        return [0; 2];
    }
    let mine = stages_of(layout, stages, rank);
    let has_both = [0, stages.len() - 1].iter().all(|s| mine.iter().any(|(of, _)| of == s));
    let (d, owners) = (layout.zero3 as u64, layout.cut().owners as u64);
    let shard = mine.iter().map(|(_, s)| s.state.elements * 4).sum::<u64>() / d;
    let kept = mine.iter().map(|(_, s)| s.kept).sum::<u64>();
    let tied = stages.last().and_then(|last| last.state.tied.as_ref()).filter(|_| has_both);
    let twice = tied.map_or(0, |tied| tied.shard);
    let kept_twice = tied.map_or(0, |tied| tied.head.state_of_all(layout.cut().pieces()));
    let kept = if out.is_any() { 0 } else { kept - kept_twice };
    [shard, shard - twice + kept / d / owners]
}

/// The same where samples are cut into slices: when its first backward begins, a rank has all
/// slices of a unit's samples on its stages but the last, where units are of several, and of one on
/// the last. In units the W of the last stage wait while there are forwards.
fn at_least_in_slices(layout: &Layout, stages: &[Stage], rank: usize) -> u64 {
    let unit = if layout.in_units() { layout.unit.min(layout.micro_batches) } else { 1 };
    let (mine, again) = (stages_of(layout, stages, rank), layout.recomputed());
    let last = mine.last().map_or(0, |(stage, _)| *stage);
    let each = |(s, stage): &(usize, &Stage)| match *s < again {
        true => stage.bytes.input,
        false => stage.bytes.activation,
    };
    let (n, samples) = (layout.slices, unit as u64);
    let others: u64 = mine.iter().filter(|(s, _)| *s != last).map(|of| samples * each(of)).sum();
    let first = mine.last().map_or(0, each);
    // Slices of a further sample that are there by then, the longest of it.
    let (behind, later) = (layout.pp - 1 - rank, (layout.micro_batches - 1) * n);
    let ahead = match (layout.in_units(), layout.in_rounds_of_slices()) {
        (true, _) => (2 * behind + n).min(unit * n) - n,
        (false, true) => (2 * behind).min(layout.virtual_stages * later),
        (false, false) => behind.min(later),
    };
    let least = mine.iter().map(each).min().unwrap_or(0);
    let first = first + least / n as u64 * ahead as u64;
    let waiting = (unit * n).saturating_sub(2 * behind + n);
    let waiting = if layout.in_units() { waiting as u64 } else { 0 };
    let waiting = mine.last().map_or(0, |(_, s)| s.bytes.stash / n as u64 * waiting);
    let [shard, fixed] = always(layout, stages, rank);
    let weights = mine.iter().map(|(_, s)| s.bytes.weights).min().unwrap_or(0);
    // Slices are not of equal bytes.
    fixed + shard.max(others + weights + first.max(waiting / 2))
}

fn rank_at_least(layout: &Layout, stages: &[Stage], rank: usize, held: FewestHeld) -> u64 {
    let d = layout.zero3 as u64;
    let mine = stages_of(layout, stages, rank);
    let mine: Vec<&Stage> = mine.into_iter().map(|(_, stage)| stage).collect();
    let [shard, fixed] = always(layout, stages, rank);
    let least = |of: &dyn Fn(&Stage) -> u64| mine.iter().map(|s| of(s)).min().unwrap_or(0);
    // Stage 0 keeps no input: tokens are not counted.
    let inputs = mine.iter().map(|s| s.bytes.input).filter(|n| *n > 0).min().unwrap_or(0);
    let (whole, inputs_kept) = (held.whole as u64, held.inputs as u64);
    // Of every stage so many may be out, but what is at work is here.
    let out = (layout.out * layout.virtual_stages) as u64;
    let (whole, inputs_kept) =
        (whole.saturating_sub(out).max(whole.min(1)), inputs_kept.saturating_sub(out));
    let full = layout.recompute == Recompute::Full;
    let again = |s: &Stage| s.bytes.layerwise.filter(|_| full);
    let each = least(&|s| again(s).map_or(s.bytes.activation, |layers| layers.inside.kept));
    let computing = whole * each + inputs_kept * inputs + least(&|s| s.bytes.weights);
    // Kinds without units reduce a stage once a step.
    let gradients = if layout.in_units() { shard } else { shard * d };
    let refills = layout.slices == 1 && (layout.forms().refills)(&layout.shape());
    let computing = match refills {
        true => gradients + computing,
        // Of one micro-batch, what is kept goes piece by piece while gradients are made.
        false if layout.micro_batches == 1 => computing,
        // The first W makes a whole gradient, when the first of the activations has gone.
        false => {
            computing.max(computing - whole.min(1) * each + least(&|s| s.state.elements * 4 / d))
        }
    };
    fixed + shard.max(computing)
}
