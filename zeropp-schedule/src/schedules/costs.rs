//! What a schedule's actions cost: the input of the generators that weigh one order against
//! another.

use super::ScheduleError;
use crate::ir::HeadMessage;
use crate::memory::HeadBytes;
use crate::simulate;

/// Durations, in any one integer unit of time, and memory, in any one integer unit of space, of
/// every stage. All vectors have one entry a stage and, where the head is split, one for each
/// rank's slice behind them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OrderCosts {
    /// T_F, a forward.
    pub f: Vec<u64>,
    /// T_B, the gradient of a stage's input.
    pub b: Vec<u64>,
    /// T_W, the gradients of a stage's weights. A whole backward takes T_B + T_W.
    pub w: Vec<u64>,
    /// c, the time between the end of an action and the arrival of its result on another rank.
    pub send: u64,
    /// The same for one tensor of each of a split head's messages, in their order.
    pub head: [u64; 4],
    /// Gathering a stage's weights inside its ZeRO-3 group.
    pub gather: Vec<u64>,
    /// Reducing and scattering a stage's gradients inside its ZeRO-3 group.
    pub reduce: Vec<u64>,
    /// Change of activation memory by an F; taken when it starts.
    pub mem_f: Vec<i64>,
    /// Change by a B, given back when it ends.
    pub mem_b: Vec<i64>,
    /// Change by a W, given back when it ends.
    pub mem_w: Vec<i64>,
    /// The most activation memory on any rank.
    pub mem_limit: Option<i64>,
    /// What else kind `auto` keeps to.
    pub limits: Limits,
    /// The length that orders are compared by.
    pub objective: Objective,
}

/// The length that is made as short as can be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Objective {
    /// From the first start to the last end of all ranks, collectives included: what a step takes
    /// that ends in a barrier.
    Makespan,
    /// The largest time of a rank between its first start and its last end: where no barrier parts
    /// two steps, one's tail overlaps the next one's start. What the papers count.
    #[default]
    OwnSpan,
}

/// Limits of kind `auto` besides the one on activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The most stages of a rank whose weights are gathered at once; none: 2, as in ZeroPP with one
    /// stage ahead.
    pub gathered: Option<usize>,
    /// The most gathers of a rank in a step.
    pub gathers: Option<usize>,
    /// Whole schedules that the search may time; none: few, for orders that are wanted at once.
    pub evaluations: Option<u64>,
}

impl OrderCosts {
    /// Equal stages without communication; an F holds two units of memory of which B and W free
    /// one each. Zero gather and reduce times, no limit.
    pub fn uniform(stages: usize, f: u64, b: u64, w: u64, send: u64) -> OrderCosts {
        OrderCosts {
            f: vec![f; stages],
            b: vec![b; stages],
            w: vec![w; stages],
            send,
            head: [send; 4],
            gather: vec![0; stages],
            reduce: vec![0; stages],
            mem_f: vec![2; stages],
            mem_b: vec![-1; stages],
            mem_w: vec![-1; stages],
            mem_limit: None,
            limits: Limits::default(),
            objective: Objective::default(),
        }
    }

    /// These costs, weighed for another objective.
    #[must_use]
    pub fn with_objective(mut self, objective: Objective) -> OrderCosts {
        self.objective = objective;
        self
    }

    /// These costs with a limit on a rank's activation memory.
    #[must_use]
    pub fn with_limit(mut self, limit: i64) -> OrderCosts {
        self.mem_limit = Some(limit);
        self
    }

    /// The costs of stage `first` and those behind it.
    pub fn behind(&self, first: usize) -> OrderCosts {
        let times = |all: &[u64]| all[first..].to_vec();
        let memory = |all: &[i64]| all[first..].to_vec();
        OrderCosts {
            f: times(&self.f),
            b: times(&self.b),
            w: times(&self.w),
            send: self.send,
            head: self.head,
            gather: times(&self.gather),
            reduce: times(&self.reduce),
            mem_f: memory(&self.mem_f),
            mem_b: memory(&self.mem_b),
            mem_w: memory(&self.mem_w),
            mem_limit: self.mem_limit,
            limits: self.limits,
            objective: self.objective,
        }
    }

    /// Refuses vectors that have not one entry for each of `stages`, and memory that does not
    /// return to zero after F, B and W of a stage.
    pub fn check(&self, kind: &'static str, stages: usize) -> Result<(), ScheduleError> {
        let times = [&self.f, &self.b, &self.w, &self.gather, &self.reduce].map(Vec::len);
        let memory = [&self.mem_f, &self.mem_b, &self.mem_w].map(Vec::len);
        let wrong = times.into_iter().chain(memory).find(|n| *n != stages);
        if let Some(value) = wrong {
            let works = format!("every cost must be given for each of the {stages} stages");
            return Err(ScheduleError::Field { kind, field: "costs", value, works });
        }
        let unbalanced = (0..stages)
            .find(|&s| self.mem_f[s] < 0 || self.mem_f[s] + self.mem_b[s] + self.mem_w[s] != 0);
        match unbalanced {
            None => Ok(()),
            Some(value) => Err(ScheduleError::Field {
                kind,
                field: "mem_f of stage",
                value,
                works: "mem_f must be at least 0 and mem_f + mem_b + mem_w must be 0".into(),
            }),
        }
    }

    /// What a whole micro-batch costs stage `s`: T_F + T_B + T_W.
    pub fn total(&self, s: usize) -> u64 {
        self.f[s] + self.b[s] + self.w[s]
    }
}

/// The same stages as the simulator sees them. A message takes its latency and the transfer of the
/// largest one; links in parallel, recomputation and replicas are left out. No limit.
impl From<&simulate::Costs> for OrderCosts {
    fn from(costs: &simulate::Costs) -> OrderCosts {
        let times = |of: fn(&simulate::StageCosts) -> u64| costs.stages.iter().map(of).collect();
        let kept = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX / 8).min(i64::MAX / 8);
        let memory = |of: &dyn Fn(i64, i64) -> i64| {
            costs.memory.iter().map(|m| of(kept(m.activation), kept(m.stash))).collect()
        };
        let transfer = |bytes: u64| {
            costs.link.bytes_per_s.filter(|rate| *rate > 0).map_or(0, |rate| {
                let ns = (u128::from(bytes) * 1_000_000_000).div_ceil(u128::from(rate));
                u64::try_from(ns).unwrap_or(u64::MAX / 8)
            })
        };
        let sent = |bytes: u64| costs.link.latency_ns.saturating_add(transfer(bytes));
        let message = costs.memory.iter().map(|m| m.message).max().unwrap_or(0);
        let head = costs.memory.iter().map(|m| m.head).max_by_key(HeadBytes::longest);
        let head = head.unwrap_or_default();
        OrderCosts {
            f: times(|s| s.f_ns),
            b: times(|s| s.b_ns),
            w: times(|s| s.w_ns),
            send: sent(message),
            head: HeadMessage::ALL.map(|message| sent(head.of(message))),
            gather: times(|s| s.all_gather_ns),
            reduce: times(|s| s.reduce_scatter_ns),
            mem_f: memory(&|activation, _| activation),
            mem_b: memory(&|activation, stash| stash - activation),
            mem_w: memory(&|_, stash| -stash),
            mem_limit: None,
            limits: Limits::default(),
            objective: Objective::default(),
        }
    }
}
