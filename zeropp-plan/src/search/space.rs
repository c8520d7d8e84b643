//! The layouts there are: those that are ranked at first, and those beside one of them.

use zeropp_schedule::costs::SLICE_GRID;
use zeropp_schedule::schedules::{DEFAULT, Kind, StepForm, default_unit};

use crate::PlanError;
use crate::layout::{Job, Layout, Recompute, SAMPLE_MIN, Slices};

/// Stages on a rank that are ranked at first.
const STAGES: [usize; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16];
/// Samples of a micro-batch that are ranked at first.
const SAMPLES: [usize; 8] = [1, 2, 3, 4, 6, 8, 16, 32];
/// Ranks that share weights: of so many nodes, or so many where nodes are small.
const NODES_MAX: usize = 4;
const RANKS_MAX: usize = 16;
/// Stages gathered ahead, at most.
const PREFETCH_MAX: usize = 3;

/// Layouts that are searched through by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    /// Of whole samples.
    Whole,
    /// Of samples in slices.
    Sliced,
}

impl Sort {
    pub(super) fn of(layout: &Layout) -> Sort {
        if layout.slices > 1 { Sort::Sliced } else { Sort::Whole }
    }
}

/// The layouts of a sort that are ranked at first, those with equal stages next to each other: all
/// meshes, and for the rest a few numbers each, from which [`beside`] reaches all others.
pub(super) fn first(job: &Job, sort: Sort) -> Vec<Layout> {
    let mut all = Vec::new();
    let slices = if sort == Sort::Whole { vec![1] } else { job.slices() };
    for (pp, zero3, dp) in meshes(job) {
        let sizes = micro_batch_sizes(job, zero3 * dp);
        // Slices are of one sample.
        for micro_batch_size in sizes.into_iter().filter(|b| *b == 1 || sort == Sort::Whole) {
            for virtual_stages in virtual_stages(job, pp) {
                for recompute in recomputes(job) {
                    for zero1 in [true, false].into_iter().filter(|on| dp > 1 || !on) {
                        let micro_batches = job.global_batch / (zero3 * dp * micro_batch_size);
                        let layout = Layout {
                            pp,
                            zero3,
                            dp,
                            virtual_stages,
                            unit: micro_batches,
                            micro_batches,
                            micro_batch_size,
                            recompute,
                            redone: None,
                            zero1,
                            schedule: DEFAULT,
                            prefetch: 1,
                            slices: 1,
                            out: 0,
                            out_later: false,
                            moments: false,
                        };
                        for slices in &slices {
                            let layout = Layout { slices: *slices, ..layout.clone() };
                            of_all_kinds(job, &layout, &mut all);
                        }
                    }
                }
            }
        }
    }
    all
}

fn of_all_kinds(job: &Job, layout: &Layout, all: &mut Vec<Layout>) {
    for schedule in kinds(job, layout) {
        let layout = Layout { schedule, ..layout.clone() };
        let units = units(job, &layout);
        for layout in job.moments().into_iter().map(|moments| Layout { moments, ..layout.clone() })
        {
            for unit in units.iter().copied() {
                all.push(Layout { unit, ..layout.clone() });
                if job.may_put_out() && layout.slices == 1 {
                    let some = [unit.div_ceil(2), unit];
                    all.extend(some.map(|out| Layout { unit, out, ..layout.clone() }));
                }
            }
        }
    }
}

/// The layouts of its sort that differ from `layout` in one thing: the number of slices, the kind,
/// recomputation, ZeRO-1, the depth of prefetch, U, V, b, or a factor that one of P, D and K gives
/// another.
pub(super) fn beside(job: &Job, layout: &Layout) -> Vec<Layout> {
    let mut all = Vec::new();
    let mut add = |other: Layout| all.extend(whole(job, other));
    for schedule in kinds(job, layout) {
        add(Layout { schedule, ..layout.clone() });
    }
    for recompute in recomputes(job) {
        // What is not gathered ahead may be room for what is kept.
        for prefetch in [layout.prefetch, 0] {
            add(Layout { recompute, prefetch, redone: None, ..layout.clone() });
        }
    }
    for redone in redone_beside(job, layout) {
        let layout = Layout { recompute: Recompute::Full, redone: Some(redone), ..layout.clone() };
        add(layout);
    }
    for out in out_beside(job, layout) {
        add(Layout { out, ..layout.clone() });
    }
    add(Layout { out_later: !layout.out_later, ..layout.clone() });
    add(Layout { zero1: !layout.zero1, ..layout.clone() });
    for moments in job.moments() {
        add(Layout { moments, ..layout.clone() });
    }
    if layout.slices > 1 {
        let all = job.slices();
        for slices in [layout.slices / 2, 2 * layout.slices] {
            all.contains(&slices).then(|| add(Layout { slices, ..layout.clone() }));
        }
    }
    let prefetch = layout.prefetch;
    for prefetch in [prefetch.wrapping_sub(1), prefetch + 1] {
        add(Layout { prefetch, ..layout.clone() });
    }
    if layout.in_units() {
        let near = (1..=3).flat_map(|by| [layout.unit.saturating_sub(by), layout.unit + by]);
        for unit in near.chain(units(job, layout)) {
            add(Layout { unit, ..layout.clone() });
        }
    }
    let v = layout.virtual_stages;
    for virtual_stages in [v - 1, v + 1, v / 2, 2 * v, job.model.decoder.layers / layout.pp] {
        add(Layout { virtual_stages, ..layout.clone() });
    }
    let each = layout.micro_batches * layout.micro_batch_size;
    let sizes = divisors(each);
    let at = sizes.iter().position(|b| *b == layout.micro_batch_size).unwrap_or(0);
    for b in [at.checked_sub(1), Some(at + 1)].into_iter().flatten().filter_map(|i| sizes.get(i)) {
        add(Layout { micro_batch_size: *b, ..layout.clone() });
    }
    for mesh in meshes_beside(layout) {
        // As many stages in all, or as many on a rank.
        let (pp, zero3, dp) = mesh;
        for virtual_stages in [v, (v * layout.pp).div_ceil(pp)] {
            let other = Layout { pp, zero3, dp, virtual_stages, ..layout.clone() };
            let zero1 = layout.zero1 || (layout.dp == 1 && dp > 1);
            add(Layout { zero1, ..other });
        }
    }
    all.retain(|other| other != layout);
    all
}

/// A layout that was changed in one thing, with all that follows from it; none where it is none, or
/// where what was given does not have it.
fn whole(job: &Job, mut layout: Layout) -> Option<Layout> {
    let ranks = layout.zero3 * layout.dp;
    let samples = ranks * layout.micro_batch_size;
    if samples == 0 || !job.global_batch.is_multiple_of(samples) {
        return None;
    }
    let (before, batches) = (layout.micro_batches, job.global_batch / samples);
    layout.micro_batches = batches;
    layout.unit = match layout.in_units() {
        true if layout.unit == before => batches,
        true => layout.unit.min(batches),
        false => batches,
    };
    layout.redone = layout.redone.filter(|first| *first < layout.unit);
    layout.out = layout.out.min(layout.unit);
    layout.out_later &= layout.out > 0 && layout.unit < batches;
    layout.zero1 &= layout.dp > 1;
    if layout.zero3 == 1 {
        layout.prefetch = 1;
    }
    let fixed = &job.fixed;
    let is = |given: Option<usize>, n: usize| given.is_none_or(|given| given == n);
    let fits = layout.unit > 0
        && layout.prefetch <= PREFETCH_MAX
        && is(fixed.pp, layout.pp)
        && is(fixed.zero3, layout.zero3)
        && is(fixed.dp, layout.dp)
        && is(fixed.virtual_stages, layout.virtual_stages)
        && is(fixed.micro_batch_size, layout.micro_batch_size)
        && fixed.unit.is_none_or(|unit| !layout.in_units() || layout.unit == unit.min(batches))
        && layout.virtual_stages > 0
        && layout.pp * layout.virtual_stages <= job.model.decoder.layers
        && shares(job, layout.zero3)
        && Kind::find(layout.schedule).is_some_and(|kind| suits(kind, &layout))
        && (layout.slices == 1 || layout.micro_batch_size == 1 && layout.redone.is_none());
    fits.then_some(layout)
}

fn divisors(n: usize) -> Vec<usize> {
    (1..=n).filter(|d| n.is_multiple_of(*d)).collect()
}

/// Whether so many ranks may share weights.
fn shares(job: &Job, zero3: usize) -> bool {
    zero3 <= RANKS_MAX.max(NODES_MAX * job.machine.per_node) || job.fixed.zero3 == Some(zero3)
}

fn meshes(job: &Job) -> Vec<(usize, usize, usize)> {
    let fixed = &job.fixed;
    let allowed = |given: Option<usize>, n: usize| given.is_none_or(|g| g == n);
    let mut meshes = Vec::new();
    for zero3 in divisors(job.gpus) {
        if !allowed(fixed.zero3, zero3) || !shares(job, zero3) {
            continue;
        }
        for pp in divisors(job.gpus / zero3) {
            let dp = job.gpus / zero3 / pp;
            if pp <= job.model.decoder.layers && allowed(fixed.pp, pp) && allowed(fixed.dp, dp) {
                meshes.push((pp, zero3, dp));
            }
        }
    }
    meshes
}

/// Meshes where one of P, D and K has given a prime factor to another.
fn meshes_beside(layout: &Layout) -> Vec<(usize, usize, usize)> {
    let mesh = [layout.pp, layout.zero3, layout.dp];
    let mut all = Vec::new();
    for from in 0..3 {
        let is_prime = |n: &usize| *n > 1 && divisors(*n).len() == 2;
        for factor in divisors(mesh[from]).into_iter().filter(is_prime) {
            for to in (0..3).filter(|to| *to != from) {
                let mut other = mesh;
                other[from] /= factor;
                other[to] *= factor;
                all.push((other[0], other[1], other[2]));
            }
        }
    }
    all
}

fn micro_batch_sizes(job: &Job, ranks: usize) -> Vec<usize> {
    if !job.global_batch.is_multiple_of(ranks) {
        return Vec::new();
    }
    let each = job.global_batch / ranks;
    let sizes = SAMPLES.iter().copied().chain(job.fixed.micro_batch_size);
    let mut sizes: Vec<usize> = sizes
        .filter(|b| each.is_multiple_of(*b))
        .filter(|b| job.fixed.micro_batch_size.is_none_or(|given| given == *b))
        .collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

fn virtual_stages(job: &Job, pp: usize) -> Vec<usize> {
    let given = job.fixed.virtual_stages;
    let most = job.model.decoder.layers / pp;
    let with_most = most <= 16 || job.may_put_out();
    let some = STAGES.into_iter().filter(|v| *v < most).chain(with_most.then_some(most));
    let mut numbers: Vec<usize> = match given {
        Some(given) => vec![given],
        None => some.collect(),
    };
    numbers.retain(|v| pp.saturating_mul(*v) <= job.model.decoder.layers);
    numbers
}

fn recomputes(job: &Job) -> Vec<Recompute> {
    match job.fixed.recompute {
        Some(given) => vec![given],
        None => vec![Recompute::None, Recompute::Selective, Recompute::Full],
    }
}

/// Numbers of micro-batches of a unit that full recomputation may be for: near the number at hand,
/// and a quarter, a half and three quarters of the unit.
fn redone_beside(job: &Job, layout: &Layout) -> Vec<usize> {
    if !layout.in_units() || layout.slices > 1 || job.fixed.recompute.is_some() {
        return Vec::new();
    }
    let unit = layout.unit;
    let now = match layout.recompute {
        Recompute::Auto | Recompute::None => return Vec::new(),
        Recompute::Selective => 0,
        Recompute::Full => layout.redone.unwrap_or(unit),
    };
    let near = [now.saturating_sub(1), now + 1];
    let parts = (1..4).map(|quarters| quarters * unit / 4);
    let mut all: Vec<usize> = near.into_iter().chain(parts).collect();
    all.retain(|first| (1..unit).contains(first) && *first != now);
    all.sort_unstable();
    all.dedup();
    all
}

/// Numbers of micro-batches of a unit that may be put out: near the number at hand, and none, a
/// quarter, a half, three quarters and all of the unit.
fn out_beside(job: &Job, layout: &Layout) -> Vec<usize> {
    if !job.may_put_out() || layout.slices > 1 {
        return Vec::new();
    }
    let near = [layout.out.saturating_sub(1), layout.out + 1];
    let parts = (0..=4).map(|quarters| quarters * layout.unit / 4);
    let mut all: Vec<usize> = near.into_iter().chain(parts).collect();
    all.retain(|out| *out <= layout.unit && *out != layout.out);
    all.sort_unstable();
    all.dedup();
    all
}

/// The kinds that have such a shape, as far as that is known without making it.
fn kinds(job: &Job, layout: &Layout) -> Vec<&'static str> {
    let given = job.fixed.schedule.as_deref();
    let in_rounds = |kind: &&'static Kind| {
        let is_whole = layout.micro_batches.is_multiple_of(layout.pp);
        layout.slices > 1 || kind.step != StepForm::Rounds || is_whole
    };
    let all = Kind::planned().filter(|kind| given.is_none_or(|given| given == kind.name));
    all.filter(|kind| suits(kind, layout)).filter(in_rounds).map(|kind| kind.name).collect()
}

/// Whether a kind has such stages, and an order for such samples.
fn suits(kind: &Kind, layout: &Layout) -> bool {
    // A round of a sample has no fewer slices than there are ranks.
    let rounds = kind.step == StepForm::Rounds && layout.virtual_stages > 1;
    let has_order = kind.in_slices.is_some() && (!rounds || layout.slices >= layout.pp);
    kind.stages.allows(layout.virtual_stages) && (layout.slices == 1 || has_order)
}

/// Sizes of unit that are looked at: the default, those around 2P − 1 and, where memory allows, a
/// whole step.
fn units(job: &Job, layout: &Layout) -> Vec<usize> {
    let (p, b) = (layout.pp, layout.micro_batches);
    if !layout.in_units() {
        return vec![b];
    }
    if let Some(unit) = job.fixed.unit {
        return vec![unit.min(b)];
    }
    let default = default_unit(p, layout.virtual_stages, b);
    if layout.slices > 1 {
        // As many slices as there are ranks keep them at work.
        let least = p.div_ceil(layout.slices);
        let mut units = vec![1, 2, least, 2 * least];
        units.retain(|unit| *unit <= b);
        units.sort_unstable();
        units.dedup();
        return units;
    }
    let even = b.div_ceil(b.div_ceil(2 * p));
    let mut units = vec![p, 2 * p - 1, 2 * p, default, even, 3 * p, 4 * p];
    if b <= 8 * p {
        units.push(b);
    }
    units.retain(|u| *u <= b && *u >= 1);
    units.push(default);
    units.sort_unstable();
    units.dedup();
    units
}

/// Sizes with which a step is cut into units that are as equal as can be, those near the one at
/// hand first; no smaller than half the ranks, and no larger than eight times as many.
pub(super) fn even_units(job: &Job, layout: &Layout) -> Vec<usize> {
    if job.fixed.unit.is_some() {
        return vec![layout.unit];
    }
    let (p, b) = (layout.pp, layout.micro_batches);
    let mut units: Vec<usize> = (1..=b).map(|n| b.div_ceil(n)).chain([layout.unit]).collect();
    units.retain(|unit| (p.div_ceil(2)..=8 * p).contains(unit));
    units.sort_by_key(|unit| (unit.abs_diff(layout.unit), *unit));
    units.dedup();
    units
}

/// Why samples are not cut into `n` slices, and what would work.
fn not_cut(job: &Job, n: usize) -> Option<String> {
    let seq = job.model.seq;
    let kinds = || Kind::names(|kind| kind.in_slices.is_some());
    if job.slices().is_empty() {
        let most = seq / SLICE_GRID as usize;
        return Some(format!(
            "samples of this model with {seq} tokens are not cut so; use 1 to {}, dense layers, \
             and samples of a multiple of 256 tokens, {SAMPLE_MIN} or more",
            most.max(1)
        ));
    }
    if let Some(b) = job.fixed.micro_batch_size.filter(|b| *b > 1) {
        return Some(format!("a micro-batch has {b} samples; use 1, or micro-batch-size = 1"));
    }
    let name = job.fixed.schedule.as_deref()?;
    let whole = Kind::find(name).is_some_and(|kind| kind.in_slices.is_none());
    whole.then(|| {
        format!("schedule {name} has whole samples; use 1, or schedule {} with {n}", kinds())
    })
}

/// That no layout suits a job, whatever the memory.
pub(super) fn nothing(job: &Job) -> PlanError {
    let given = [("pp", job.fixed.pp), ("zero3", job.fixed.zero3), ("dp", job.fixed.dp)];
    let whole = |(_, n): &(&str, Option<usize>)| n.is_some_and(|n| !job.gpus.is_multiple_of(n));
    if let Some((field, Some(n))) = given.into_iter().find(whole) {
        let some = divisors(job.gpus).into_iter().filter(|d| *d < 2 * n).map(|d| d.to_string());
        let some: Vec<String> = some.collect();
        return PlanError::new(format!(
            "{field} = {n}: does not divide gpus = {}; use {}, or other gpus",
            job.gpus,
            some.join(", ")
        ));
    }
    let layers = job.model.decoder.layers;
    if let Some(v) = job.fixed.virtual_stages.filter(|v| *v > layers) {
        return PlanError::new(format!(
            "virtual = {v}: a stage needs a layer, and there are {layers}; use 1 to {layers}"
        ));
    }
    if let Slices::Number(n) = job.fixed.slices
        && n != 1
        && let Some(problem) = not_cut(job, n)
    {
        return PlanError::new(format!("slices = {n}: {problem}"));
    }
    let kind = job.fixed.schedule.as_deref().and_then(Kind::find);
    if let (Some(kind), Some(v)) = (kind, job.fixed.virtual_stages)
        && let Some((problem, help)) = kind.refused_stages(v)
    {
        return PlanError::new(format!("virtual = {v}: {problem}; {help}"));
    }
    let samples = job.global_batch;
    if let Some(b) = job.fixed.micro_batch_size.filter(|b| !samples.is_multiple_of(*b)) {
        return PlanError::new(format!(
            "micro-batch-size = {b}: does not divide global-batch = {samples}; use a number that \
             does, such as 1"
        ));
    }
    let shared: Vec<String> =
        divisors(job.gpus).iter().filter(|d| shares(job, **d)).map(ToString::to_string).collect();
    PlanError::new(format!(
        "gpus = {}: no P x D x K suits {} layers and a global batch of {}, with D one of {}; the \
         batch must be a multiple of D x K, and P at most the layers: use another global-batch, \
         such as {}",
        job.gpus,
        job.model.decoder.layers,
        job.global_batch,
        shared.join(", "),
        job.global_batch.next_multiple_of(job.gpus),
    ))
}
