//! What is known of a run before another program takes the place of its own.

use zeropp_core::metrics::RankPlan;
use zeropp_pipeline::ir::Schedule;
use zeropp_pipeline::schedules::Limits;
use zeropp_pipeline::verify::{VerifyLimits, verify};
use zeropp_plan::memory::of_ranks;
use zeropp_plan::reschedule::RunningProgram;

use crate::config::{Config, Reschedule};
use crate::plan::blueprint::Blueprint;
use crate::plan::memory::is_above_rank_memory;
use crate::plan::needs::Needs;
use crate::plan::program::{check_program, lower_options};

/// Whether a run looks for better programs. On one pipeline rank there is nothing to order.
pub(crate) fn is_on(config: &Config) -> bool {
    config.reschedule == Reschedule::Auto && config.pp > 1
}

/// The run as a search for a better program sees it.
pub(crate) fn run(bp: &Blueprint) -> RunningProgram {
    let config = &bp.config;
    let recomputed = &bp.recomputed.whole;
    RunningProgram {
        program: bp.schedule().clone(),
        options: lower_options(config),
        bytes: bp.all_bytes(),
        ranks: bp.rank_states(),
        planned: bp.plan.ranks.iter().map(|rank| rank.held).collect(),
        mem_limit: config.mem_limit.map(|limit| limit.0),
        limits: Limits {
            gathered: config.max_gathered,
            gathers: config.max_gathers,
            evaluations: None,
        },
        estimates: bp.parts.estimates(&bp.stages, |s| recomputed.contains(&s)),
    }
}

/// Checks that `program` may run here in place of the run's own: that it runs through, changes no
/// bit, and that there is memory for it.
///
/// # Errors
/// Why it may not, in words.
pub(crate) fn check(
    bp: &Blueprint,
    run: &RunningProgram,
    program: &Schedule,
) -> Result<(), String> {
    verify(program, &VerifyLimits::default()).map_err(|e| e.to_string())?;
    check_program(&bp.config, program).map_err(|e| e.to_string())?;
    if !run.allows(program) {
        return Err("it sums in another order, or holds more than was planned".into());
    }
    let held = of_ranks([program], &run.bytes, &run.ranks);
    let ranks = bp.plan.ranks.iter().zip(held);
    let ranks: Vec<_> = ranks.map(|(rank, held)| RankPlan { held, ..rank.clone() }).collect();
    // What is free now says nothing: the run has its own part of the rest.
    if is_above_rank_memory(&Needs { config: &bp.config, ranks: &ranks }) {
        return Err("there is too little memory for it here".into());
    }
    Ok(())
}
