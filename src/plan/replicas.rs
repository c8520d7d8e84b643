//! The programs of replicas, which have not all as many micro-batches where a batch does not divide
//! evenly (ADR 70).

use zeropp_pipeline::ir::Schedule;
use zeropp_pipeline::lower::with_sums_in_order_of;
use zeropp_pipeline::schedules::Costs;
use zeropp_pipeline::simulate::{self, SimulateError, simulate};
use zeropp_pipeline::timeline::{RankTimeline, Timeline};
use zeropp_pipeline::verify::{
    VerifyError, VerifyLimits, verify, verify_replicas, verify_replicas_issue_order,
};

use crate::Error;
use crate::config::{Config, ConfigError, Deal, EngineKind};
use crate::plan::program::{Resolved, check_program};

/// The verified programs of all pipeline ranks, for every replica of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Programs {
    deal: Deal,
    /// Of those with the most micro-batches; the first is one.
    pub(crate) most: Schedule,
    /// Of those that have fewer, if there are any.
    pub(crate) fewer: Option<Schedule>,
}

impl Programs {
    /// The programs of `resolved`; kinds that weigh one order against another are made for `costs`.
    ///
    /// # Errors
    /// A schedule that does not exist, does not suit the mesh, or does not fit the settings;
    /// programs of replicas that do not go together.
    pub(crate) fn new(resolved: &Resolved, costs: &Costs) -> Result<Programs, Error> {
        let (config, deal) = (&resolved.config, resolved.config.deal());
        let Some(fewer) = deal.fewer() else {
            return Ok(Programs { deal, most: resolved.programs(costs)?, fewer: None });
        };
        let told = |e: Error| refused(config, deal, &e.to_string());
        let most = resolved.programs(costs).map_err(told)?;
        let fewer = resolved.with_micro_batches(fewer).programs(costs).map_err(told)?;
        let fewer = with_sums_in_order_of(&most, &fewer);
        verify(&fewer, &VerifyLimits::default())?;
        let programs = Programs { deal, most, fewer: Some(fewer) };
        let problem = programs.check(config);
        problem.map_err(|e| refused(config, deal, &e.to_string()))?;
        Ok(programs)
    }

    /// Those of another process's run of `config`, as [`each`](Self::each) had them there, once
    /// they are verified.
    ///
    /// # Errors
    /// What does not suit the run, in words.
    pub(crate) fn given(config: &Config, all: Vec<Schedule>) -> Result<Programs, String> {
        let deal = config.deal();
        let mut wanted = [deal.most].into_iter().chain(deal.fewer());
        let found = all.iter().map(|program| (program.pp(), program.micro_batches()));
        if !found.eq(wanted.by_ref().map(|n| (config.pp, n))) {
            return Err("a program for another mesh or another batch".into());
        }
        for program in &all {
            verify(program, &VerifyLimits::default()).map_err(|e| e.to_string())?;
            check_program(config, program).map_err(|e| e.to_string())?;
        }
        let mut all = all.into_iter();
        let most = all.next().expect("one is wanted");
        let programs = Programs { deal, most, fewer: all.next() };
        programs.check(config).map_err(|e| e.to_string())?;
        Ok(programs)
    }

    /// The same with `of` each program in place of it.
    ///
    /// # Errors
    /// Its first.
    pub(crate) fn map(
        &self,
        of: impl Fn(&Schedule) -> Result<Schedule, Error>,
    ) -> Result<Programs, Error> {
        let fewer = self.fewer.as_ref().map(&of).transpose()?;
        Ok(Programs { deal: self.deal, most: of(&self.most)?, fewer })
    }

    /// Whether the programs of the replicas go together, as the engine of `config` wants them.
    fn check(&self, config: &Config) -> Result<(), VerifyError> {
        let all: Vec<&Schedule> = (0..config.dp).map(|replica| self.of(replica)).collect();
        match (&self.fewer, config.engine) {
            (None, _) => Ok(()),
            (_, EngineKind::Nccl) => verify_replicas_issue_order(&all),
            _ => verify_replicas(&all),
        }
    }

    /// Those of a replica.
    pub(crate) fn of(&self, replica: usize) -> &Schedule {
        let has_fewer = self.deal.of_replica(replica) < self.deal.most;
        self.fewer.as_ref().filter(|_| has_fewer).unwrap_or(&self.most)
    }

    /// The different ones, those for the most micro-batches first.
    pub(crate) fn each(&self) -> impl Iterator<Item = &Schedule> {
        [&self.most].into_iter().chain(&self.fewer)
    }

    /// Units of a step of all replicas together.
    pub(crate) fn units(&self) -> usize {
        let replicas = 0..self.deal.to_vec().len();
        replicas.map(|replica| self.of(replica).units.len()).sum()
    }

    /// A step by the simulator: of one replica where all are alike, else of every one, each from
    /// the start of the step.
    pub(crate) fn simulated(&self, costs: &simulate::Costs) -> Result<Timeline, SimulateError> {
        let mut whole = simulate(&self.most, costs)?;
        let Some(fewer) = &self.fewer else { return Ok(whole) };
        let (most, fewer) = (std::mem::take(&mut whole.ranks), simulate(fewer, costs)?.ranks);
        for (group, has) in self.deal.to_vec().into_iter().enumerate() {
            let ranks = if has < self.deal.most { &fewer } else { &most };
            let name = |rank: &RankTimeline| format!("pp {} · dp {group}", rank.pp);
            let of = |rank: &RankTimeline| RankTimeline { name: name(rank), group, ..rank.clone() };
            whole.ranks.extend(ranks.iter().map(of));
        }
        Ok(whole)
    }
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
