//! The cut of a run's model into stages, as its settings and the files that they name have it.

use zeropp_core::metrics::Plan;
use zeropp_core::optimizer::StateRule;
use zeropp_pipeline::costs::{CostsError, Table};
use zeropp_plan::cutter::{CutFor, Cutter, Stages};
use zeropp_plan::parts::Parts;

use crate::Error;
use crate::config::{Config, ConfigError};
use crate::plan::costs_file::wrong;
use crate::plan::program::Resolved;

/// A file of costs that is not this model's.
fn misfit(config: &Config, error: &CostsError) -> ConfigError {
    let path = config.costs.clone().unwrap_or_default();
    wrong("costs", &path.display(), &error.to_string())
}

/// What there is to cut, into the stages of `resolved`.
///
/// # Errors
/// A file of costs that is not this model's.
pub(crate) fn cutter(
    resolved: &Resolved,
    parts: &Parts,
    rule: &StateRule,
) -> Result<Cutter, ConfigError> {
    let config = &resolved.config;
    let cut_for = CutFor {
        pp: config.pp,
        zero3: config.zero3,
        stages: resolved.stages(),
        recomputed: resolved.recomputed(),
        // A cut by hand is not made again.
        rank_memory: config.rank_memory_bytes().filter(|_| config.stages.is_none()),
        splits_head: resolved.head_blocks()?.is_some(),
    };
    Cutter::new(parts, cut_for, resolved.costs.as_ref(), rule).map_err(|e| misfit(config, &e))
}

/// The file of costs for the stages of `cut`.
///
/// # Errors
/// Blocks in it that are not this model's.
pub(crate) fn costs_of(
    resolved: &Resolved,
    cutter: &Cutter,
    cut: &Stages,
) -> Result<Option<Table>, ConfigError> {
    let table = resolved.costs.as_ref();
    cutter.costs_of(table, cut).map_err(|e| misfit(&resolved.config, &e))
}

/// The cut by hand, or the one that balances time alone.
///
/// # Errors
/// A model with fewer blocks than stages, or a cut by hand that is not one of this model.
pub(crate) fn first(config: &Config, cutter: &Cutter) -> Result<Stages, Error> {
    let balanced = cutter.balanced()?;
    let Some(blocks) = config.stage_blocks()? else { return Ok(balanced) };
    let by_hand = cutter.by_hand(&blocks);
    by_hand.ok_or_else(|| not_this_model(&blocks, &cutter.blocks(&balanced)).into())
}

fn not_this_model(blocks: &[usize], balanced: &[usize]) -> ConfigError {
    let text = |sizes: &[usize]| sizes.iter().map(ToString::to_string).collect::<Vec<_>>();
    let sum = blocks.iter().fold(0usize, |sum, n| sum.saturating_add(*n));
    let (each, layers) = (balanced.len(), balanced.iter().sum::<usize>());
    let problem = format!(
        "{} stages of {sum} blocks in all, and the run has {each} stages of {layers}",
        blocks.len(),
    );
    let such = text(balanced).join(",");
    let help = format!("use {each} numbers that sum to {layers}, such as {such}");
    ConfigError::value("stages", text(blocks).join(","), problem, help)
}

/// Tells `plan` how the model was cut.
pub(crate) fn tell(config: &Config, cutter: &Cutter, cut: &Stages, plan: &mut Plan) {
    let by = if cutter.is_given() { "by the times of costs" } else { "by FLOP" };
    let by = match (&config.stages, config.rank_memory) {
        (Some(_), _) => "as given".into(),
        (None, None) => by.into(),
        (None, Some(_)) => format!("{by} within rank-memory"),
    };
    plan.longest_stage = cutter.longest_stage(cut);
    (plan.cut, plan.blocks) = (by, cutter.blocks(cut));
}
