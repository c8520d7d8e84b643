//! Other stages for a run under way, by the times that its steps took (ADR 106).

use zeropp_pipeline::costs::{Sharers, Table};
use zeropp_pipeline::memory::StageBytes;
use zeropp_pipeline::simulate::Costs;
use zeropp_plan::cutter::{Cutter, Stages};
use zeropp_plan::reschedule::{Better, Effort, step_ns};

use crate::Error;
use crate::plan::blueprint::Blueprint;
use crate::plan::cut;
use crate::plan::program::Resolved;
use crate::plan::reschedule::Exchangeable;

/// The stages that balance what blocks took, within the limit on a rank's memory, and the fastest
/// program of them, with the first part of each; none where a step is not predicted to be shorter.
/// With `any` others in any case, if there are.
pub(crate) fn better(
    job: &Exchangeable,
    measured: &Costs,
    effort: &Effort,
) -> Option<(Better, Vec<usize>)> {
    let bp = job.blueprint.as_ref()?;
    let costs = job.run.with_divided_backwards(measured);
    let now_ns = step_ns(&job.run.program, &costs)?;
    let (made, then) = balanced(job, bp, &costs, effort.any).ok()??;
    let mut other = Exchangeable::of(&made.into())?;
    other.run.program = job.run.program.clone();
    let kept = step_ns(&other.run.program, &then)?;
    // The order that is best for the stages that there were may not be for these.
    let order = if effort.goes_on() { other.run.better(&then, effort) } else { None };
    let order = order.filter(|order| order.then_ns < kept);
    let (program, then_ns) = match order {
        Some(order) => (order.program, order.then_ns),
        None => (other.run.program, kept),
    };
    let starts = other.blueprint.as_ref()?.starts();
    (effort.any || then_ns < now_ns).then_some((Better { program, now_ns, then_ns }, starts))
}

/// The run with the best other stages, and what they take; none where it has the best ones.
fn balanced(
    job: &Exchangeable,
    bp: &Blueprint,
    costs: &Costs,
    any: bool,
) -> Result<Option<(Blueprint, Costs)>, Error> {
    let mut table = Table::from(costs);
    table.set("blocks", bp.blocks().into());
    let config = crate::Config { costs: None, ..bp.config.clone() };
    let mut resolved = Resolved::new(&config, None)?;
    resolved.costs = Some(table);
    // The cut that settings gave was the first one.
    resolved.config.stages = None;
    let rule = config.run_state_with(bp.own.parameters(&config).rule).rule;
    let cutter = cut::cutter(&resolved, &bp.parts, &rule)?;
    let made_of = |stages: Stages| -> Result<Blueprint, Error> {
        let starts: Vec<usize> = stages.iter().map(|stage| stage.start).collect();
        bp.recut(&starts, job.run.program.clone()).map_err(Error::Program)
    };
    let mut made = cutter.within_memory(made_of(cutter.balanced()?)?, Blueprint::held, made_of)?;
    if made.stages == bp.stages && any {
        made = match shifted(&cutter, bp) {
            Some(stages) => made_of(stages)?,
            None => return Ok(None),
        };
    }
    if made.stages == bp.stages {
        return Ok(None);
    }
    let Some(table) = cut::costs_of(&resolved, &cutter, &made.stages)? else { return Ok(None) };
    let sharers = Sharers { zero3: config.zero3, replicas: config.dp };
    let n = made.stages.len();
    let Ok(then) = table.of(n, sharers, None) else { return Ok(None) };
    let memory = vec![StageBytes::default(); n];
    Ok(Some((made, Costs { memory, ..then })))
}

/// Stages of which one has a block more, and the one before or after it has one less, for tests.
fn shifted(cutter: &Cutter, bp: &Blueprint) -> Option<Stages> {
    let mut blocks = bp.blocks();
    let from = (0..blocks.len()).max_by_key(|stage| blocks[*stage])?;
    let to = if from > 0 { from - 1 } else { from + 1 };
    blocks[from] = blocks[from].checked_sub(1).filter(|left| *left > 0)?;
    *blocks.get_mut(to)? += 1;
    cutter.by_hand(&blocks)
}
