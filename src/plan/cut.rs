//! The cut of a model into stages: by hand, or by what the layers take, within a rank's memory.

use std::ops::Range;

use zeropp_core::layer::{BatchShape, Model};
use zeropp_core::metrics::{Plan, RankPlan};
use zeropp_core::params::ParamSpec;
use zeropp_pipeline::costs::{BlockTimes, CostsError, Table};
use zeropp_plan::cut::{GroupTimes, Groups, StageLimits, TooFewLayers};

use crate::Error;
use crate::config::{Config, ConfigError, Recompute};
use crate::own::Own;
use crate::plan::costs_file::wrong;
use crate::plan::times;

/// How often a rank that is over its memory gives something away.
const TRIES: usize = 64;

/// Parts of each stage.
pub(crate) type Stages = Vec<Range<usize>>;

/// A file of costs that is not this model's.
fn misfit(config: &Config, error: &CostsError) -> ConfigError {
    let path = config.costs.clone().unwrap_or_default();
    wrong("costs", &path.display(), &error.to_string())
}

/// What there is to cut.
pub(crate) struct Cutter<'a> {
    config: &'a Config,
    groups: Groups,
    /// FLOP of each group's F, B, W and R.
    flops: Vec<BlockTimes>,
    /// What each group takes: by the file of costs, where it says of which blocks its times are,
    /// else by FLOP.
    times: GroupTimes,
    /// Whether it is by the file.
    is_given: bool,
    /// Bytes of each group that a rank has all the time.
    fixed: Vec<u64>,
    /// Bytes that each group keeps of a micro-batch.
    kept: Vec<u64>,
    stages: usize,
}

impl<'a> Cutter<'a> {
    pub(crate) fn new(
        (config, table, own): (&'a Config, Option<&Table>, &Own),
        model: &Model,
        batch: BatchShape,
        stages: usize,
    ) -> Result<Cutter<'a>, ConfigError> {
        let parts = &model.parts;
        let groups = Groups::new(parts.iter().map(|part| part.is_block()));
        let costs: Vec<_> = parts.iter().map(|part| part.cost(batch)).collect();
        let optimizer = own.parameters(config);
        // fp32 parameters and gradients of the shard, and what the optimizer keeps.
        let fixed = |i: usize| -> u64 {
            let bytes = |p: &ParamSpec| {
                let kept = optimizer.kept(p, parts[i].role(false));
                let trained = if p.trains { p.len() + kept.words(p.len()) } else { 0 };
                4 * (p.len() + trained) as u64
            };
            parts[i].parameters().iter().map(bytes).sum::<u64>() / config.zero3 as u64
        };
        let flops_of = |recomputed: bool| -> Vec<BlockTimes> {
            let of_parts: Vec<_> =
                parts.iter().map(|part| times::flops(part, batch, recomputed)).collect();
            let [f, b, w, r] = std::array::from_fn(|kind| groups.sums(|i| of_parts[i][kind]));
            (0..groups.len()).map(|g| [f[g], b[g], w[g], r[g]]).collect()
        };
        let flops = flops_of(false);
        let given = table.map(|table| table.of_blocks(&flops)).transpose();
        let given = given.map_err(|e| misfit(config, &e))?.flatten();
        let step = |of: &BlockTimes| of[0] + of[1] + of[2];
        let whole = |of: &BlockTimes| step(of) + of[3];
        let (kept, recomputed): (Vec<f64>, Vec<f64>) = match &given {
            Some(given) => given.iter().map(|of| (step(of), whole(of))).unzip(),
            None => {
                let recomputed = flops_of(true);
                flops.iter().zip(&recomputed).map(|(of, again)| (step(of), whole(again))).unzip()
            }
        };
        // All stages but the last of several on each rank.
        let recomputing = match config.recompute {
            Recompute::Full if stages == config.pp => stages,
            Recompute::Full => stages.saturating_sub(config.pp),
            Recompute::None | Recompute::Selective => 0,
        };
        Ok(Cutter {
            times: GroupTimes { kept, recomputed, recomputing },
            is_given: given.is_some(),
            flops,
            fixed: groups.sums(fixed),
            kept: groups.sums(|i| costs[i].activation_bytes),
            groups,
            config,
            stages,
        })
    }

    /// The file of costs for the stages of `cut`.
    ///
    /// # Errors
    /// Blocks in it that are not this model's.
    pub(crate) fn costs_of(
        &self,
        table: Option<&Table>,
        cut: &Stages,
    ) -> Result<Option<Table>, ConfigError> {
        let of = |table: &Table| table.for_blocks(&self.groups.sizes(cut), &self.flops);
        table.map(of).transpose().map_err(|e| misfit(self.config, &e))
    }

    /// The cut by hand, or the one that balances time alone: a function of the model, the shape,
    /// the settings and the files that they name, so that every process and every later run has
    /// the same.
    ///
    /// # Errors
    /// A model with fewer blocks than stages, or a cut by hand that is not one of this model.
    pub(crate) fn first(&self) -> Result<Stages, Error> {
        let balanced = self.balanced(None)?.expect("without limits there is a cut");
        let Some(blocks) = self.config.stage_blocks()? else { return Ok(balanced) };
        let by_hand = (blocks.len() == self.stages).then(|| self.groups.by_hand(&blocks)).flatten();
        by_hand.ok_or_else(|| self.not_this_model(&blocks, &balanced).into())
    }

    /// Tells `plan` how the model was cut.
    pub(crate) fn tell(&self, cut: &Stages, plan: &mut Plan) {
        let by = if self.is_given { "by the times of costs" } else { "by FLOP" };
        let by = match (&self.config.stages, self.config.rank_memory) {
            (Some(_), _) => "as given".into(),
            (None, None) => by.into(),
            (None, Some(_)) => format!("{by} within rank-memory"),
        };
        let blocks = self.groups.sizes(cut);
        let GroupTimes { kept, recomputed, recomputing } = &self.times;
        let mut at = 0;
        let stage = |(stage, n): (usize, &usize)| {
            let times = if stage < *recomputing { recomputed } else { kept };
            at += n;
            times[at - n..at].iter().sum::<f64>()
        };
        let stages: Vec<f64> = blocks.iter().enumerate().map(stage).collect();
        let longest = stages.iter().copied().fold(0.0, f64::max);
        let mean = stages.iter().sum::<f64>() / cut.len() as f64;
        plan.longest_stage = if mean > 0.0 { longest / mean } else { 1.0 };
        (plan.cut, plan.blocks) = (by, blocks);
    }

    fn balanced(&self, limits: Option<&StageLimits>) -> Result<Option<Stages>, TooFewLayers> {
        self.groups.balanced(&self.times, self.stages, limits)
    }

    fn not_this_model(&self, blocks: &[usize], balanced: &Stages) -> ConfigError {
        let text = |sizes: &[usize]| sizes.iter().map(ToString::to_string).collect::<Vec<_>>();
        let sum = blocks.iter().fold(0usize, |sum, n| sum.saturating_add(*n));
        let (each, layers) = (self.stages, self.groups.len());
        let problem = format!(
            "{} stages of {sum} blocks in all, and the run has {each} stages of {layers}",
            blocks.len(),
        );
        let such = text(&self.groups.sizes(balanced)).join(",");
        let help = format!("use {each} numbers that sum to {layers}, such as {such}");
        ConfigError::value("stages", text(blocks).join(","), problem, help)
    }

    /// Whether the cut is to be made again for the memory of ranks that `ranks` says it leads to.
    fn is_over(&self, ranks: &[RankPlan]) -> bool {
        let limit = self.config.rank_memory_bytes().unwrap_or(u64::MAX);
        self.config.stages.is_none() && ranks.iter().any(|rank| rank.at_once.total() > limit)
    }

    /// The cut, and what `made` of it, that keeps every rank within its memory, if one is found;
    /// else one that is beyond it by less than the first. `first` is what was made of the first
    /// cut; `of` shows the cut of what was made, and what its ranks need.
    ///
    /// Again and again the largest rank gives blocks of one of its stages away, to stages of ranks
    /// that have room, so that the longest stage stays as short as can be.
    ///
    /// # Errors
    /// Those of `made`.
    pub(crate) fn within_memory<T>(
        &self,
        first: T,
        of: fn(&T) -> (&Stages, &Vec<RankPlan>),
        made: impl Fn(Stages) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let limit = self.config.rank_memory_bytes().unwrap_or(u64::MAX);
        let beyond = |rank: &RankPlan| rank.at_once.total().saturating_sub(limit);
        let excess = |t: &T| of(t).1.iter().map(beyond).sum::<u64>();
        let mut best = first;
        for _ in 0..TRIES {
            let (cut, ranks) = of(&best);
            if !self.is_over(ranks) {
                break;
            }
            let largest = ranks.iter().max_by_key(|rank| rank.at_once.total()).expect("a rank");
            let mut better: Option<T> = None;
            for (stage, _) in &largest.stages {
                let limits = self.limits(cut, ranks, largest, *stage);
                let Some(other) = self.balanced(Some(&limits))? else { continue };
                let other = made(other)?;
                if excess(&other) < excess(better.as_ref().unwrap_or(&best)) {
                    better = Some(other);
                }
            }
            let Some(better) = better else { break };
            best = better;
        }
        Ok(best)
    }

    /// What each stage may hold, counted in what groups hold, so that the `largest` rank gives away
    /// what it has too much of from its stage `giving`, or a group at least: its others keep what
    /// they have, those of other ranks may take what their rank has room for.
    fn limits(
        &self,
        cut: &Stages,
        ranks: &[RankPlan],
        largest: &RankPlan,
        giving: usize,
    ) -> StageLimits {
        let limit = self.config.rank_memory_bytes().unwrap_or(u64::MAX) as f64;
        // Micro-batches of all that F keeps that are alive at once.
        let activation: u64 = ranks.iter().map(|rank| rank.at_once.activation).sum();
        let alive = activation as f64 / self.kept.iter().sum::<u64>().max(1) as f64;
        let held = |(fixed, kept): (&u64, &u64)| fixed + (*kept as f64 * alive) as u64;
        let held: Vec<u64> = self.fixed.iter().zip(&self.kept).map(held).collect();
        let mut at = 0;
        let held_by = |n: &usize| {
            at += n;
            held[at - n..at].iter().sum::<u64>()
        };
        let now: Vec<u64> = self.groups.sizes(cut).iter().map(held_by).collect();
        let mut limits = now.clone();
        for rank in ranks {
            let all: u64 = rank.stages.iter().map(|(stage, _)| now[*stage]).sum();
            let may = (all as f64 * limit / rank.at_once.total().max(1) as f64) as u64;
            for (stage, _) in &rank.stages {
                limits[*stage] = match (rank.pp == largest.pp, *stage == giving) {
                    (true, true) => {
                        (now[giving] + may).saturating_sub(all).min(now[giving].saturating_sub(1))
                    }
                    (true, false) => now[*stage],
                    (false, _) => now[*stage] + may.saturating_sub(all),
                };
            }
        }
        StageLimits::new(&held, limits)
    }
}
