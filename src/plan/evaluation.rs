//! The program of a validation loss: forwards alone, on the stages of the training program.

use zeropp_core::metrics::EvaluationPlan;
use zeropp_pipeline::ir::{Action, Schedule};
use zeropp_pipeline::memory::predict_at_once;
use zeropp_plan::programs::{Programs, forwards};

use crate::Error;
use crate::config::{Config, EngineKind};
use crate::plan::blueprint::Blueprint;

/// The verified programs of all pipeline ranks for one batch, which has the micro-batches and units
/// of a step of `training`; none where the run `measures` no validation loss.
///
/// # Errors
/// A program that would not run through.
pub(crate) fn programs(
    config: &Config,
    training: &Programs,
    measures: bool,
) -> Result<Option<Programs>, Error> {
    match measures {
        false => Ok(None),
        true => {
            let one_order = config.engine == EngineKind::Nccl;
            let of = |training: &Schedule| forwards(training, config.prefetch, one_order);
            Ok(Some(training.map(of)?))
        }
    }
}

/// What is known of it before the run: `batches` of it predict `tokens`.
pub(crate) fn plan(bp: &Blueprint, batches: u64, tokens: u64) -> Option<EvaluationPlan> {
    let programs = bp.evaluation.as_ref()?;
    let simulated = programs.simulated(&bp.times.costs).expect("verified, with the run's costs");
    // More micro-batches never take less of what forwards hold.
    let program = &programs.most;
    let held = predict_at_once(program, &bp.all_bytes());
    let ranks = bp.plan.ranks.iter().zip(bp.rank_states());
    let held = held.iter().zip(ranks).map(|(held, (rank, state))| {
        let always = rank.at_once.parameter_shard + rank.at_once.gradient_shard;
        always + state.optimizer_kept() + held.total()
    });
    let gathers = program.ranks[0].iter().filter(|a| matches!(a, Action::AllGather { .. }));
    Some(EvaluationPlan {
        every: bp.config.eval_every,
        batches,
        tokens,
        all_gathers_per_rank: gathers.count() as u64,
        bubble: simulated.bubble(),
        held: held.collect(),
    })
}
