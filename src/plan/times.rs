//! What a run's stages take: as a file has it, or else an estimate.

use zeropp_core::files::escaped_line;
use zeropp_pipeline::costs::{Sharers, Table, check_sums, with_slices};
use zeropp_pipeline::memory::StageBytes;
use zeropp_pipeline::simulate::{Costs, LinkCosts, StageCosts};
use zeropp_plan::programs::message_ns;

use crate::config::{Config, ConfigError};
use crate::plan::costs_file::wrong;

/// What everything takes, and where that is from.
#[derive(Clone, Default)]
pub(crate) struct ActionTimes {
    /// Of every stage; messages take a latency, which is their transfer too.
    pub(crate) costs: Costs,
    /// One line for people.
    pub(crate) source: String,
}

/// A split head among the times of stages.
pub(crate) struct SplitTimes {
    /// Blocks of each rank.
    pub(crate) blocks: Vec<usize>,
    /// Which part of F, B and W of the last stage is the head's where that has all of it, by FLOP.
    pub(crate) share: [f64; 3],
}

impl ActionTimes {
    /// The times of `table`, the file that `config` names, as it is for this cut, else `estimates`;
    /// for stages that keep `bytes`, and behind them slices of a head that is `split`.
    ///
    /// # Errors
    /// A table that cannot be used, or is for other stages.
    pub(crate) fn new(
        config: &Config,
        table: Option<&Table>,
        estimates: Vec<StageCosts>,
        bytes: &[StageBytes],
        split: Option<&SplitTimes>,
    ) -> Result<ActionTimes, ConfigError> {
        let (Some(path), Some(table)) = (&config.costs, table) else {
            let costs = Costs { stages: estimates, memory: bytes.to_vec(), ..Costs::default() };
            let source = "estimated from FLOP: proportions, with messages, gathers and reductions \
                          that take no time (--costs FILE has times)";
            return Ok(ActionTimes { costs, source: source.into() });
        };
        let fail = |problem: String| wrong("costs", &path.display(), &problem);
        let sharers = Sharers { zero3: config.zero3, replicas: config.dp };
        let stages = bytes.len() - split.map_or(0, |split| split.blocks.len());
        let known = Some(&bytes[..stages]);
        let mut costs = table.of(stages, sharers, known).map_err(|e| fail(e.to_string()))?;
        if let Some(split) = split {
            let head = table.head_times().map_err(|e| fail(e.to_string()))?;
            costs = split.of(&costs, head, bytes);
        }
        check_sums(&costs, config.micro_batches()).map_err(|e| fail(e.to_string()))?;
        // The file's bytes may be in any unit; those of the model are known.
        costs.link = LinkCosts { latency_ns: message_ns(&costs), ..LinkCosts::default() };
        costs.memory = bytes.to_vec();
        if config.optimizer_out.is_none() {
            costs.states.clear();
        }
        // The executor runs the two halves of an overlapped pair one after the other.
        costs.overlap_ns = None;
        let source = match table.measured() {
            Some(what) => format!("measured: {} ({})", path.display(), escaped_line(what)),
            None => format!("given: {}", path.display()),
        };
        Ok(ActionTimes { costs, source })
    }
}

impl SplitTimes {
    /// The costs of stages and slices with these `bytes`, of those of stages with a whole head,
    /// whose F, B and W are known or not.
    fn of(&self, whole: &Costs, head: Option<[u64; 3]>, bytes: &[StageBytes]) -> Costs {
        let stages = whole.stages.len();
        let last = whole.stages[stages - 1];
        let times = [last.f_ns, last.b_ns, last.w_ns];
        let part = |i: usize| (times[i] as f64 * self.share[i]) as u64;
        let own = head.unwrap_or_else(|| [part(0), part(1), part(2)]);
        // A whole head does it all in F (ADR 24), slices a product each in F, B and W.
        let each = own.iter().sum::<u64>() / 3;
        let mut costs = with_slices(whole, own, head.unwrap_or([each; 3]), &self.blocks);
        // Collectives take about as long as there are weights.
        let weights: u64 = bytes[stages - 1..].iter().map(|of| of.weights).sum();
        for (cell, of) in bytes.iter().enumerate().skip(stages - 1) {
            let share = |ns: u64| (ns as f64 * of.weights as f64 / weights.max(1) as f64) as u64;
            let times = &mut costs.stages[cell];
            times.all_gather_ns = share(last.all_gather_ns);
            times.reduce_scatter_ns = share(last.reduce_scatter_ns);
            times.replica_reduce_ns = share(last.replica_reduce_ns);
        }
        costs
    }
}
