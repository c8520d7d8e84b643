//! A head that is split over pipeline ranks: which blocks of its rows each rank has.
//!
//! A few candidates are simulated, the whole head among them, and the shortest step wins; ties go
//! to the whole head.

use zeropp_model::head::blocks;
use zeropp_schedule::ir::Schedule;
use zeropp_schedule::lower::{LowerOptions, lower};
use zeropp_schedule::schedules::generate_split;
use zeropp_schedule::simulate::{Costs, times};
use zeropp_schedule::timeline::Timeline;

use crate::PlanError;
use crate::exact::end_s;
use crate::layout::{Job, Layout};
use crate::programs::generator_costs;
use crate::shared::{Crowd, contended};
use crate::stages::{ModelCosts, Stage, simulator};

/// A step with a head in these slices.
#[derive(Clone, Debug)]
pub struct Split {
    /// Blocks of each rank; none where the head is whole.
    pub slices: Vec<usize>,
    /// Everything that the simulator takes.
    pub costs: Costs,
    /// The program.
    pub program: Schedule,
    /// Seconds of a step.
    pub step_s: f64,
}

/// Slices that are worth a try for a head of so many token ids, for ranks that compute so long for
/// a micro-batch without it, beside a `head` that takes so long: none (a whole head), as many on
/// each rank, and blocks where there is least to do.
pub fn candidates(ids: usize, ranks: &[f64], head: f64) -> Vec<Vec<usize>> {
    let (pp, blocks) = (ranks.len(), blocks(ids).len());
    let each = blocks.div_ceil(pp.max(1));
    let even = (0..pp).map(|rank| each.min(blocks.saturating_sub(rank * each))).collect();
    let mut poured = vec![0; pp];
    let mut now = ranks.to_vec();
    for _ in 0..blocks {
        // The last of equals, which is nearer to the root.
        let least = now.iter().copied().fold(f64::INFINITY, f64::min);
        let Some(rank) = now.iter().rposition(|busy| *busy <= least) else { break };
        poured[rank] += 1;
        now[rank] += head / blocks as f64;
    }
    let mut all = vec![Vec::new(), even, poured];
    all.dedup();
    all
}

/// The fastest of some slices for stages of so many blocks; the first of equals.
///
/// # Errors
/// A shape that the layout's kind does not have, or a kind whose head is always whole.
pub fn fastest(
    job: &Job,
    layout: &Layout,
    model: &mut ModelCosts,
    blocks: &[usize],
    candidates: Vec<Vec<usize>>,
) -> Result<Option<Split>, PlanError> {
    let mut best: Option<Split> = None;
    for slices in candidates {
        let stages = match slices.is_empty() {
            true => model.stages(job, layout, blocks),
            false => model.with_slices(job, layout, blocks, &slices),
        };
        let split = simulated(job, layout, &stages, slices)?;
        if best.as_ref().is_none_or(|best| split.step_s < best.step_s) {
            best = Some(split);
        }
    }
    Ok(best)
}

/// A step of these stages, and slices behind them if there are any.
///
/// # Errors
/// Those of [`fastest`].
pub fn simulated(
    job: &Job,
    layout: &Layout,
    stages: &[Stage],
    slices: Vec<usize>,
) -> Result<Split, PlanError> {
    let costs = simulator(job, layout, stages);
    let weighed = generator_costs(&costs, &costs.memory, layout.recomputed_of_all(), None);
    let weighed = weighed.with_objective(job.fixed.sync.into());
    let made = generate_split(layout.schedule, &layout.shape(), &slices, Some(&weighed));
    let made = made.map_err(|e| PlanError::new(e.to_string()))?;
    let program = lower(&made, &LowerOptions { sync: job.fixed.sync, ..layout.lowering() });
    let timeline = timed(&program, &costs)?;
    let step_s = step_s(job, layout, &timeline);
    Ok(Split { slices, costs, program, step_s })
}

fn timed(program: &Schedule, costs: &Costs) -> Result<Timeline, PlanError> {
    times(program, costs).map_err(|e| PlanError::new(e.to_string()))
}

/// Seconds of the step of `timeline`, where ranks share cores or links.
fn step_s(job: &Job, layout: &Layout, timeline: &Timeline) -> f64 {
    let crowd = Crowd::new(&job.machine, layout);
    let crowded = crowd.map_or(1.0, |crowd| crowd.stretch(timeline));
    end_s(timeline) * crowded * contended(job.machine.contention, timeline)
}

#[cfg(test)]
mod tests;
