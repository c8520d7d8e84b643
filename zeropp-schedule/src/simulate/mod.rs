//! When everything in a schedule happens, given what everything costs.
//!
//! The model is that of the executor: a rank's compute thread goes through its program in order;
//! a compute action waits for its message and its gathered weights; gathers and reductions of the
//! ZeRO-3 group are one queue beside it, replica reductions another; a send occupies one of the
//! rank's links for bytes over bandwidth and arrives a latency later; what a rank passes on of a
//! split head's messages leaves when it computes nothing; the compute thread waits for the end of
//! an RS where the program retires it, and before the next one. Copies of activations out and in
//! are one more queue, of the rank's file; the compute thread waits for a copy out where the
//! program says that it is gone, for one in before what needs it. The F that is the first to need
//! gathered weights waits for each layer as it comes to it, if the head is not split. What stands
//! directly before a stage's reduction ([`LayerRun`](crate::ir::LayerRun)) runs layer by layer, the
//! last layer first, and each layer's reduction begins behind it; a layer's sum over the replicas
//! when it is reduced. Where states are out, a gather begins when the shard is read in the same
//! queue, the first one of a stage when its update of the step before is copied, and a reduction
//! ends when its result is added there. All D ranks of a ZeRO-3 group are alike and run as one.
//! Times are whole nanoseconds, so that results are exact.

use crate::ir::{Compute, Schedule};
use crate::memory::StageBytes;
use crate::timeline::Timeline;
use crate::verify::VerifyError;

mod copies;
mod engine;
mod layers;
mod steps;
mod world;

pub use copies::CopyQueue;
pub use layers::LayerShare;
pub use steps::{simulate_steps, step_period_ns};
pub(crate) use world::Event;

/// What one stage takes, in nanoseconds, for one micro-batch where that applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageCosts {
    /// Forward.
    pub f_ns: u64,
    /// Gradient of the input.
    pub b_ns: u64,
    /// Gradients of the weights. A whole backward takes `b_ns + w_ns`.
    pub w_ns: u64,
    /// Recomputation.
    pub r_ns: u64,
    /// All-gather of the weights.
    pub all_gather_ns: u64,
    /// Reduce-scatter of the gradients.
    pub reduce_scatter_ns: u64,
    /// Sum of the gradient shards over the replicas.
    pub replica_reduce_ns: u64,
}

impl StageCosts {
    /// What a compute of the stage takes.
    pub fn of(&self, kind: Compute) -> u64 {
        match kind {
            Compute::F => self.f_ns,
            Compute::B => self.b_ns,
            Compute::W => self.w_ns,
            Compute::BW => self.b_ns + self.w_ns,
            Compute::R => self.r_ns,
        }
    }
}

/// What is copied of a stage whose weights, optimizer state and reduced gradient are out of memory,
/// in nanoseconds one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateCopies {
    /// The rank's shard of the weights, before each gather.
    pub read_ns: u64,
    /// Its reduced gradient: what a reduction leaves is written, and what was there before, read.
    pub add_ns: u64,
    /// What an update reads, and writes, of a stage that is updated behind the next step: before
    /// its first gather there. Else an update is a part of the step's end.
    pub update_ns: u64,
    /// Whether the rank computes nothing meanwhile, although a copy would not keep it from that.
    pub waits: bool,
}

/// What sending to another rank takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkCosts {
    /// From the end of the transfer to the arrival; any number of messages may be under way.
    pub latency_ns: u64,
    /// Bandwidth of one link; none is infinite.
    pub bytes_per_s: Option<u64>,
    /// Transfers that a rank can have going at once; none is no limit.
    pub parallel_max: Option<usize>,
}

/// Everything the simulator needs to know besides the schedule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Costs {
    /// Times of each stage, of each slice where samples are cut into them; where the head is split,
    /// of each rank's part behind them ([`Schedule::cost_entries`]).
    pub stages: Vec<StageCosts>,
    /// Bytes, or any other unit, in the same order.
    pub memory: Vec<StageBytes>,
    /// Shares of the layers of each stage, where that is known; a stage without is one layer.
    pub layers: Vec<Vec<LayerShare>>,
    /// Times of messages between ranks.
    pub link: LinkCosts,
    /// Bandwidth of the place that a rank's activations are copied out to, both ways together or
    /// each; none is infinite.
    pub file_bytes_per_s: Option<u64>,
    /// Whether copies out and in go beside each other, at that rate each, as between a device and
    /// its host, and gradients are added there while the rank computes.
    pub copies_apart: bool,
    /// What is copied where states are out, in the order of `stages`; empty where they are not.
    pub states: Vec<StateCopies>,
    /// An overlapped F and BW; none is one after the other.
    pub overlap_ns: Option<u64>,
    /// The optimizer step, once all ranks have come to it, or, where it is validated late, once the
    /// rank has.
    pub step_ns: u64,
}

impl Costs {
    /// Equal stages: F, B, W, and the time `c` of one message. Recomputation costs an F,
    /// collectives are free, and memory counts activations: 1 per stage and micro-batch.
    pub fn uniform(stages: usize, f_ns: u64, b_ns: u64, w_ns: u64, c_ns: u64) -> Costs {
        let stage = StageCosts { f_ns, b_ns, w_ns, r_ns: f_ns, ..Default::default() };
        Costs {
            stages: vec![stage; stages],
            memory: vec![StageBytes { activation: 1, ..Default::default() }; stages],
            link: LinkCosts { latency_ns: c_ns, ..Default::default() },
            ..Default::default()
        }
    }

    /// Checks that the costs fit the schedule and that no sum of times can overflow.
    fn check(&self, schedule: &Schedule, steps: usize) -> Result<(), SimulateError> {
        let stages = schedule.cost_entries();
        for (field, found) in [("stages", self.stages.len()), ("memory", self.memory.len())] {
            if found != stages {
                return Err(SimulateError::Stages { field, found, stages });
            }
        }
        if self.link.parallel_max == Some(0) {
            return Err(SimulateError::Zero { field: "parallel_max" });
        }
        if self.link.bytes_per_s == Some(0) {
            return Err(SimulateError::Zero { field: "bytes_per_s" });
        }
        if self.file_bytes_per_s == Some(0) {
            return Err(SimulateError::Zero { field: "file_bytes_per_s" });
        }
        let transfer = |m: &StageBytes| {
            let blocks = schedule.head_blocks.iter().sum::<usize>() as u64;
            let of_head = m.head.longest().saturating_mul(blocks.saturating_add(1));
            let copied = m.activation.max(m.kept(true));
            self.link.transfer_ns(m.message.max(of_head)).max(self.copy_ns(copied))
        };
        let longest = self.stages.iter().flat_map(|s| {
            [s.f_ns, s.b_ns, s.w_ns, s.r_ns, s.all_gather_ns, s.reduce_scatter_ns]
                .into_iter()
                .chain([s.replica_reduce_ns])
        });
        let longest = longest.map(u128::from).chain(self.memory.iter().map(transfer));
        let longest = longest.chain([self.link.latency_ns, self.step_ns].map(u128::from));
        let states = self.states.iter().map(|of| of.read_ns.max(of.add_ns).max(of.update_ns));
        let longest = longest.chain(states.map(u128::from));
        let longest = longest.chain(self.overlap_ns.map(u128::from)).max().unwrap_or(0);
        let actions: usize = schedule.ranks.iter().map(Vec::len).sum();
        // An action adds at most three such times: F, B and W of an overlapped pair, or transfer,
        // latency and a wait.
        let actions = 3 * steps as u128 * (actions as u128 + 1);
        match longest.checked_mul(actions) {
            Some(sum) if sum <= u128::from(u64::MAX) => Ok(()),
            _ => {
                let longest = u64::try_from(longest).unwrap_or(u64::MAX);
                Err(SimulateError::TooLong { longest })
            }
        }
    }
}

impl Costs {
    /// Nanoseconds that a copy of `bytes` to the file, or from it, takes, rounded up.
    pub(crate) fn copy_ns(&self, bytes: u64) -> u128 {
        let second = u128::from(bytes) * 1_000_000_000;
        self.file_bytes_per_s.map_or(0, |rate| second.div_ceil(u128::from(rate)))
    }
}

impl LinkCosts {
    /// Nanoseconds that `bytes` occupy a link, rounded up.
    pub fn transfer_ns(&self, bytes: u64) -> u128 {
        let second = u128::from(bytes) * 1_000_000_000;
        self.bytes_per_s.map_or(0, |rate| second.div_ceil(u128::from(rate)))
    }
}

/// Why there is nothing to simulate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimulateError {
    /// The schedule is wrong.
    #[error(transparent)]
    Schedule(#[from] VerifyError),
    /// The costs are for another number of stages.
    #[error(
        "costs: {field} has {found} entries; the schedule needs {stages}, one for each stage, or \
         for each stage and slice"
    )]
    Stages {
        /// The field.
        field: &'static str,
        /// Its entries.
        found: usize,
        /// Those that the schedule needs ([`Schedule::cost_entries`]).
        stages: usize,
    },
    /// A limit is zero, which would stop all messages.
    #[error("costs: {field} = 0 sends nothing; leave it out or make it at least 1")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// The run would not fit into 64 bits of nanoseconds.
    #[error(
        "costs: a time of {longest} ns or more is too long for this many actions; use smaller times"
    )]
    TooLong {
        /// The longest time, or the longest that 64 bits tell.
        longest: u64,
    },
}

/// Simulates one step of `schedule`, or forwards only, compute-only (each message is sent when it
/// was made) or lowered. Every action has one span, in program order.
///
/// # Errors
/// A schedule that [`verify`](crate::verify::verify) rejects whatever the limits, and costs that do
/// not fit it.
pub fn simulate(schedule: &Schedule, costs: &Costs) -> Result<Timeline, SimulateError> {
    simulate_steps(schedule, costs, 1)
}

/// The times alone, as [`simulate`] has them, of a schedule that it accepts, such as
/// a generated one with other costs: a small part of the work where many are simulated. A schedule
/// that cannot run ends where it stands still.
///
/// # Errors
/// Costs that do not fit the schedule.
pub fn times(schedule: &Schedule, costs: &Costs) -> Result<Timeline, SimulateError> {
    costs.check(schedule, 1)?;
    Ok(engine::run(schedule, costs, false, &engine::StepCarry::first(schedule)).0)
}

#[cfg(test)]
mod tests;
