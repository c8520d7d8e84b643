//! Which layouts there are, and which of them are best.

mod models;
mod order;
mod pass;
mod space;

use std::collections::HashSet;

use crate::PlanError;
use crate::exact::{MadePrograms, Planned, Simulation};
use crate::layout::{Job, Layout, Slices};

pub use models::Models;
pub(crate) use order::SHOWN;
use order::{by_memory, distinct, lean_first};
use pass::Pass;
use space::Sort;

/// So many times the best step are not tried.
const WORTH_TRYING: f64 = 1.3;

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

/// A search through a job's layouts, which may be asked for several limits on memory: what was
/// simulated for one is known for the next.
pub struct Search<'a> {
    job: &'a Job,
    passes: Vec<Pass<'a>>,
    /// A sort that is looked at only where nothing else fits.
    left: Option<Sort>,
}

/// A layout that a short search begins at.
pub(crate) struct Named {
    pub(crate) layout: Layout,
    /// Blocks of each stage.
    pub(crate) blocks: Vec<usize>,
    /// Whether its head is split.
    pub(crate) is_split: bool,
}

impl<'a> Search<'a> {
    /// All layouts of `job`, in closed form.
    ///
    /// # Errors
    /// A job that no layout suits, whatever the memory.
    pub fn new(job: &'a Job) -> Result<Search<'a>, PlanError> {
        job.check()?;
        let (sorts, left): (&[Sort], _) = match job.fixed.slices {
            Slices::Number(1) | Slices::Whole => (&[Sort::Whole], None),
            Slices::Number(_) => (&[Sort::Sliced], None),
            Slices::Runnable if job.compute.on_gpu => (&[Sort::Whole], Some(Sort::Sliced)),
            Slices::Any | Slices::Runnable => (&[Sort::Whole, Sort::Sliced], None),
        };
        let passes: Vec<Pass> = sorts.iter().filter_map(|sort| Pass::new(job, *sort)).collect();
        if passes.is_empty() {
            return Err(space::nothing(job));
        }
        Ok(Search { job, passes, left })
    }

    /// A search in less time, which climbs a little way only, among layouts that are like these,
    /// and from them.
    pub(crate) fn near(job: &'a Job, named: &[Named]) -> Search<'a> {
        let of = |sort: Sort| {
            let mine = named.iter().filter(|named| Sort::of(&named.layout) == sort);
            Pass::near(job, sort, &mine.collect::<Vec<_>>())
        };
        let passes = [Sort::Whole, Sort::Sliced].into_iter().filter_map(of).collect();
        Search { job, passes, left: None }
    }

    /// The programs that were made.
    pub(crate) fn made(&self) -> MadePrograms {
        self.passes.first().map(|pass| pass.made()).unwrap_or_default()
    }

    /// Whether some layout holds no more than the job's memory, as far as a short search tells.
    pub(crate) fn any_fits(mut self) -> bool {
        self.passes.extend(self.left.and_then(|sort| Pass::new(self.job, sort)));
        self.passes.iter_mut().any(|pass| pass.any_fits(self.job.memory))
    }

    /// The best layouts that hold no more than `memory` bytes on any rank: in the order of their
    /// times, but for ties.
    pub fn within(&mut self, memory: u64) -> SearchedLayouts {
        let mut best_s = f64::INFINITY;
        for pass in &mut self.passes {
            pass.search(memory, best_s);
            best_s = best_s.min(pass.best_s(memory));
        }
        if let Some(sort) = self.left.take_if(|_| best_s.is_infinite()) {
            let pass = Pass::new(self.job, sort);
            self.passes.extend(pass.map(|mut pass| {
                pass.search(memory, best_s);
                pass
            }));
        }
        let mut best = distinct(self.in_order(memory), self.job.machine.margin);
        best.truncate(SHOWN);
        let ranked = self.passes.iter().map(|pass| pass.ranked(memory));
        let [ranked, pruned] = ranked.fold([0; 2], |a, b| [a[0] + b[0], a[1] + b[1]]);
        let simulated = self.passes.iter().flat_map(Pass::simulated);
        SearchedLayouts {
            best: lean_first(best),
            ranked,
            pruned,
            simulated: self.passes.iter().map(Pass::simulations).sum(),
            leanest: simulated.min_by(|a, b| by_memory(a, b)).cloned(),
        }
    }

    /// `count` of those that [`Search::within`] simulated and that hold no more than `memory`
    /// bytes, to be tried: no two whose ranks do the same, and the best of each mesh, V,
    /// micro-batch size and recomputation before others. What a model does not know it mostly
    /// does not know of all that have these in common. Best first.
    pub fn differing(&mut self, memory: u64, count: usize) -> Vec<Planned> {
        let mut models = Models::new(self.job);
        let (mut programs, mut alike) = (HashSet::new(), HashSet::new());
        let (mut first, mut others) = (Vec::new(), Vec::new());
        let in_order = self.in_order(memory);
        let most_s = in_order.first().map_or(0.0, |best| WORTH_TRYING * best.step_s);
        for planned in in_order.into_iter().take_while(|p| p.step_s <= most_s) {
            let l = &planned.layout;
            let class = (l.pp, l.zero3, l.dp, l.zero1, l.virtual_stages, l.slices > 1);
            let is_new = !alike.contains(&(class, l.micro_batch_size, l.recompute));
            if first.len() == count || !is_new && first.len() + others.len() >= count {
                continue;
            }
            let stages = models.stages_of(self.job, &planned);
            let Ok(simulation) = Simulation::new(self.job, l, &stages) else { continue };
            if programs.insert(simulation.program_id()) {
                alike.insert((class, l.micro_batch_size, l.recompute));
                if is_new { &mut first } else { &mut others }.push(planned);
            }
        }
        first.extend(others);
        first.truncate(count);
        first.sort_by(order::in_order);
        first
    }

    fn in_order(&self, memory: u64) -> Vec<Planned> {
        let fitting = self.passes.iter().flat_map(|pass| pass.fitting(memory));
        let mut best: Vec<Planned> = fitting.cloned().collect();
        best.sort_by(order::in_order);
        best
    }
}
