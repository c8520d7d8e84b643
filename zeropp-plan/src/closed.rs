//! The time of a step in closed form: what layouts are ranked by before the best are simulated.

use crate::layout::{CopyRate, Layout};
use crate::stages::Stage;
use zeropp_schedule::schedules::{MeanTimes, Shape};
use zeropp_schedule::simulate::{LayerShare, LinkCosts, StateCopies};

/// What a layout's costs have beside its stages.
pub(crate) struct FixedCosts {
    pub(crate) link: LinkCosts,
    pub(crate) copies: CopyRate,
    /// Of every stage, where states are out; else empty.
    pub(crate) states: Vec<StateCopies>,
    /// The end of a step.
    pub(crate) step_ns: u64,
}

/// Seconds of a step, about; while all ranks compute, all take `slowdown` times as long, and beside
/// collectives compute loses `contention` of its time; slices take `overhead` times as long as
/// their samples. Ranks may share a head that takes `shared` seconds of a micro-batch.
pub(crate) fn step_s(
    layout: &Layout,
    stages: &[Stage],
    fixed: &FixedCosts,
    [slowdown, contention, overhead]: [f64; 3],
    shared: f64,
) -> f64 {
    let work = overhead * work_ns(layout, stages, shared * 1e9);
    let bubble = bubble_ns(layout, stages, &fixed.link);
    let (queue, reads) = queue_ns(layout, stages, &fixed.states);
    let waits = fixed.states.first().is_some_and(|states| states.waits);
    let (work, queue) = if waits { (work + reads, queue) } else { (work, queue + reads) };
    let replicas: u64 =
        stages.iter().map(|s| s.costs.replica_reduce_ns).sum::<u64>() / layout.pp as u64;
    let ends = ends_ns(&stages[0]);
    let hidden = (work + bubble).max(queue) + ends + copies_ns(layout, stages, fixed.copies);
    let update = fixed.step_ns as f64;
    let contended = contention * (queue + 0.5 * replicas as f64).min(work);
    let alone = hidden + contended + 0.5 * replicas as f64 + update;
    alone.max(slowdown * (work + update)) / 1e9
}

/// What a rank waits for its first gather and its last reduction, ns: of a layer, as the others run
/// beside the work.
fn ends_ns(first: &Stage) -> f64 {
    let share = |of: fn(&LayerShare) -> u64| match (first.layers.first(), first.layers.last()) {
        (Some(layer), Some(all)) if of(all) > 0 => of(layer) as f64 / of(all) as f64,
        _ => 1.0,
    };
    let (gather, reduce) = (first.costs.all_gather_ns, first.costs.reduce_scatter_ns);
    share(|layer| layer.weights) * gather as f64 + share(|layer| layer.gradient) * reduce as f64
}

/// What the busiest rank computes in a step, ns.
fn work_ns(layout: &Layout, stages: &[Stage], shared: f64) -> f64 {
    let again = layout.recomputed();
    let of = |(s, stage): (usize, &Stage)| {
        let c = &stage.costs;
        let again = if s < again { layout.share_redone() * c.r_ns as f64 } else { 0.0 };
        (c.f_ns + c.b_ns + c.w_ns) as f64 + again
    };
    let mut ranks = vec![0.0; layout.pp];
    for (rank, stage) in layout.placement().into_iter().zip(stages.iter().enumerate()) {
        ranks[rank] += of(stage);
    }
    let mean = ranks.iter().sum::<f64>() / ranks.len() as f64;
    ranks[layout.placement().last().copied().unwrap_or(0)] -= shared;
    // Rows of the head go where there is least to do.
    let least = if shared > 0.0 { mean } else { 0.0 };
    ranks.into_iter().fold(least, f64::max) * layout.micro_batches as f64
}

/// What a rank waits for copies of activations in a step, ns: those of a unit go out while its
/// forwards run, or, where one queue has both ways, come in again before its last backwards do.
fn copies_ns(layout: &Layout, stages: &[Stage], copies: CopyRate) -> f64 {
    let Some(rate) = copies.bytes_per_s else { return 0.0 };
    let apart = copies.apart;
    let redone = layout.inputs_out();
    let (mut bytes, mut beside) = (0.0, 0.0);
    for (stage, of) in stages.iter().enumerate() {
        let again = if stage < layout.recomputed() { redone } else { 0 };
        let [all, inputs] = [false, true].map(|again| of.bytes.kept(again) as f64);
        bytes += (layout.out - again) as f64 * all + again as f64 * inputs;
        let c = &of.costs;
        beside += (c.f_ns + if apart { 0 } else { c.b_ns + c.w_ns }) as f64;
    }
    let ways = if apart { 1.0 } else { 2.0 };
    let units = (layout.micro_batches as f64 / layout.unit as f64).ceil();
    let units = if layout.out_later { units - 1.0 } else { units };
    let takes = 1e9 * ways * bytes / rate;
    let waits = (takes - layout.unit as f64 * beside).max(0.0);
    units * waits / layout.pp as f64
}

/// What a rank waits for others in a step, ns: the published forms, with a stage's mean times.
fn bubble_ns(layout: &Layout, stages: &[Stage], link: &LinkCosts) -> f64 {
    let n = stages.len() as f64;
    let mean = |of: fn(&Stage) -> u64| stages.iter().map(of).sum::<u64>() as f64 / n;
    let (f, b, w) = (mean(|s| s.costs.f_ns), mean(|s| s.costs.b_ns), mean(|s| s.costs.w_ns));
    let message = link.latency_ns as f64 + link.transfer_ns(stages[0].bytes.message) as f64;
    let waits = |shape: &Shape, times: &MeanTimes| (layout.forms().waits)(shape, times);
    let shape = layout.shape();
    if layout.slices == 1 {
        return waits(&shape, &MeanTimes { f, b, w, message });
    }
    // As for slices that are independent; where a unit is one sample, its last rank waits for all
    // slices of it before its first backward.
    let n = layout.slices;
    let [f, b, w, message] = [f, b, w, message].map(|sample| sample / n as f64);
    let is_one = layout.micro_batches == 1 || layout.in_units() && layout.unit == 1;
    let turn = if is_one { (layout.pp - 1) as f64 * (f + b) } else { 0.0 };
    let all = Shape { micro_batches: n * shape.micro_batches, unit: n * shape.unit, ..shape };
    turn + waits(&all, &MeanTimes { f, b, w, message })
}

/// What the queue of gathers and reductions of a rank takes in a step, ns, and what copies of
/// states take that are out.
fn queue_ns(layout: &Layout, stages: &[Stage], states: &[StateCopies]) -> (f64, f64) {
    let v = layout.virtual_stages as f64;
    let n = stages.len() as f64;
    let mean = |of: fn(&Stage) -> u64| stages.iter().map(of).sum::<u64>() as f64 / n;
    let copies = |of: fn(&StateCopies) -> u64| states.iter().map(of).sum::<u64>() as f64 / n;
    let (read, add) = (copies(|s| s.read_ns), copies(|s| s.add_ns));
    let updates = v * copies(|s| s.update_ns);
    let (gather, reduce) = (mean(|s| s.costs.all_gather_ns), mean(|s| s.costs.reduce_scatter_ns));
    let batches = layout.micro_batches as f64;
    let (gathers, reductions) = match layout.forms().gathers_by_unit {
        true => {
            let units = (batches / layout.unit as f64).ceil();
            ((2.0 * v - 1.0) * units, v * units)
        }
        // What fits beside the stage in use stays; else stages come and go in rounds of P.
        false if layout.in_rounds_of_slices() => (2.0 * v * batches, v * batches),
        false if v <= 1.0 + layout.prefetch as f64 => (v, v),
        false => (2.0 * v * (batches / layout.pp as f64).ceil(), v),
    };
    (gathers * gather + (reductions * reduce).max(updates), gathers * read + reductions * add)
}
