//! Which layouts there are, and which of them are best.

use std::collections::HashMap;

use zeropp_schedule::schedules::{Kind, default_unit};

use crate::PlanError;
use crate::closed;
use crate::exact::{Planned, Simulation};
use crate::layout::{Job, KINDS, Layout, Recompute};
use crate::memory;
use crate::stages::{Model, Stage, simulator};

/// Layouts that are told.
pub const WANTED: usize = 10;
/// Layouts that are simulated, at most.
const SIMULATED_MAX: usize = 40;
/// Of one kind on one mesh.
const ALIKE_MAX: usize = 4;
/// Actions that are simulated, about.
const ACTIONS_BUDGET: usize = 900_000;
/// Times as long, and memory as large, as if there were no difference.
const SAME_TIME: f64 = 1.002;
const SAME_MEMORY: f64 = 0.98;
/// Stages on a rank that are looked at.
const STAGES: [usize; 8] = [1, 2, 3, 4, 6, 8, 12, 16];
/// Samples of a micro-batch that are looked at.
const SAMPLES: [usize; 8] = [1, 2, 3, 4, 6, 8, 16, 32];

/// What a search found.
#[derive(Clone, Debug)]
pub struct Found {
    /// The best, best first.
    pub best: Vec<Planned>,
    /// Layouts that were ranked in closed form.
    pub ranked: usize,
    /// Layouts that a closed form says are above the memory.
    pub pruned: usize,
    /// Layouts that were simulated.
    pub simulated: usize,
    /// Of those that were simulated, or the nearest of those that were not: what holds least.
    pub leanest: Option<Planned>,
}

/// A layout with its time in closed form.
struct Candidate {
    layout: Layout,
    step_s: f64,
    at_least: u64,
}

/// The layouts of `job`, best first.
///
/// # Errors
/// A job that no layout suits, whatever the memory.
pub fn search(job: &Job) -> Result<Found, PlanError> {
    job.check()?;
    let mut models = Models::new(job);
    let mut candidates = Vec::new();
    for mesh in meshes(job) {
        for samples in micro_batch_sizes(job, &mesh) {
            for v in virtual_stages(job, mesh.pp) {
                of_mesh(job, &mut models, mesh, (samples, v), &mut candidates);
            }
        }
    }
    if candidates.is_empty() {
        return Err(nothing(job));
    }
    let ranked = candidates.len();
    let (mut fit, mut over): (Vec<Candidate>, Vec<Candidate>) =
        candidates.into_iter().partition(|c| c.at_least <= job.memory);
    fit.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
    over.sort_by_key(|c| c.at_least);
    let pruned = over.len();
    let mut found = simulate_best(job, &mut models, &fit);
    if found.best.is_empty() {
        // What holds least may be anywhere among those that might fit, and else above.
        fit.sort_by_key(|c| c.at_least);
        fit.extend(over);
        let near = fit.iter().take(ALIKE_MAX * 3);
        let planned = near.filter_map(|c| planned(job, &mut models, &c.layout));
        let near: Vec<Planned> = planned.collect();
        for planned in near {
            match fits(job, &planned) {
                true => found.best.push(planned),
                false => lean(&mut found.leanest, planned),
            }
        }
    }
    Ok(Found { ranked, pruned, ..found })
}

fn simulate_best(job: &Job, models: &mut Models, fit: &[Candidate]) -> Found {
    let mut found = Found { best: Vec::new(), ranked: 0, pruned: 0, simulated: 0, leanest: None };
    let mut alike: HashMap<(&str, usize, usize), usize> = HashMap::new();
    let mut budget = ACTIONS_BUDGET;
    for candidate in fit {
        let layout = &candidate.layout;
        let enough = found.best.len() >= WANTED
            && found.best.iter().filter(|p| p.step_s < candidate.step_s).count() >= 2 * WANTED;
        if found.simulated >= SIMULATED_MAX || enough || budget == 0 {
            break;
        }
        let count = alike.entry((layout.schedule, layout.pp, layout.zero3)).or_default();
        if *count >= ALIKE_MAX {
            continue;
        }
        *count += 1;
        budget = budget.saturating_sub(layout.stages() * layout.micro_batches.min(400) * 14);
        let Some(planned) = planned(job, models, layout) else { continue };
        found.simulated += 1;
        match fits(job, &planned) {
            true => found.best.push(planned),
            false => lean(&mut found.leanest, planned),
        }
    }
    other_prefetch(job, models, &mut found);
    found.best.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
    found.best = distinct(std::mem::take(&mut found.best));
    found.best.truncate(WANTED);
    found
}

/// Those that are worth telling, of layouts in the order of their time: not one that differs from a
/// better one in V, U, kind, recomputation or prefetch alone, takes as long and holds as much.
fn distinct(all: Vec<Planned>) -> Vec<Planned> {
    let key = |p: &Planned| {
        let l = &p.layout;
        (l.pp, l.zero3, l.dp, l.micro_batch_size, l.zero1)
    };
    let held = |p: &Planned| p.worst().1.total() as f64;
    let stands_for = |better: &Planned, other: &Planned| {
        let as_fast = other.step_s < better.step_s * SAME_TIME;
        key(better) == key(other) && as_fast && held(other) > held(better) * SAME_MEMORY
    };
    let mut kept: Vec<Planned> = Vec::new();
    for planned in all {
        if !kept.iter().any(|better| stands_for(better, &planned)) {
            kept.push(planned);
        }
    }
    kept
}

/// The best few once more with other depths of prefetch; a depth that changes nothing is left out.
fn other_prefetch(job: &Job, models: &mut Models, found: &mut Found) {
    found.best.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
    let first: Vec<Planned> = found.best.iter().take(3).cloned().collect();
    for planned_before in first.iter().filter(|p| p.layout.zero3 > 1) {
        for prefetch in [0, 2] {
            let layout = Layout { prefetch, ..planned_before.layout.clone() };
            let Some(other) = planned(job, models, &layout) else { continue };
            let better = other.step_s < 0.998 * planned_before.step_s;
            if better && fits(job, &other) {
                found.best.push(other);
            }
        }
    }
}

fn fits(job: &Job, planned: &Planned) -> bool {
    planned.worst().1.total() <= job.memory
}

fn lean(leanest: &mut Option<Planned>, planned: Planned) {
    let less = |best: &Planned| planned.worst().1.total() < best.worst().1.total();
    if leanest.as_ref().is_none_or(less) {
        *leanest = Some(planned);
    }
}

/// A layout simulated; none where its schedule has no such shape.
fn planned(job: &Job, models: &mut Models, layout: &Layout) -> Option<Planned> {
    let (stages, blocks) = models.stages(job, layout)?;
    let simulation = Simulation::new(job, layout, &stages).ok()?;
    Some(simulation.planned(&blocks))
}

/// The model cut in every way that was asked for.
pub struct Models {
    of_samples: HashMap<usize, Model>,
    cuts: HashMap<(usize, usize), Option<Vec<usize>>>,
}

impl Models {
    /// None yet.
    pub fn new(job: &Job) -> Models {
        Models { of_samples: HashMap::from([(1, Model::new(job, 1))]), cuts: HashMap::new() }
    }

    /// The stages of a layout, and the blocks of each; none where there are too few blocks.
    pub fn stages(&mut self, job: &Job, layout: &Layout) -> Option<(Vec<Stage>, Vec<usize>)> {
        let samples = layout.micro_batch_size;
        let model = self.of_samples.entry(samples).or_insert_with(|| Model::new(job, samples));
        let stages = layout.stages();
        let cut = self.cuts.entry((samples, stages));
        let cut = cut.or_insert_with(|| model.cut(stages, &job.machine)).clone()?;
        Some((model.stages(job, layout, &cut), cut))
    }
}

/// P, D and K.
#[derive(Clone, Copy)]
struct MeshSizes {
    pp: usize,
    zero3: usize,
    dp: usize,
}

fn divisors(n: usize) -> Vec<usize> {
    (1..=n).filter(|d| n.is_multiple_of(*d)).collect()
}

fn meshes(job: &Job) -> Vec<MeshSizes> {
    let fixed = &job.fixed;
    let allowed = |given: Option<usize>, n: usize| given.is_none_or(|g| g == n);
    let node = job.machine.per_node;
    let mut meshes = Vec::new();
    for zero3 in divisors(job.gpus) {
        // Inside a node, or over a few whole ones.
        let inside = zero3 <= node && node.is_multiple_of(zero3);
        let over = zero3.is_multiple_of(node) && zero3 <= 4 * node;
        let given = fixed.zero3 == Some(zero3);
        if !allowed(fixed.zero3, zero3) || !(inside || over || given) {
            continue;
        }
        for pp in divisors(job.gpus / zero3) {
            let dp = job.gpus / zero3 / pp;
            if pp <= job.model.decoder.layers && allowed(fixed.pp, pp) && allowed(fixed.dp, dp) {
                meshes.push(MeshSizes { pp, zero3, dp });
            }
        }
    }
    meshes
}

fn micro_batch_sizes(job: &Job, mesh: &MeshSizes) -> Vec<usize> {
    let ranks = mesh.zero3 * mesh.dp;
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
    let numbers = STAGES.iter().copied().filter(|v| given.is_none_or(|g| g == *v));
    let mut numbers: Vec<usize> = numbers.chain(given).collect();
    numbers.dedup();
    numbers.retain(|v| pp.saturating_mul(*v) <= job.model.decoder.layers);
    numbers
}

/// All layouts on one mesh with so many samples in a micro-batch and stages on a rank.
fn of_mesh(
    job: &Job,
    models: &mut Models,
    MeshSizes { pp, zero3, dp }: MeshSizes,
    (micro_batch_size, virtual_stages): (usize, usize),
    candidates: &mut Vec<Candidate>,
) {
    let micro_batches = job.global_batch / (zero3 * dp * micro_batch_size);
    for recompute in recomputes(job) {
        for zero1 in if dp > 1 { &[true, false][..] } else { &[false][..] } {
            let mut layout = Layout {
                pp,
                zero3,
                dp,
                virtual_stages,
                unit: micro_batches,
                micro_batches,
                micro_batch_size,
                recompute,
                zero1: *zero1,
                schedule: "zeropp",
                prefetch: 1,
            };
            let Some((stages, _)) = models.stages(job, &layout) else { return };
            let costs = simulator(job, &layout, &stages);
            for schedule in kinds(job, virtual_stages) {
                layout.schedule = schedule;
                for unit in units(job, &layout) {
                    layout.unit = unit;
                    if !suits(&layout) {
                        continue;
                    }
                    candidates.push(Candidate {
                        step_s: closed::step_s(&layout, &stages, &costs),
                        at_least: memory::at_least(&layout, &stages),
                        layout: layout.clone(),
                    });
                }
            }
        }
    }
}

fn recomputes(job: &Job) -> Vec<Recompute> {
    let all = match job.compute.keeps_probabilities {
        // Nothing keeps attention's scores.
        false => &[Recompute::None, Recompute::Full][..],
        true => &[Recompute::None, Recompute::Selective, Recompute::Full],
    };
    let given = job.fixed.recompute;
    let chosen = all.iter().copied().filter(|r| given.is_none_or(|g| g == *r));
    let mut chosen: Vec<Recompute> = chosen.collect();
    if chosen.is_empty() {
        chosen.extend(given);
    }
    chosen
}

fn kinds(job: &Job, v: usize) -> impl Iterator<Item = &'static str> {
    let given = job.fixed.schedule.clone();
    KINDS.into_iter().filter(move |kind| {
        let wanted = given.as_deref().is_none_or(|g| g == *kind);
        wanted && Kind::find(kind).is_some_and(|row| row.stages.allows(v))
    })
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

/// Whether the kind has such a shape, as far as that is known without making it.
fn suits(layout: &Layout) -> bool {
    let (p, b) = (layout.pp, layout.micro_batches);
    match layout.schedule {
        "interleaved" | "interleaved-zb" => {
            layout.virtual_stages > 1 && b >= p && b.is_multiple_of(p)
        }
        "bf-pp" => layout.virtual_stages > 1,
        // One rank has no pipeline; one kind stands for all.
        "zeropp" => true,
        _ => p > 1,
    }
}

fn nothing(job: &Job) -> PlanError {
    let each = divisors(job.gpus);
    let shared: Vec<String> = each
        .iter()
        .filter(|d| **d <= job.machine.per_node && job.machine.per_node.is_multiple_of(**d))
        .map(ToString::to_string)
        .collect();
    PlanError::new(format!(
        "gpus = {}: no P x D x K suits {} layers and a global batch of {}, with D one of {} or \
         whole nodes; the batch must be a multiple of D x K, and P at most the layers: use another \
         global-batch, such as {}",
        job.gpus,
        job.model.decoder.layers,
        job.global_batch,
        shared.join(", "),
        job.global_batch.next_multiple_of(job.gpus),
    ))
}
