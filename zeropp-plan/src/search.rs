//! Which layouts there are, and which of them are best.

mod recuts;
mod space;
mod splits;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::PlanError;
use crate::closed;
use crate::cores;
use crate::exact::{self, Planned, Simulation};
use crate::layout::{Job, Layout};
use crate::memory;
use crate::shared::Crowd;
use crate::stages::{ModelCosts, Stage, simulator};

/// Layouts that are shown.
pub(crate) const SHOWN: usize = 10;
/// Layouts that are simulated in the order of their closed form, at most.
const SIMULATED_MAX: usize = 40;
/// Of one kind on one mesh.
const ALIKE_MAX: usize = 4;
/// The best whose neighbours are looked at, and the best meshes of which the best one's are.
const CLIMBED: usize = 6;
const LEAN_CLIMBED: usize = 3;
const MESHES_CLIMBED: usize = 8;
/// Actions up to which all layouts are simulated.
const ALL_BUDGET: usize = 500_000;
/// Actions that are simulated else in the order of closed forms, and then of neighbours.
const ACTIONS_BUDGET: usize = 150_000;
const CLIMB_BUDGET: usize = 600_000;
/// Actions of neighbours on the way to less memory, and those of any one layout: some layouts have
/// so many that the others' would never be looked at.
const LEAN_CLIMB_BUDGET: usize = 1_000_000;
const LEAN_CLIMB_EACH: usize = 80_000;
/// Of what may hold least, where nothing is known to fit: actions, layouts, and layouts of one
/// kind and mesh.
const LEAN_BUDGET: usize = 1_500_000;
const LEAN_MAX: usize = 24;
const LEAN_ALIKE: usize = 1;
/// Of neighbours, where the search has been asked for another limit before.
const AGAIN_BUDGET: usize = 60_000;
/// Neighbours whose closed form is so much above the best step are left.
const TOO_SLOW: f64 = 1.5;
/// So many times the best step are not tried.
const WORTH_TRYING: f64 = 1.3;
/// Times as long, and memory as large, as if there were no difference.
const SAME_TIME: f64 = 1.002;
const SAME_MEMORY: f64 = 0.98;
/// As much of the memory is so little that a layout is worth telling, if it is not much slower.
const MUCH_LESS_MEMORY: f64 = 0.8;
/// Times as long as another and still as good.
const TIE: f64 = 1.01;

/// The first of those that have not been climbed from, of the best `most` of all and then of each
/// mesh.
fn next(best: &[&Planned], most: usize, climbed: &HashSet<Layout>) -> Option<Layout> {
    let is_new = |p: &&&Planned| !climbed.contains(&p.layout);
    let mut meshes = HashSet::new();
    let mut of_mesh = best.iter().filter(|p| {
        meshes.len() < MESHES_CLIMBED && meshes.insert((p.layout.pp, p.layout.zero3, p.layout.dp))
    });
    let of_all = best.iter().take(most).find(is_new);
    of_all.or_else(|| of_mesh.find(is_new)).map(|p| p.layout.clone())
}

/// What a search found.
#[derive(Clone, Debug)]
pub struct SearchedLayouts {
    /// The best, best first.
    pub best: Vec<Planned>,
    /// Layouts that were ranked in closed form.
    pub ranked: usize,
    /// Layouts that a closed form says are above the memory.
    pub pruned: usize,
    /// Layouts that were simulated.
    pub simulated: usize,
    /// Of those that were simulated: what holds least.
    pub leanest: Option<Planned>,
}

/// A layout with its time in closed form.
struct Candidate {
    layout: Layout,
    step_s: f64,
    at_least: u64,
}

/// A search through a job's layouts, which may be asked for several limits on memory: what was
/// simulated for one is known for the next.
pub struct Search<'a> {
    job: &'a Job,
    models: Models,
    /// In the order of their times.
    candidates: Vec<Candidate>,
    known: HashMap<Layout, Option<Planned>>,
    /// Those of them with other cuts that are shorter.
    recut: HashMap<Layout, Vec<Planned>>,
    /// Those of them whose heads were split, where that is worth it.
    split: HashMap<Layout, Option<Planned>>,
    /// Whether it was asked before.
    again: bool,
    /// Whether any layout that fits will do.
    is_short: bool,
}

impl<'a> Search<'a> {
    /// All layouts of `job`, in closed form.
    ///
    /// # Errors
    /// A job that no layout suits, whatever the memory.
    pub fn new(job: &'a Job) -> Result<Search<'a>, PlanError> {
        job.check()?;
        let mut search = Search {
            job,
            models: Models::new(job),
            candidates: Vec::new(),
            known: HashMap::new(),
            recut: HashMap::new(),
            split: HashMap::new(),
            again: false,
            is_short: false,
        };
        let candidates = space::first(job).into_iter().filter_map(|l| search.in_closed_form(l));
        let mut candidates: Vec<Candidate> = candidates.collect();
        if candidates.is_empty() {
            return Err(space::nothing(job));
        }
        candidates.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
        search.candidates = candidates;
        Ok(search)
    }

    /// The same search in less time, which climbs a little way only, also from these layouts, cut
    /// into stages with so many blocks; without blocks, as they are cut first.
    pub(crate) fn short(mut self, named: Vec<(Layout, Vec<usize>)>) -> Search<'a> {
        (self.again, self.is_short) = (true, true);
        self.simulate(named.iter().map(|(layout, _)| layout.clone()).collect());
        for (layout, blocks) in named {
            let first = self.known.get(&layout).cloned().flatten();
            if let Some(first) = first.filter(|p| !blocks.is_empty() && p.blocks != blocks) {
                let found = self.recuts_of(&first, vec![blocks]);
                self.recut.insert(layout, found);
            }
        }
        self
    }

    /// The best layouts that hold no more than `memory` bytes on any rank: in the order of their
    /// times, but for ties.
    pub fn within(&mut self, memory: u64) -> SearchedLayouts {
        let all = self.candidates.iter().map(|c| (c.layout.clone(), c.step_s, c.at_least));
        let (fit, mut over): (Vec<_>, Vec<_>) = all.partition(|c| c.2 <= memory);
        let (ranked, pruned) = (self.candidates.len(), over.len());
        self.simulate_first(memory, fit.iter().map(|c| (&c.0, c.1)));
        let enough = if self.is_short { 1 } else { SHOWN };
        if self.fitting(memory).count() < enough {
            // What holds least may be anywhere among those that might fit, and else above.
            let mut near = fit;
            near.sort_by_key(|c| c.2);
            over.sort_by_key(|c| c.2);
            near.extend(over);
            // Closed forms are further below for some kinds and meshes than for others.
            let mut alike: HashMap<(&str, usize, usize), usize> = HashMap::new();
            near.retain(|(layout, ..)| {
                let count = alike.entry((layout.schedule, layout.pp, layout.zero3)).or_default();
                *count += 1;
                *count <= LEAN_ALIKE
            });
            let near = near.into_iter().map(|(layout, ..)| layout).take(LEAN_MAX).collect();
            self.climb_to_less_memory(near);
        }
        let budget = if self.again { AGAIN_BUDGET } else { CLIMB_BUDGET };
        if self.fitting(memory).next().is_some() {
            self.climb(memory, budget);
        }
        // Beside one with a split head there may be a better one.
        if self.split_heads(memory) && !self.again {
            self.climb(memory, AGAIN_BUDGET);
            self.split_heads(memory);
        }
        self.cut_again(memory);
        let mut best = distinct(self.in_order(memory), self.job.machine.margin);
        best.truncate(SHOWN);
        let best = lean_first(best);
        self.again = true;
        let all = self.known.values().flatten().chain(self.split.values().flatten());
        let leanest = all.min_by(|a, b| by_memory(a, b)).cloned();
        SearchedLayouts { best, ranked, pruned, simulated: self.known.len(), leanest }
    }

    /// `count` of those that [`Search::within`] simulated and that hold no more than `memory`
    /// bytes, to be tried: no two whose ranks do the same, and the best of each mesh, V,
    /// micro-batch size and recomputation before others. What a model does not know it mostly
    /// does not know of all that have these in common. Best first.
    pub fn differing(&mut self, memory: u64, count: usize) -> Vec<Planned> {
        let (mut programs, mut alike) = (HashSet::new(), HashSet::new());
        let (mut first, mut others) = (Vec::new(), Vec::new());
        let in_order = self.in_order(memory);
        let most_s = in_order.first().map_or(0.0, |best| WORTH_TRYING * best.step_s);
        for planned in in_order.into_iter().take_while(|p| p.step_s <= most_s) {
            let l = &planned.layout;
            let class = (l.pp, l.zero3, l.dp, l.zero1, l.virtual_stages);
            let is_new = !alike.contains(&(class, l.micro_batch_size, l.recompute));
            if first.len() == count || !is_new && first.len() + others.len() >= count {
                continue;
            }
            let stages = self.models.stages_of(self.job, &planned);
            let Ok(simulation) = Simulation::new(self.job, l, &stages) else { continue };
            if programs.insert(simulation.program_id()) {
                alike.insert((class, l.micro_batch_size, l.recompute));
                if is_new { &mut first } else { &mut others }.push(planned);
            }
        }
        first.extend(others);
        first.truncate(count);
        first.sort_by(self::in_order);
        first
    }

    fn in_order(&self, memory: u64) -> Vec<Planned> {
        let mut best: Vec<Planned> = self.fitting(memory).cloned().collect();
        best.sort_by(in_order);
        best
    }

    /// What was simulated and fits, each with the cut that is shortest.
    fn fitting(&self, memory: u64) -> impl Iterator<Item = &Planned> {
        let fits = move |p: &&Planned| p.worst().1.total() <= memory;
        self.known.iter().filter_map(move |(layout, planned)| {
            let others = self.recut.get(layout).into_iter().flatten();
            let others = others.chain(self.split.get(layout).into_iter().flatten());
            let all = planned.iter().chain(others).filter(fits);
            all.min_by(|a, b| a.step_s.total_cmp(&b.step_s))
        })
    }

    /// Simulates layouts in the order of their closed form, until enough are known.
    fn simulate_first<'b>(
        &mut self,
        memory: u64,
        in_order: impl Iterator<Item = (&'b Layout, f64)>,
    ) {
        let in_order: Vec<_> = in_order.collect();
        let (all, mut budget) = match self.is_short {
            true => (0, AGAIN_BUDGET),
            false => (ALL_BUDGET, ACTIONS_BUDGET),
        };
        if in_order.iter().map(|(layout, _)| exact::actions(layout)).sum::<usize>() <= all {
            return self.simulate(in_order.into_iter().map(|(layout, _)| layout.clone()).collect());
        }
        let mut alike: HashMap<(&str, usize, usize), usize> = HashMap::new();
        let mut next = in_order.into_iter().filter(|(layout, _)| {
            let count = alike.entry((layout.schedule, layout.pp, layout.zero3)).or_default();
            *count += 1;
            *count <= ALIKE_MAX
        });
        let mut steps: Vec<f64> = Vec::new();
        let mut simulated = 0;
        while budget > 0 {
            // As many at once as there are cores; those after the last one that is wanted are not
            // kept, so that no plan depends on the machine that it is made on.
            let some: Vec<_> = next.by_ref().take(cores::number()).collect();
            if some.is_empty() {
                return;
            }
            let layouts = some.iter().map(|(layout, _)| (*layout).clone()).collect();
            let mut found = self.simulated(layouts).into_iter();
            for (layout, step_s) in some {
                let faster = steps.iter().filter(|s| **s < step_s).count();
                if simulated >= SIMULATED_MAX || faster >= 2 * SHOWN || budget == 0 {
                    return;
                }
                if !self.known.contains_key(layout) {
                    budget = budget.saturating_sub(exact::actions(layout));
                    self.known.extend(found.next());
                }
                let Some(planned) = &self.known[layout] else { continue };
                simulated += 1;
                steps.extend((planned.worst().1.total() <= memory).then_some(planned.step_s));
            }
        }
    }

    /// Simulates what is beside the fastest layouts that fit, and beside those that are faster,
    /// until nothing is.
    fn climb(&mut self, memory: u64, mut budget: usize) {
        let mut climbed: HashSet<Layout> = HashSet::new();
        while budget > 0 {
            let mut best: Vec<&Planned> = self.fitting(memory).collect();
            best.sort_by(|a, b| in_order(a, b));
            let Some(first) = best.first() else { return };
            let too_slow = TOO_SLOW * first.step_s;
            let Some(from) = next(&best, CLIMBED, &climbed) else { return };
            let mut new = self.new_beside(&from);
            new.retain(|c| c.step_s < too_slow && c.at_least <= memory);
            new.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
            climbed.insert(from);
            budget -= self.simulate_some(new.into_iter().map(|c| c.layout), budget);
        }
    }

    /// Simulates these layouts, and what is beside those that hold least of them and of what is
    /// found so, whether they fit or not. What was simulated before changes nothing: so a plan with
    /// as much memory as the leanest needs finds it again.
    fn climb_to_less_memory(&mut self, near: Vec<Layout>) {
        let (first, mut budget) = match (self.is_short, self.again) {
            (true, _) => (AGAIN_BUDGET, AGAIN_BUDGET),
            (false, true) => (LEAN_BUDGET, AGAIN_BUDGET),
            (false, false) => (LEAN_BUDGET, LEAN_CLIMB_BUDGET),
        };
        self.simulate_some(near.iter().cloned(), first);
        let mut lean: HashSet<Layout> = near.into_iter().collect();
        let mut climbed: HashSet<Layout> = HashSet::new();
        while budget > 0 {
            let planned = |layout| self.known.get(layout).and_then(Option::as_ref);
            let mut best: Vec<&Planned> = lean.iter().filter_map(planned).collect();
            if best.is_empty() {
                return;
            }
            best.sort_by(|a, b| by_memory(a, b));
            let too_slow = TOO_SLOW * best[0].step_s;
            let Some(from) = next(&best, LEAN_CLIMBED, &climbed) else { return };
            let beside = space::beside(self.job, &from).into_iter().filter(|l| !lean.contains(l));
            let mut new: Vec<Candidate> = beside
                .collect::<Vec<_>>()
                .into_iter()
                .filter_map(|l| self.in_closed_form(l))
                .collect();
            new.retain(|c| c.step_s < too_slow);
            new.sort_by_key(|c| c.at_least);
            climbed.insert(from);
            let new: Vec<Layout> = new.into_iter().map(|c| c.layout).collect();
            budget -= self.simulate_some(new.iter().cloned(), budget.min(LEAN_CLIMB_EACH));
            lean.extend(new.into_iter().filter(|layout| self.known.contains_key(layout)));
        }
    }

    /// What is beside a layout and not known.
    fn new_beside(&mut self, layout: &Layout) -> Vec<Candidate> {
        let mut new = space::beside(self.job, layout);
        new.retain(|other| !self.known.contains_key(other));
        new.into_iter().filter_map(|layout| self.in_closed_form(layout)).collect()
    }

    /// Simulates these in order until `budget` is spent. Returns what was, no more than that.
    fn simulate_some(&mut self, layouts: impl Iterator<Item = Layout>, budget: usize) -> usize {
        let mut spent = 0;
        let some = layouts.take_while(|layout| {
            let is_left = spent < budget;
            spent += if is_left { exact::actions(layout) } else { 0 };
            is_left
        });
        let some = some.collect();
        self.simulate(some);
        spent.min(budget)
    }

    fn in_closed_form(&mut self, layout: Layout) -> Option<Candidate> {
        let (stages, _) = self.models.stages(self.job, &layout)?;
        let costs = simulator(self.job, &layout, &stages);
        let crowd = Crowd::new(&self.job.machine, &layout);
        let contention = self.job.machine.contention;
        let slowdown = crowd.map_or(1.0, |crowd| crowd.slowdown([1.0, 0.0]));
        let splits = self.job.may_split_head(&layout);
        let shared = if splits { self.models.head_s(self.job, &layout) } else { 0.0 };
        let step_s = closed::step_s(&layout, &stages, &costs, [slowdown, contention], shared);
        let mut at_least = memory::at_least(&layout, &stages, splits);
        if splits {
            let (even, _) = self.models.stages_but_head(self.job, &layout)?;
            at_least = at_least.min(memory::at_least(&layout, &even, true));
        }
        Some(Candidate { step_s, at_least, layout })
    }

    /// Simulates those of `layouts` that are not known.
    fn simulate(&mut self, layouts: Vec<Layout>) {
        let found = self.simulated(layouts);
        self.known.extend(found);
    }

    /// Those of `layouts` that are not known, in their order, with what they come to; none where a
    /// schedule has no such shape.
    fn simulated(&mut self, mut layouts: Vec<Layout>) -> Vec<(Layout, Option<Planned>)> {
        let mut new: HashSet<Layout> = HashSet::new();
        layouts.retain(|l| !self.known.contains_key(l) && new.insert(l.clone()));
        let job = self.job;
        let mut cut = |layout: Layout| (self.models.stages(job, &layout), layout);
        let cut: Vec<_> = layouts.into_iter().map(&mut cut).collect();
        let planned = cores::map(&cut, |(cut, layout)| {
            let (stages, blocks) = cut.as_ref()?;
            Some(Simulation::new(job, layout, stages).ok()?.planned(blocks))
        });
        cut.into_iter().map(|(_, layout)| layout).zip(planned).collect()
    }
}

/// The faster first; of equals the one that holds less; and one order for all, so that a plan is
/// the same each time.
fn in_order(a: &Planned, b: &Planned) -> std::cmp::Ordering {
    let held = |p: &Planned| p.worst().1.total();
    let words = |p: &Planned| format!("{} {}", p.layout, p.layout.prefetch);
    a.step_s.total_cmp(&b.step_s).then(held(a).cmp(&held(b))).then_with(|| words(a).cmp(&words(b)))
}

/// What holds less first; of equals the faster one.
fn by_memory(a: &Planned, b: &Planned) -> std::cmp::Ordering {
    a.worst().1.total().cmp(&b.worst().1.total()).then_with(|| in_order(a, b))
}

/// Those that are worth a row, of layouts in the order of their time: one of a strategy, which is a
/// mesh with its micro-batches and what it computes again. One that differs in V and the kind, and
/// so in U, has a row beside a faster one where it takes longer than the margin of the model, or
/// holds much less.
fn distinct(all: Vec<Planned>, margin: f64) -> Vec<Planned> {
    let mesh = |p: &Planned| {
        let l = &p.layout;
        (l.pp, l.zero3, l.dp, l.zero1)
    };
    let strategy = |p: &Planned| (mesh(p), p.layout.micro_batch_size, p.layout.recompute);
    let held = |p: &Planned| p.worst().1.total() as f64;
    let stands_for = |better: &Planned, other: &Planned| {
        let is = |time: f64, memory: f64| {
            other.step_s < better.step_s * time && held(other) > held(better) * memory
        };
        let is_alike = strategy(better) == strategy(other) && is(1.0 + margin, MUCH_LESS_MEMORY);
        is_alike || mesh(better) == mesh(other) && is(SAME_TIME, SAME_MEMORY)
    };
    let mut kept: Vec<Planned> = Vec::new();
    for planned in all {
        if !kept.iter().any(|better| stands_for(better, &planned)) {
            kept.push(planned);
        }
    }
    kept
}

/// Layouts in the order of their time, but of those that tie the one first that sends least to
/// other nodes: rates of links between nodes are the ones that are known least.
fn lean_first(mut in_order: Vec<Planned>) -> Vec<Planned> {
    let mut all = Vec::new();
    while let Some(fastest) = in_order.first() {
        let tie = in_order.iter().take_while(|p| p.step_s < fastest.step_s * TIE);
        let least = |(_, a): &(usize, &Planned), (_, b): &(usize, &Planned)| {
            a.traffic.between.total_cmp(&b.traffic.between)
        };
        let at = tie.enumerate().min_by(least).map_or(0, |(at, _)| at);
        all.push(in_order.remove(at));
    }
    all
}

/// The model cut in every way that was asked for.
pub struct Models {
    of_samples: HashMap<usize, ModelCosts>,
    /// By samples and stages, and whether the last one has the head.
    cuts: HashMap<(usize, usize, bool), Option<Vec<usize>>>,
    /// The last stages, which many layouts in a row have: those of all kinds and units. Cut without
    /// the head, and with it.
    last: [Option<(Alike, Arc<[Stage]>)>; 2],
}

/// What all layouts with the same stages share: one that stands for them, and bytes of an element
/// of packed weights.
type Alike = ((Layout, bool), u64);

impl Models {
    /// None yet.
    pub fn new(job: &Job) -> Models {
        let of_samples = HashMap::from([(1, ModelCosts::new(job, 1))]);
        Models { of_samples, cuts: HashMap::new(), last: [None, None] }
    }

    /// Whether a run cuts by itself as `planned` is cut, where that is known.
    pub(crate) fn is_cut_of_run(&mut self, job: &Job, planned: &Planned) -> bool {
        let layout = &planned.layout;
        let model = self.model(job, layout.micro_batch_size);
        let cut = model.cut_of_run(layout, planned.head_blocks.is_empty());
        cut.is_some_and(|cut| cut == planned.blocks)
    }

    /// Seconds that the head's F, B and W of a micro-batch take.
    pub(crate) fn head_s(&mut self, job: &Job, layout: &Layout) -> f64 {
        self.model(job, layout.micro_batch_size).head_s(&job.machine)
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

    /// The stages of a layout that was simulated, as it was cut.
    pub fn stages_of(&mut self, job: &Job, planned: &Planned) -> Arc<[Stage]> {
        let Planned { layout, blocks, head_blocks, .. } = planned;
        self.stages_with(job, layout, blocks, head_blocks)
    }

    /// The stages of a layout with so many blocks each, and of ranks so many of the head's rows.
    fn stages_with(
        &mut self,
        job: &Job,
        layout: &Layout,
        blocks: &[usize],
        head_blocks: &[usize],
    ) -> Arc<[Stage]> {
        let model = self.model(job, layout.micro_batch_size);
        model.with_head(job, layout, blocks, head_blocks).into()
    }

    fn model(&mut self, job: &Job, samples: usize) -> &mut ModelCosts {
        self.of_samples.entry(samples).or_insert_with(|| ModelCosts::new(job, samples))
    }

    /// The stages of a layout, and the blocks of each; none where there are too few blocks.
    pub fn stages(&mut self, job: &Job, layout: &Layout) -> Option<(Arc<[Stage]>, Vec<usize>)> {
        self.cut(job, layout, true)
    }

    /// The same, cut as if there were no head.
    fn stages_but_head(
        &mut self,
        job: &Job,
        layout: &Layout,
    ) -> Option<(Arc<[Stage]>, Vec<usize>)> {
        self.cut(job, layout, false)
    }

    fn cut(
        &mut self,
        job: &Job,
        layout: &Layout,
        has_head: bool,
    ) -> Option<(Arc<[Stage]>, Vec<usize>)> {
        let samples = layout.micro_batch_size;
        let model = self.of_samples.entry(samples).or_insert_with(|| ModelCosts::new(job, samples));
        let stages = layout.stages();
        let cut = self.cuts.entry((samples, stages, has_head));
        let cut = cut.or_insert_with(|| model.cut(stages, &job.machine, has_head)).clone()?;
        let key = (layout.of_stages(), layout.packed_bytes(job.compute.packing));
        if let Some((of, stages)) = &self.last[usize::from(has_head)]
            && *of == key
        {
            return Some((stages.clone(), cut));
        }
        let stages: Arc<[Stage]> = model.stages(job, layout, &cut).into();
        self.last[usize::from(has_head)] = Some((key, stages.clone()));
        Some((stages, cut))
    }
}
