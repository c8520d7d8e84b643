//! The programs of a run's replicas, as its settings have them.

use zeropp_pipeline::ir::Schedule;
use zeropp_pipeline::schedules::OrderCosts;
use zeropp_plan::deal::Deal;
use zeropp_plan::programs::Programs;

use crate::Error;
use crate::config::{Config, ConfigError};
use crate::plan::program::{Resolved, check_program};

/// The programs of `resolved`; kinds that weigh one order against another are made for `costs`.
///
/// # Errors
/// A schedule that does not exist, does not suit the mesh, or does not fit the settings;
/// programs of replicas that do not go together.
pub(crate) fn programs(resolved: &Resolved, costs: &OrderCosts) -> Result<Programs, Error> {
    let (config, deal) = (&resolved.config, resolved.config.deal());
    let Some(fewer) = deal.fewer() else {
        return Ok(Programs::alike(deal, resolved.programs(costs)?));
    };
    let named = |e: Error| refused(config, deal, &e.to_string());
    let most = resolved.programs(costs).map_err(named)?;
    let fewer = resolved.with_micro_batches(fewer).programs(costs).map_err(named)?;
    let programs = Programs::of_two(deal, most, &fewer)?;
    let checked = programs.check(config.one_order());
    checked.map_err(|e| refused(config, deal, &e.to_string()))?;
    Ok(programs)
}

/// Those of another process's run of `config`, as [`Programs::each`] had them there, once they are
/// verified.
///
/// # Errors
/// What does not suit the run, in words.
pub(crate) fn given(config: &Config, all: Vec<Schedule>) -> Result<Programs, String> {
    let programs = Programs::given(config.deal(), config.pp, all).map_err(|e| e.to_string())?;
    let programs = programs.ok_or("a program for another mesh or another batch")?;
    for program in programs.each() {
        check_program(config, program).map_err(|e| e.to_string())?;
    }
    programs.check(config.one_order()).map_err(|e| e.to_string())?;
    Ok(programs)
}

/// A deal that the schedule cannot have.
fn refused(config: &Config, deal: Deal, problem: &str) -> ConfigError {
    let text = config.global_batch.as_deref().unwrap_or_default();
    let dealt: Vec<_> = deal.to_vec().iter().map(usize::to_string).collect();
    let dealt = dealt.join(", ");
    let kept = match config.dealt_by {
        Some(_) => ", as the checkpoint was dealt, whose sums would have another order otherwise",
        None => "",
    };
    let problem = format!("gives the replicas {dealt} micro-batches a rank{kept}: {problem}");
    let each = config.micro_batch_size * config.zero3 * config.dp;
    let (below, above) = (deal.fewer().unwrap_or(deal.most) * each, deal.most * each);
    let help = format!("use {below} or {above} samples, or another schedule");
    ConfigError::value("global-batch", text, problem, help)
}
