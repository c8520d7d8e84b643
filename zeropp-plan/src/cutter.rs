//! The cut of a run's model into stages: balanced by what its parts take, within a rank's memory.

use std::ops::Range;

use zeropp_model::optimizer::StateRule;
use zeropp_schedule::costs::{BlockTimes, CostsError, Table, head};
use zeropp_schedule::memory::HeldBytes;

use crate::cut::{BlockGroups, GroupTimes, StageLimits, TooFewLayers};
use crate::parts::{Parts, step, whole};

/// How often a rank that is over its memory gives something away.
const TRIES: usize = 64;

/// Parts of each stage.
pub type Stages = Vec<Range<usize>>;

/// What a model is to be cut for.
#[derive(Clone, Copy, Debug)]
pub struct CutFor {
    /// Pipeline ranks, P.
    pub pp: usize,
    /// Ranks that share a stage's weights, D.
    pub zero3: usize,
    /// Stages in all.
    pub stages: usize,
    /// How many of them are computed again, from the first on.
    pub recomputed: usize,
    /// Bytes that a rank may hold, where that is limited.
    pub rank_memory: Option<u64>,
    /// Whether all ranks share the head, so that the last stage does not have it.
    pub splits_head: bool,
}

/// What there is to cut.
#[derive(Debug)]
pub struct Cutter {
    cut_for: CutFor,
    groups: BlockGroups,
    /// FLOP of each group's F, B, W and R.
    flops: Vec<BlockTimes>,
    /// What each group takes: by the file of costs, where it says of which blocks its times are,
    /// else by FLOP.
    times: GroupTimes,
    is_given: bool,
    /// Bytes of each group that a rank has all the time.
    fixed: Vec<u64>,
    /// Bytes that each group keeps of a micro-batch.
    kept: Vec<u64>,
}

impl Cutter {
    /// Of a model's parts; `table` is a file of costs, which may say what blocks take, and `rule`
    /// what the optimizer keeps.
    ///
    /// # Errors
    /// Blocks in the table that are not this model's.
    pub fn new(
        parts: &Parts,
        cut_for: CutFor,
        table: Option<&Table>,
        rule: &StateRule,
    ) -> Result<Cutter, CostsError> {
        let groups = parts.groups().clone();
        let flops = parts.group_flops(false);
        let given = table.map(|table| table.of_blocks(&flops)).transpose()?.flatten();
        let recomputing = cut_for.recomputed;
        let mut times = match &given {
            Some(given) => {
                let kept: Vec<f64> = given.iter().map(step).collect();
                let recomputed = given.iter().map(whole).collect();
                let of_head = table.map(Table::head_times).transpose()?.flatten();
                // In µs, as the blocks' times are.
                let of_head = of_head.map(|ns| ns.iter().sum::<u64>() as f64 / 1000.0);
                let tail = of_head.unwrap_or_else(|| head(&kept));
                GroupTimes { tail, kept, recomputed, recomputing }
            }
            None => parts.times_by_flop(recomputing),
        };
        if cut_for.splits_head {
            times.leave_tail_out();
        }
        let layers = parts.layers();
        Ok(Cutter {
            cut_for,
            times,
            is_given: given.is_some(),
            flops,
            fixed: groups.sums(|i| layers[i].fixed(rule) / cut_for.zero3 as u64),
            kept: groups.sums(|i| layers[i].cost.activation_bytes),
            groups,
        })
    }

    /// Whether the file of costs says what groups take.
    pub fn is_given(&self) -> bool {
        self.is_given
    }

    /// The file of costs for the stages of `cut`.
    ///
    /// # Errors
    /// Blocks in it that are not this model's.
    pub fn costs_of(
        &self,
        table: Option<&Table>,
        cut: &Stages,
    ) -> Result<Option<Table>, CostsError> {
        let of = |table: &Table| table.for_blocks(&self.blocks(cut), &self.flops);
        table.map(of).transpose()
    }

    /// The cut that balances time alone: a function of the model, the shape, the settings and the
    /// files that they name, so that every process and every later run has the same.
    ///
    /// # Errors
    /// A model with fewer blocks than stages.
    pub fn balanced(&self) -> Result<Stages, TooFewLayers> {
        Ok(self.within(None)?.expect("without limits there is a cut"))
    }

    /// The cut into stages with so many blocks; none where these are not the run's stages, or not
    /// the model.
    pub fn by_hand(&self, blocks: &[usize]) -> Option<Stages> {
        let fits = blocks.len() == self.cut_for.stages;
        fits.then(|| self.groups.by_hand(blocks)).flatten()
    }

    /// Blocks of each stage of `cut`.
    pub fn blocks(&self, cut: &Stages) -> Vec<usize> {
        self.groups.sizes(cut)
    }

    /// How many times as long as the mean the longest stage of `cut` takes.
    pub fn longest_stage(&self, cut: &Stages) -> f64 {
        let stages = self.times.of_stages(&self.blocks(cut));
        let longest = stages.iter().copied().fold(0.0, f64::max);
        let mean = stages.iter().sum::<f64>() / cut.len() as f64;
        if mean > 0.0 { longest / mean } else { 1.0 }
    }

    fn within(&self, limits: Option<&StageLimits>) -> Result<Option<Stages>, TooFewLayers> {
        self.groups.balanced(&self.times, self.cut_for.stages, limits)
    }

    /// The cut, and what `made` of it, that keeps every rank within its memory, if one is found;
    /// else one that is beyond it by less than the first. `first` is what was made of the first
    /// cut; `of` shows the cut of what was made, and the stages of its ranks with what they hold.
    ///
    /// Again and again the largest rank gives blocks of one of its stages away, to stages of ranks
    /// that have room, so that the longest stage stays as short as can be.
    ///
    /// # Errors
    /// Those of `made`.
    pub fn within_memory<T, E: From<TooFewLayers>>(
        &self,
        first: T,
        of: impl Fn(&T) -> (Stages, Vec<(Vec<usize>, HeldBytes)>),
        made: impl Fn(Stages) -> Result<T, E>,
    ) -> Result<T, E> {
        let Some(limit) = self.cut_for.rank_memory else { return Ok(first) };
        let excess = |t: &T| {
            let ranks = of(t).1.into_iter();
            ranks.map(|(_, held)| held.at_once.total().saturating_sub(limit)).sum::<u64>()
        };
        let mut best = first;
        for _ in 0..TRIES {
            if excess(&best) == 0 {
                break;
            }
            let (cut, ranks) = of(&best);
            let total = |rank: &usize| ranks[*rank].1.at_once.total();
            let largest = (0..ranks.len()).max_by_key(total).expect("a rank");
            let mut better: Option<T> = None;
            for stage in &ranks[largest].0 {
                let limits = self.limits(&cut, limit, &ranks, largest, *stage);
                let Some(other) = self.within(Some(&limits))? else { continue };
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
        limit: u64,
        ranks: &[(Vec<usize>, HeldBytes)],
        largest: usize,
        giving: usize,
    ) -> StageLimits {
        // Micro-batches of all that F keeps that are alive at once.
        let activation: u64 = ranks.iter().map(|(_, held)| held.at_once.activation).sum();
        let alive = activation as f64 / self.kept.iter().sum::<u64>().max(1) as f64;
        let held = |(fixed, kept): (&u64, &u64)| fixed + (*kept as f64 * alive) as u64;
        let held: Vec<u64> = self.fixed.iter().zip(&self.kept).map(held).collect();
        let mut at = 0;
        let held_by = |n: &usize| {
            at += n;
            held[at - n..at].iter().sum::<u64>()
        };
        let now: Vec<u64> = self.blocks(cut).iter().map(held_by).collect();
        let mut limits = now.clone();
        for (rank, (stages, held)) in ranks.iter().enumerate() {
            let all: u64 = stages.iter().map(|stage| now[*stage]).sum();
            let may = (all as f64 * limit as f64 / held.at_once.total().max(1) as f64) as u64;
            for stage in stages {
                limits[*stage] = match (rank == largest, *stage == giving) {
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
