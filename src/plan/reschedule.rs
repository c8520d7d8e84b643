//! What is known of a run before another program takes the place of its own.

use std::sync::Arc;

use zeropp_comm::mesh::Mesh;
use zeropp_core::metrics::RankPlan;
use zeropp_pipeline::ir::Schedule;
use zeropp_pipeline::memory::{StageBytes, predict_both};
use zeropp_pipeline::schedules::Limits;
use zeropp_pipeline::simulate::{Costs, StageCosts};
use zeropp_pipeline::verify::{VerifyLimits, verify, verify_issue_order};
use zeropp_plan::bytes::RankState;
use zeropp_plan::memory::of_ranks;
use zeropp_plan::reschedule::RunningProgram;

use crate::config::{Config, Reschedule};
use crate::plan::blueprint::Blueprint;
use crate::plan::memory::is_above_rank_memory;
use crate::plan::needs::Needs;
use crate::plan::program::{check_program, lower_options};

/// Whether a run looks for better programs. On one pipeline rank there is nothing to order, and
/// replicas with other numbers of micro-batches, as after one was lost, have two programs.
pub(crate) fn is_on(config: &Config) -> bool {
    let is_even = config.deal().fewer().is_none();
    config.reschedule() != Reschedule::Off && config.pp > 1 && is_even
}

/// A run whose program may be exchanged.
#[derive(Clone)]
pub(crate) struct Exchangeable {
    pub(crate) config: Config,
    pub(crate) mesh: Mesh,
    /// As the search for a better program sees it.
    pub(crate) run: RunningProgram,
    /// The plan of its pipeline ranks; none of an emulated one, which needs no memory.
    ranks: Vec<RankPlan>,
    /// What its stages are cut from; none in an emulated one, which has no layers.
    pub(crate) blueprint: Option<Arc<Blueprint>>,
}

impl Exchangeable {
    /// The run of a blueprint, where it looks for better programs.
    pub(crate) fn of(bp: &Arc<Blueprint>) -> Option<Exchangeable> {
        if !is_on(&bp.config) {
            return None;
        }
        let recomputed = &bp.recomputed.whole;
        let estimates = bp.parts.estimates(&bp.stages, |s| recomputed.contains(&s));
        let run = RunningProgram {
            ranks: bp.rank_states(),
            planned: bp.plan.ranks.iter().map(|rank| rank.held).collect(),
            ..running(&bp.config, bp.schedule(), bp.all_bytes(), estimates)
        };
        let (config, ranks) = (bp.config.clone(), bp.plan.ranks.clone());
        Some(Exchangeable { config, mesh: bp.mesh, run, ranks, blueprint: Some(bp.clone()) })
    }

    /// An emulated run of `program`, which was made for the times of `costs`, where it looks for
    /// better ones.
    pub(crate) fn emulated(
        config: &Config,
        program: &Schedule,
        costs: &Costs,
        bytes: Vec<StageBytes>,
    ) -> Option<Exchangeable> {
        if !is_on(config) {
            return None;
        }
        let run = running(config, program, bytes, costs.stages.clone());
        let (config, mesh) = (config.clone(), config.mesh());
        Some(Exchangeable { config, mesh, run, ranks: Vec::new(), blueprint: None })
    }

    /// Checks that `program` may run here in place of `run`'s: that it runs through, changes no
    /// bit, and that there is memory for it.
    ///
    /// # Errors
    /// Why it may not, in words.
    pub(crate) fn check(&self, program: &Schedule) -> Result<(), String> {
        self.runs_through(program)?;
        check_program(&self.config, program).map_err(|e| e.to_string())?;
        if !self.run.allows(program) {
            return Err("it sums in another order, or holds more than was planned".into());
        }
        let held = of_ranks([program], &self.run.bytes, &self.run.ranks);
        let ranks = self.ranks.iter().zip(held);
        let ranks: Vec<_> = ranks.map(|(rank, held)| RankPlan { held, ..rank.clone() }).collect();
        // What is free now says nothing: the run has its own part of the rest.
        if !ranks.is_empty() && is_above_rank_memory(&Needs { config: &self.config, ranks: &ranks })
        {
            return Err("there is too little memory for it here".into());
        }
        Ok(())
    }
}

impl Exchangeable {
    /// Checks that the ranks come through `program`.
    fn runs_through(&self, program: &Schedule) -> Result<(), String> {
        verify(program, &VerifyLimits::default()).map_err(|e| e.to_string())?;
        match self.run.one_order {
            true => verify_issue_order(program).map_err(|e| e.to_string()),
            false => Ok(()),
        }
    }

    /// The run with stages that begin at these parts, in place of its own, and `program`: where it
    /// may be cut so, and every rank has the memory for it.
    ///
    /// # Errors
    /// Why it may not, in words.
    pub(crate) fn recut(&self, starts: &[usize], program: &Schedule) -> Result<Blueprint, String> {
        let own = self.blueprint.as_ref().ok_or("it has no layers")?;
        self.runs_through(program)?;
        if !self.run.sums_alike(program) {
            return Err("it sums in another order".into());
        }
        let other = own.recut(starts, program.clone())?;
        if is_above_rank_memory(&other.needs()) || self.moves_above_rank_memory(&other) {
            return Err("there is too little memory for it here".into());
        }
        Ok(other)
    }

    /// Whether a rank is above its limit while state moves.
    fn moves_above_rank_memory(&self, other: &Blueprint) -> bool {
        let Some(limit) = self.config.rank_memory_bytes() else { return false };
        let then = other.rank_states();
        let ranks = self.run.ranks.iter().zip(&then);
        let most = ranks.map(|(now, then)| then.moving(now)).max().unwrap_or(0);
        !self.config.no_memory_check && most > limit
    }
}

/// A run of `program` with stages of these bytes and, as far as is known without measuring, times.
fn running(
    config: &Config,
    program: &Schedule,
    bytes: Vec<StageBytes>,
    estimates: Vec<StageCosts>,
) -> RunningProgram {
    RunningProgram {
        program: program.clone(),
        options: lower_options(config),
        one_order: config.one_order(),
        planned: predict_both(program, &bytes),
        ranks: vec![RankState::default(); program.pp()],
        bytes,
        mem_limit: config.mem_limit.map(|limit| limit.0),
        limits: Limits {
            gathered: config.max_gathered,
            gathers: config.max_gathers,
            evaluations: None,
        },
        estimates,
    }
}
