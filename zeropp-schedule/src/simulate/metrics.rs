//! The numbers by which schedules are compared.

use crate::ir::{Action, Schedule};
use crate::memory::{Ledger, StageBytes};
use crate::timeline::Timeline;

/// One run in numbers. Only the pipeline's compute actions count, not the optimizer step.
#[derive(Clone, Debug, PartialEq)]
pub struct Metrics {
    /// From time 0 to the last end over all ranks.
    pub makespan_ns: u64,
    /// The last end of each rank.
    pub ends_ns: Vec<u64>,
    /// Idle time of each rank between its first start and its last end.
    pub idle_ns: Vec<u64>,
    /// The largest time between a rank's first start and its last end.
    pub own_span_max_ns: u64,
    /// (cost − work) / cost, cost being counted as the schedule's paper does
    /// ([`counts_own_span`]), and work being that of the busiest rank.
    pub bubble_rate: f64,
    /// The largest sum of activations and weight stash of each rank, in the unit of the costs.
    pub peak_activation: Vec<u64>,
    /// All-gathers of the program, over all pipeline ranks.
    pub all_gathers: usize,
    /// Reduce-scatters of the program, over all pipeline ranks.
    pub reduce_scatters: usize,
}

/// True for the kinds whose papers count a bubble rate within each rank's own span, because one
/// step's tail overlaps the next step's start; for all others cost runs from time 0.
pub fn counts_own_span(kind: &str) -> bool {
    let own = ["zb-h2", "zb-1p", "zb-2p", "zb-v", "v-half", "v-min", "zeropp", "zeropp-auto"];
    own.contains(&kind)
}

impl Metrics {
    /// The numbers of `timeline`, a run of `schedule` whose stages keep `memory`.
    pub fn new(schedule: &Schedule, timeline: &Timeline, memory: &[StageBytes]) -> Metrics {
        let spans: Vec<(u64, u64)> =
            timeline.ranks.iter().map(|r| r.own_span().unwrap_or_default()).collect();
        let busy: Vec<u64> = timeline.ranks.iter().map(|r| r.busy_ns()).collect();
        let ends_ns: Vec<u64> = spans.iter().map(|(_, end)| *end).collect();
        let makespan_ns = ends_ns.iter().copied().max().unwrap_or(0);
        let own_span_max_ns = spans.iter().map(|(start, end)| end - start).max().unwrap_or(0);
        let cost = if counts_own_span(&schedule.kind) { own_span_max_ns } else { makespan_ns };
        let work = busy.iter().copied().max().unwrap_or(0);
        let idle = |((start, end), busy): (&(u64, u64), &u64)| end - start - busy;
        let count = |of: fn(&Action) -> bool| {
            schedule.ranks.iter().flatten().filter(|action| of(action)).count()
        };
        let peak = |program: &Vec<Action>| {
            let mut ledger = Ledger::new(program, memory);
            program.iter().for_each(|a| ledger.run(a));
            ledger.kept_peak()
        };
        Metrics {
            makespan_ns,
            idle_ns: spans.iter().zip(&busy).map(idle).collect(),
            ends_ns,
            own_span_max_ns,
            bubble_rate: if cost == 0 { 0.0 } else { (cost - work) as f64 / cost as f64 },
            peak_activation: schedule.ranks.iter().map(peak).collect(),
            all_gathers: count(|a| matches!(a, Action::AllGather { .. })),
            reduce_scatters: count(|a| matches!(a, Action::ReduceScatter { .. })),
        }
    }
}
