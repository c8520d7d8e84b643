//! The numbers by which schedules are compared.

use crate::ir::{Action, Schedule};
use crate::memory::Ledger;
use crate::schedules::Kind;
use crate::simulate::{Costs, step_period_ns};
use crate::timeline::{Timeline, idle_share};

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
    /// (cost − work) / cost as the schedule's paper counts it
    /// ([`Rate`](crate::schedules::Rate)), work being that of the busiest rank. A schedule of no
    /// known kind has the makespan as its cost.
    pub bubble_rate: f64,
    /// The idle share of all ranks from the first compute of a step to that of the next one, in a
    /// long run, 0 to 1: reductions and the optimizer count as idle.
    pub bubble_step: f64,
    /// The largest sum of activations and weight stash of each rank, in the unit of the costs.
    pub peak_activation: Vec<u64>,
    /// All-gathers of the program, over all pipeline ranks.
    pub all_gathers: usize,
    /// Reduce-scatters of the program, over all pipeline ranks.
    pub reduce_scatters: usize,
}

impl Metrics {
    /// The numbers of `timeline`, a run of `schedule` with `costs`, as
    /// [`simulate`](crate::simulate::simulate) gives it.
    ///
    /// # Panics
    /// Panics if `costs` is of other numbers of stages or ranks than `schedule`.
    pub fn new(schedule: &Schedule, timeline: &Timeline, costs: &Costs) -> Metrics {
        let spans: Vec<(u64, u64)> =
            timeline.ranks.iter().map(|r| r.own_span().unwrap_or_default()).collect();
        let busy: Vec<u64> = timeline.ranks.iter().map(|r| r.busy_ns()).collect();
        let ends_ns: Vec<u64> = spans.iter().map(|(_, end)| *end).collect();
        let makespan_ns = ends_ns.iter().copied().max().unwrap_or(0);
        let own_span_max_ns = spans.iter().map(|(start, end)| end - start).max().unwrap_or(0);
        let work = busy.iter().copied().max().unwrap_or(0);
        let cost = match Kind::find(&schedule.kind).map(|kind| kind.rate) {
            Some(rate) => {
                let (pp, stages, latency_ns) =
                    (schedule.pp(), schedule.stages(), costs.link.latency_ns);
                rate.cost(makespan_ns, own_span_max_ns, pp, stages, latency_ns).max(work)
            }
            None => makespan_ns,
        };
        let idle = |((start, end), busy): (&(u64, u64), &u64)| end - start - busy;
        let count = |of: fn(&Action) -> bool| {
            schedule.ranks.iter().flatten().filter(|action| of(action)).count()
        };
        let peak = |(rank, program): (usize, &Vec<Action>)| {
            let mut ledger = Ledger::of(schedule, rank, &costs.memory);
            program.iter().for_each(|a| ledger.run(a));
            ledger.kept_peak()
        };
        Metrics {
            makespan_ns,
            idle_ns: spans.iter().zip(&busy).map(idle).collect(),
            ends_ns,
            own_span_max_ns,
            bubble_rate: if cost == 0 { 0.0 } else { (cost - work) as f64 / cost as f64 },
            bubble_step: {
                let all = step_period_ns(schedule, costs) as u128 * busy.len() as u128;
                let sum = busy.iter().map(|ns| u128::from(*ns)).sum();
                idle_share(sum, all)
            },
            peak_activation: schedule.ranks.iter().enumerate().map(peak).collect(),
            all_gathers: count(|a| matches!(a, Action::AllGather { .. })),
            reduce_scatters: count(|a| matches!(a, Action::ReduceScatter { .. })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedules::{Shape, generate};
    use crate::simulate::simulate;

    fn run(kind: &str, shape: Shape, costs: &Costs) -> Metrics {
        let schedule = generate(kind, &shape).unwrap();
        let timeline = simulate(&schedule, costs).unwrap();
        Metrics::new(&schedule, &timeline, costs)
    }

    #[test]
    fn each_rate_is_a_share_of_what_its_paper_counts() {
        let shape = Shape { pp: 4, virtual_stages: 2, micro_batches: 8, unit: 8 };
        let costs = Costs::uniform(8, 50, 60, 40, 3);
        for kind in ["interleaved", "bf-pp", "zb-v", "zeropp"] {
            let metrics = run(kind, shape, &costs);
            let cost = match kind {
                "interleaved" => metrics.makespan_ns - 12,
                "bf-pp" => metrics.makespan_ns,
                _ => metrics.own_span_max_ns,
            };
            let rate = (cost - 2400) as f64 / cost as f64;
            assert_eq!(metrics.bubble_rate, rate, "{kind}");
        }
        // One rank sends nothing.
        let alone = run("interleaved", Shape { pp: 1, ..shape }, &Costs::uniform(2, 5, 6, 4, 3));
        assert_eq!(alone.bubble_rate, 0.0);
    }
}
