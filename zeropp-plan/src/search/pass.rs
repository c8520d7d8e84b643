//! One way through a job's layouts: those that are likeliest first, then what is beside the best.

mod outs;
mod recuts;
mod splits;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::Named;
use super::models::Models;
use super::order::{SHOWN, by_memory, in_order};
use super::space::{self, Sort};
use crate::closed::{self, FixedCosts};
use crate::cores;
use crate::exact::{self, MadePrograms, Planned, Simulation};
use crate::layout::{Job, Layout};
use crate::memory;
use crate::shared::Crowd;
use crate::stages::{Stage, copies, link, state_copies, step_ns};

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
/// Of layouts in slices that a short search begins at.
const NAMED_BUDGET: usize = 240_000;
/// Neighbours whose closed form is so much above the best step are left.
const TOO_SLOW: f64 = 1.5;
/// Samples in slices have so many times as many actions, of which more are simulated, too.
const SLICED: usize = 4;
/// Layouts whose closed form is so much above the best step of another sort are left.
const MUCH_SLOWER: f64 = 1.1;
/// Where the closed form of all layouts is so much above the memory, none fits.
const FAR_ABOVE: f64 = 1.25;

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

fn mesh(layout: &Layout) -> (usize, usize, usize) {
    (layout.pp, layout.zero3, layout.dp)
}

/// A layout with its seconds of a step and the fewest bytes of a rank in closed form.
type Known = (Layout, f64, u64);

/// A layout with its time in closed form.
struct Candidate {
    layout: Layout,
    step_s: f64,
    at_least: u64,
    /// Whether the place outside has room for it, as far as a closed form tells.
    has_room: bool,
}

/// A way through a job's layouts of one sort, which may be gone for several limits on memory: what
/// was simulated for one is known for the next.
pub(super) struct Pass<'a> {
    sort: Sort,
    job: &'a Job,
    models: Models,
    /// In the order of their times.
    candidates: Vec<Candidate>,
    known: HashMap<Layout, Option<Planned>>,
    /// Those of them with other cuts that are shorter.
    recut: HashMap<Layout, Vec<Planned>>,
    /// Those of them whose heads were split, where that is worth it.
    split: HashMap<Layout, Option<Planned>>,
    /// What the last layout's costs have beside its stages, which those with the same stages share.
    fixed: Option<(Arc<[Stage]>, FixedCosts)>,
    /// Whether heads may be split.
    splits: bool,
    /// Whether it was asked before, or has only a little way to go.
    again: bool,
}

/// What layouts have in common of which a few stand for all.
fn alike_of(layout: &Layout) -> (&'static str, usize, usize, bool) {
    (layout.schedule, layout.pp, layout.zero3, layout.moments)
}

impl<'a> Pass<'a> {
    /// All layouts of this sort, in closed form; none where there are none, whatever the memory.
    pub(super) fn new(job: &'a Job, sort: Sort) -> Option<Pass<'a>> {
        Pass::of(job, sort, |_| true)
    }

    /// Those of the meshes that these have, which are there beside them; a search that climbs a
    /// little way only. None where there are none of these.
    pub(super) fn near(job: &'a Job, sort: Sort, named: &[&Named]) -> Option<Pass<'a>> {
        let meshes: HashSet<_> = named.iter().map(|named| mesh(&named.layout)).collect();
        let mut pass = Pass::of(job, sort, |layout| meshes.contains(&mesh(layout)))?;
        pass.again = true;
        pass.splits = named.iter().any(|named| named.is_split);
        let most = if sort == Sort::Sliced { NAMED_BUDGET } else { usize::MAX };
        pass.simulate_some(named.iter().map(|named| named.layout.clone()), most);
        // What is cut for a split head is cut so again.
        for Named { layout, blocks, .. } in named.iter().copied().filter(|named| !named.is_split) {
            let first = pass.known.get(layout).cloned().flatten();
            if let Some(first) = first.filter(|p| p.blocks != *blocks) {
                let found = pass.recuts_of(&first, vec![blocks.clone()]);
                pass.recut.insert(layout.clone(), found);
            }
        }
        Some(pass)
    }

    fn of(job: &'a Job, sort: Sort, is_one: impl Fn(&Layout) -> bool) -> Option<Pass<'a>> {
        let mut pass = Pass {
            sort,
            job,
            models: Models::new(job),
            candidates: Vec::new(),
            known: HashMap::new(),
            recut: HashMap::new(),
            split: HashMap::new(),
            fixed: None,
            splits: true,
            again: false,
        };
        let all = space::first(job, sort).into_iter().filter(is_one);
        let mut candidates: Vec<Candidate> = all.filter_map(|l| pass.in_closed_form(l)).collect();
        candidates.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
        pass.candidates = candidates;
        (!pass.candidates.is_empty()).then_some(pass)
    }

    /// Looks for the best layouts that hold no more than `memory` bytes on any rank, where another
    /// sort has one that takes `best_s`.
    pub(super) fn search(&mut self, memory: u64, best_s: f64) {
        let all = self.candidates.iter().filter(|c| c.step_s < MUCH_SLOWER * best_s);
        let all = all.filter(|c| c.has_room).map(|c| (c.layout.clone(), c.step_s, c.at_least));
        let (fit, over): (Vec<_>, Vec<_>) = all.partition(|c| c.2 <= memory);
        self.simulate_first(memory, fit.iter().map(|c| (&c.0, c.1)));
        let enough = if self.again || best_s.is_finite() { 1 } else { SHOWN };
        if self.fitting(memory).count() < enough {
            let leanest = self.leanest_first(fit, over);
            let (first, climb) = match self.again {
                true => (AGAIN_BUDGET, AGAIN_BUDGET),
                false => (LEAN_BUDGET, self.times(LEAN_CLIMB_BUDGET)),
            };
            // Of whole samples the fastest that fit may well be behind the leanest.
            let is_sliced = self.sort == Sort::Sliced;
            let is_enough = |pass: &Pass<'_>| is_sliced && pass.fitting(memory).count() >= enough;
            self.climb_to_less_memory(leanest, first, climb, is_enough);
        }
        self.balance_copies(memory);
        let budget = if self.again { AGAIN_BUDGET } else { CLIMB_BUDGET };
        if self.fitting(memory).next().is_some() {
            self.climb(memory, budget, best_s);
        }
        // Beside one with a split head there may be a better one.
        if self.splits && self.split_heads(memory) && !self.again {
            self.climb(memory, AGAIN_BUDGET, best_s);
            self.split_heads(memory);
        }
        self.cut_again(memory);
        self.again = true;
    }

    /// Whether some layout holds no more than `memory`, as far as a short search finds one: of what
    /// may hold least the first, and what is beside that.
    pub(super) fn any_fits(&mut self, memory: u64) -> bool {
        let all = self.candidates.iter().map(|c| (c.layout.clone(), c.step_s, c.at_least));
        let (fit, over): (Vec<_>, Vec<_>) = all.partition(|c| c.2 <= memory);
        let least = self.candidates.iter().map(|c| c.at_least).min();
        if least.is_some_and(|least| least as f64 > FAR_ABOVE * memory as f64) {
            return false;
        }
        let fits = |pass: &Pass<'_>| pass.fitting(memory).next().is_some();
        let leanest = self.leanest_first(fit, over);
        self.climb_to_less_memory(leanest, AGAIN_BUDGET, AGAIN_BUDGET, fits);
        fits(self) || self.split_heads(memory) && fits(self)
    }

    /// The layouts of which closed forms say that they hold least, of those that might `fit` and
    /// then of those above.
    fn leanest_first(&self, fit: Vec<Known>, mut over: Vec<Known>) -> Vec<Layout> {
        // What holds least may be anywhere among those that might fit, and else above.
        let mut near = fit;
        near.sort_by_key(|c| c.2);
        over.sort_by_key(|c| c.2);
        near.extend(over);
        // Closed forms are further below for some kinds and meshes than for others.
        let mut alike: HashMap<(&str, usize, usize, bool), usize> = HashMap::new();
        near.retain(|(layout, ..)| {
            let count = alike.entry(alike_of(layout)).or_default();
            *count += 1;
            *count <= LEAN_ALIKE
        });
        near.into_iter().map(|(layout, ..)| layout).take(LEAN_MAX).collect()
    }

    /// Seconds of the fastest layout within `memory`; infinite where there is none.
    pub(super) fn best_s(&self, memory: u64) -> f64 {
        self.fitting(memory).map(|p| p.step_s).fold(f64::INFINITY, f64::min)
    }

    /// Layouts that were ranked in closed form, and those of them that are above `memory`.
    pub(super) fn ranked(&self, memory: u64) -> [usize; 2] {
        let above = self.candidates.iter().filter(|c| c.at_least > memory);
        [self.candidates.len(), above.count()]
    }

    /// The programs that were made.
    pub(super) fn made(&self) -> MadePrograms {
        self.models.made.clone()
    }

    /// What was simulated.
    pub(super) fn simulated(&self) -> impl Iterator<Item = &Planned> {
        self.known.values().flatten().chain(self.split.values().flatten())
    }

    /// Layouts that were simulated, those that have no program among them.
    pub(super) fn simulations(&self) -> usize {
        self.known.len()
    }

    /// What was simulated and fits, each with the cut that is shortest.
    pub(super) fn fitting(&self, memory: u64) -> impl Iterator<Item = &Planned> {
        let room = self.job.room_outside();
        let fits = move |p: &&Planned| p.worst().1.total() <= memory && p.outside() <= room;
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
        let (all, mut budget) = match self.again {
            true => (0, AGAIN_BUDGET),
            false => (ALL_BUDGET, self.times(ACTIONS_BUDGET)),
        };
        if in_order.iter().map(|(layout, _)| exact::actions(layout)).sum::<usize>() <= all {
            return self.simulate(in_order.into_iter().map(|(layout, _)| layout.clone()).collect());
        }
        let mut alike: HashMap<(&str, usize, usize, bool), usize> = HashMap::new();
        let mut next = in_order.into_iter().filter(|(layout, _)| {
            let count = alike.entry(alike_of(layout)).or_default();
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
            let mut found = self.simulations_of(layouts).into_iter();
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
    fn climb(&mut self, memory: u64, budget: usize, best_s: f64) {
        let mut climbed: HashSet<Layout> = HashSet::new();
        let mut budget = self.times(budget);
        while budget > 0 {
            let mut best: Vec<&Planned> = self.fitting(memory).collect();
            best.sort_by(|a, b| in_order(a, b));
            let Some(first) = best.first() else { return };
            let too_slow = (TOO_SLOW * first.step_s).min(MUCH_SLOWER * best_s);
            let Some(from) = next(&best, CLIMBED, &climbed) else { return };
            let mut new = self.new_beside(&from);
            new.retain(|c| c.step_s < too_slow && c.at_least <= memory && c.has_room);
            new.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
            climbed.insert(from);
            budget -= self.simulate_some(new.into_iter().map(|c| c.layout), budget);
        }
    }

    /// Simulates these layouts, and what is beside those that hold least of them and of what is
    /// found so, whether they fit or not. What was simulated before changes nothing: so a plan with
    /// as much memory as the leanest needs finds it again.
    fn climb_to_less_memory(
        &mut self,
        near: Vec<Layout>,
        first: usize,
        mut budget: usize,
        is_enough: impl Fn(&Self) -> bool,
    ) {
        let mut left = first;
        for some in near.chunks(2 * LEAN_CLIMBED) {
            left -= self.simulate_some(some.iter().cloned(), left);
            if is_enough(self) {
                return;
            }
        }
        let mut lean: HashSet<Layout> = near.into_iter().collect();
        let mut climbed: HashSet<Layout> = HashSet::new();
        while budget > 0 && !is_enough(self) {
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
            budget -=
                self.simulate_some(new.iter().cloned(), budget.min(self.times(LEAN_CLIMB_EACH)));
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

    /// A number of actions, for layouts of this sort.
    fn times(&self, actions: usize) -> usize {
        if self.sort == Sort::Sliced { SLICED * actions } else { actions }
    }

    fn in_closed_form(&mut self, layout: Layout) -> Option<Candidate> {
        let job = self.job;
        // A sample's stages are enough here, and slices have many.
        let whole = Layout { slices: 1, ..layout.clone() };
        let (stages, _) = self.models.stages(job, &whole)?;
        let copies = copies(job, &whole);
        let fixed = match &mut self.fixed {
            Some((of, fixed)) if Arc::ptr_eq(of, &stages) => fixed,
            other => {
                let states = state_copies(job, &whole, &stages);
                let (link, step_ns) = (link(job, &whole), step_ns(job, &whole, &stages));
                &mut other.insert((stages.clone(), FixedCosts { link, copies, states, step_ns })).1
            }
        };
        fixed.copies = copies;
        let crowd = Crowd::new(&job.machine, &layout);
        let contention = job.machine.contention;
        let slowdown = crowd.map_or(1.0, |crowd| crowd.slowdown([1.0, 0.0]));
        let slowed = [slowdown, contention, self.models.overhead(job, &layout)];
        let splits = job.may_split_head(&layout);
        let shared = if splits { self.models.head_s(job, &layout) } else { 0.0 };
        let step_s = closed::step_s(&layout, &stages, fixed, slowed, shared);
        let mut at_least = memory::at_least(&layout, &stages, splits);
        if splits {
            let (even, _) = self.models.stages_but_head(job, &layout)?;
            at_least = at_least.min(memory::at_least(&layout, &even, true));
        }
        let has_room = match self.job.room_outside() {
            u64::MAX => true,
            room => memory::outside(job, &layout, &stages) <= room,
        };
        Some(Candidate { step_s, at_least, has_room, layout })
    }

    /// Simulates those of `layouts` that are not known.
    fn simulate(&mut self, layouts: Vec<Layout>) {
        let found = self.simulations_of(layouts);
        self.known.extend(found);
    }

    /// Those of `layouts` that are not known, in their order, with what they come to; none where a
    /// schedule has no such shape.
    fn simulations_of(&mut self, mut layouts: Vec<Layout>) -> Vec<(Layout, Option<Planned>)> {
        let mut new: HashSet<Layout> = HashSet::new();
        layouts.retain(|l| !self.known.contains_key(l) && new.insert(l.clone()));
        let job = self.job;
        let mut cut = |layout: Layout| (self.models.stages(job, &layout), layout);
        let cut: Vec<_> = layouts.into_iter().map(&mut cut).collect();
        let made = &self.models.made;
        let planned = cores::map(&cut, |(cut, layout)| {
            let (stages, blocks) = cut.as_ref()?;
            Some(Simulation::of(job, layout, stages, made).ok()?.planned(blocks))
        });
        cut.into_iter().map(|(_, layout)| layout).zip(planned).collect()
    }
}
