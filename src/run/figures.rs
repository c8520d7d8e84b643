//! The figures of a step: those of each rank, and the step's metrics that rank 0 makes of them.

use serde::{Deserialize, Serialize};
use zeropp_checkpoint::under_way::WriterReport;
use zeropp_comm::groups::Groups;
use zeropp_core::meter::{MemoryBytes, Meter};
use zeropp_core::metrics::{StepMetrics, wall_time};
use zeropp_core::split::RouterSums;
use zeropp_pipeline::executor::StepRecord;
use zeropp_pipeline::ir::{Action, Compute};
use zeropp_pipeline::simulate::StageCosts;
use zeropp_pipeline::timeline::{Computed, Span, bubble, bubble_own_span, bubble_step};

use crate::plan::blueprint::Blueprint;
use crate::plan::peak::BestRate;
use crate::run::layers::{self, LayerWatch};
use crate::run::reschedule::RankNote;

/// One rank's figures of a step, which go to rank 0 at its end.
#[derive(Serialize, Deserialize)]
pub(crate) struct RankStep {
    losses: Vec<MicroBatchLoss>,
    /// Scored tokens of the whole step, where not all are and the rank has a head.
    #[serde(default)]
    pub(crate) scored: Option<u64>,
    /// By rank 0's clock.
    pub(crate) computed: Computed,
    all_gathers: u64,
    reduce_scatters: u64,
    all_reduces: u64,
    /// All-gathers that made matrices whole for the optimizer.
    optimizer_gathers: u64,
    sent_bytes: u64,
    peak: MemoryBytes,
    at_once: u64,
    early: u64,
    idle: u64,
    times: StageTimes,
    /// The layers of its stages, in a step in which layers are looked at.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) layers: Vec<LayerWatch>,
    /// The routers of its stages, by place in the model's list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) routers: Vec<(usize, RouterSums)>,
    /// Nanoseconds of work that the rank did again.
    redone_ns: u64,
    /// Nanoseconds that saving kept the rank from its work.
    pub(crate) save_blocked_ns: u64,
    /// The report of the rank's writer, where it is done and in another process than rank 0.
    pub(crate) save: Option<WriterReport>,
    /// The same of a copy in memory.
    pub(crate) copy: Option<WriterReport>,
    /// What it says where programs are exchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reschedule: Option<RankNote>,
}

/// The loss of one micro-batch. Their order is that of the batch's samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct MicroBatchLoss {
    dp: usize,
    zero3: usize,
    micro_batch: usize,
    /// Of the loss.
    bits: u32,
}

/// The times of each kind of compute action on each stage, in that order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct StageTimes(Vec<StageTime>);

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct StageTime {
    stage: usize,
    kind: Compute,
    /// Of all together.
    ns: u64,
    /// How many.
    n: u64,
}

impl StageTimes {
    fn find(&self, stage: usize, kind: Compute) -> Result<usize, usize> {
        self.0.binary_search_by_key(&(stage, kind), |t| (t.stage, t.kind))
    }

    fn add(&mut self, time: StageTime) {
        match self.find(time.stage, time.kind) {
            Ok(at) => {
                self.0[at].ns += time.ns;
                self.0[at].n += time.n;
            }
            Err(at) => self.0.insert(at, time),
        }
    }

    pub(crate) fn merge(&mut self, other: &StageTimes) {
        other.0.iter().for_each(|time| self.add(*time));
    }

    /// Mean times of each stage. Where no backward was split, a whole one counts as B, with nothing
    /// left for W.
    pub(crate) fn costs(&self, stages: usize) -> Vec<StageCosts> {
        let mean = |stage: usize, kind: Compute| {
            self.find(stage, kind).map_or(0, |at| self.0[at].ns / self.0[at].n.max(1))
        };
        let backward = |stage: usize| {
            let is_split = self.find(stage, Compute::B).is_ok();
            mean(stage, if is_split { Compute::B } else { Compute::BW })
        };
        (0..stages)
            .map(|s| StageCosts {
                f_ns: mean(s, Compute::F),
                b_ns: backward(s),
                w_ns: mean(s, Compute::W),
                r_ns: mean(s, Compute::R),
                ..StageCosts::default()
            })
            .collect()
    }

    fn of(spans: &[Span]) -> StageTimes {
        let mut times = StageTimes::default();
        for span in spans {
            if let Action::Compute { kind, stage, .. } = span.action {
                times.add(StageTime { stage, kind, ns: span.end_ns - span.start_ns, n: 1 });
            }
        }
        times
    }
}

pub(crate) fn summarise(
    record: &StepRecord,
    losses: Vec<(usize, f32)>,
    groups: &Groups,
    meter: &Meter,
) -> RankStep {
    let c = groups.coords;
    let count =
        |f: fn(&Action) -> bool| record.spans.iter().filter(|s| f(&s.action)).count() as u64;
    let (early, idle) = groups.held_aside();
    let loss = |(micro_batch, loss): (usize, f32)| MicroBatchLoss {
        dp: c.dp,
        zero3: c.zero3,
        micro_batch,
        bits: loss.to_bits(),
    };
    RankStep {
        losses: losses.into_iter().map(loss).collect(),
        scored: None,
        computed: Computed::of(&record.spans).unwrap_or_default(),
        all_gathers: count(|a| matches!(a, Action::AllGather { .. })),
        reduce_scatters: count(|a| matches!(a, Action::ReduceScatter { .. })),
        all_reduces: count(|a| matches!(a, Action::ReplicaReduce { .. })),
        optimizer_gathers: record.outcome.map_or(0, |outcome| outcome.gathers),
        sent_bytes: record.sent_bytes,
        peak: meter.peak(),
        at_once: meter.at_once().total(),
        early,
        idle,
        times: StageTimes::of(&record.spans),
        layers: Vec::new(),
        routers: Vec::new(),
        redone_ns: record.redone.map_or(0, |redone| redone.ns),
        save_blocked_ns: 0,
        save: None,
        copy: None,
        reschedule: None,
    }
}

pub(crate) fn step_metrics(
    bp: &Blueprint,
    step: u64,
    step_s: f64,
    best: &mut BestRate,
    record: &StepRecord,
    ranks: &[RankStep],
) -> (StepMetrics, StageTimes) {
    let mut losses: Vec<_> = ranks.iter().flat_map(|r| r.losses.iter().copied()).collect();
    losses.sort_unstable();
    let sum: f64 = losses.iter().map(|l| f64::from(f32::from_bits(l.bits))).sum();
    let outcome = record.outcome.expect("every program ends with the optimizer step");
    let tokens = bp.config.tokens_per_step() as u64;
    let tokens_per_s = tokens as f64 / step_s;
    let total = |f: fn(&RankStep) -> u64| ranks.iter().map(f).sum();
    let most = |f: fn(&RankStep) -> u64| ranks.iter().map(f).max().unwrap_or(0);
    let computed: Vec<Computed> = ranks.iter().map(|r| r.computed).collect();
    let mut times = StageTimes::default();
    ranks.iter().for_each(|r| times.merge(&r.times));
    let metrics = StepMetrics {
        step,
        wall_time: wall_time(),
        loss: sum / losses.len() as f64,
        grad_norm: outcome.grad_norm,
        lr: outcome.lr,
        tokens,
        scored_tokens: ranks.iter().filter_map(|r| r.scored).max(),
        tokens_per_s,
        step_s,
        flops_util: best.utilisation(tokens_per_s * bp.plan.flops_per_token),
        bubble: bubble(&computed),
        bubble_own_span: bubble_own_span(&computed),
        bubble_step: bubble_step(&computed, (step_s * 1e9) as u64),
        all_gathers: total(|r| r.all_gathers),
        reduce_scatters: total(|r| r.reduce_scatters),
        all_reduces: total(|r| r.all_reduces),
        optimizer_gathers: total(|r| r.optimizer_gathers),
        comm_bytes: total(|r| r.sent_bytes),
        peak_bytes: ranks.iter().fold(MemoryBytes::default(), |m, r| m.max(&r.peak)),
        at_once_bytes: most(|r| r.at_once),
        early_bytes: most(|r| r.early),
        idle_bytes: total(|r| r.idle),
        save_blocked_s: most(|r| r.save_blocked_ns) as f64 / 1e9,
        layers: layers::metrics(bp, ranks.iter().flat_map(|r| &r.layers), outcome.skipped),
        experts: layers::experts(bp, ranks.iter().flat_map(|r| &r.routers)),
        eval: None,
        skipped: outcome.skipped,
        rolled_back: outcome.rolled_back,
        redone_s: most(|r| r.redone_ns) as f64 / 1e9,
        program: 0,
    };
    (metrics, times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stage_times_add_up_in_any_order() {
        let (stages, ranks) = (4096, 512);
        let one = |rank: usize| {
            let mut times = StageTimes::default();
            for stage in (rank..stages).step_by(ranks).rev() {
                for kind in [Compute::F, Compute::B, Compute::W] {
                    times.add(StageTime { stage, kind, ns: 10 + stage as u64, n: 2 });
                }
            }
            times
        };
        let (mut forth, mut back) = (StageTimes::default(), StageTimes::default());
        for rank in 0..ranks {
            forth.merge(&one(rank));
            back.merge(&one(ranks - 1 - rank));
        }
        assert_eq!(forth, back);
        let costs = forth.costs(stages);
        assert!((0..stages).all(|s| costs[s].f_ns == (10 + s as u64) / 2 && costs[s].r_ns == 0));
    }

    /// As after an exchange of programs, of which one splits backwards.
    #[test]
    fn a_backward_costs_what_split_ones_took_where_a_run_has_had_both() {
        let mut times = StageTimes::default();
        for (stage, kind, ns) in
            [(0, Compute::B, 20), (0, Compute::W, 10), (0, Compute::BW, 33), (1, Compute::BW, 33)]
        {
            times.add(StageTime { stage, kind, ns, n: 1 });
        }
        let costs = times.costs(2).into_iter().map(|stage| (stage.b_ns, stage.w_ns));
        assert!(costs.eq([(20, 10), (33, 0)]));
    }
}
