//! What a run's stages take: as a file has it, or else an estimate.

use zeropp_core::files::escaped_line;
use zeropp_pipeline::costs::{Sharers, Table, check_sums};
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

impl ActionTimes {
    /// The times of `table`, the file that `config` names, as it is for this cut, else `estimates`;
    /// for stages that keep `bytes`.
    ///
    /// # Errors
    /// A table that cannot be used, or is for other stages.
    pub(crate) fn new(
        config: &Config,
        table: Option<&Table>,
        estimates: Vec<StageCosts>,
        bytes: &[StageBytes],
    ) -> Result<ActionTimes, ConfigError> {
        let (Some(path), Some(table)) = (&config.costs, table) else {
            let costs = Costs { stages: estimates, memory: bytes.to_vec(), ..Costs::default() };
            let source = "estimated from FLOP: proportions, with messages, gathers and reductions \
                          that take no time (--costs FILE has times)";
            return Ok(ActionTimes { costs, source: source.into() });
        };
        let fail = |problem: String| wrong("costs", &path.display(), &problem);
        let sharers = Sharers { zero3: config.zero3, replicas: config.dp };
        let mut costs =
            table.of(bytes.len(), sharers, Some(bytes)).map_err(|e| fail(e.to_string()))?;
        check_sums(&costs, config.micro_batches()).map_err(|e| fail(e.to_string()))?;
        // The file's bytes may be in any unit; those of the model are known.
        costs.link = LinkCosts { latency_ns: message_ns(&costs), ..LinkCosts::default() };
        costs.memory = bytes.to_vec();
        // The executor runs the two halves of an overlapped pair one after the other.
        costs.overlap_ns = None;
        let source = match table.measured() {
            Some(what) => format!("measured: {} ({})", path.display(), escaped_line(what)),
            None => format!("given: {}", path.display()),
        };
        Ok(ActionTimes { costs, source })
    }
}
