//! From runs to the numbers and pieces that people compare.

use crate::exchange::json::Measures;
use crate::ir::{Action, Schedule};
use crate::simulate::{Costs, Metrics};
use crate::timeline::{Lane, RankTimeline, Span, Timeline};

/// What `timeline` measured, a simulation of `schedule` with `costs`. The unit of time is the
/// costs'; `micros` turns it into µs.
pub fn measures(
    schedule: &Schedule,
    timeline: &Timeline,
    costs: &Costs,
    micros: impl Fn(u64) -> f64,
) -> Measures {
    let metrics = Metrics::new(schedule, timeline, &costs.memory);
    Measures {
        makespan: micros(metrics.makespan_ns),
        own_span_max: micros(metrics.own_span_max_ns),
        bubble_rate: papers_bubble_rate(schedule, timeline, costs, &metrics),
        idle: metrics.idle_ns.iter().map(|t| micros(*t)).collect(),
        ends: metrics.ends_ns.iter().map(|t| micros(*t)).collect(),
        peak_activation: metrics.peak_activation,
        all_gathers: metrics.all_gathers,
        reduce_scatters: metrics.reduce_scatters,
    }
}

/// The bubble rate as the schedule's paper counts it.
///
/// That is [`Metrics::bubble_rate`] but for `interleaved`: the script behind the printed tables of
/// the Zero Bubble papers waits for only the first micro-batch of each round on the way from the
/// last rank back to the first, which makes its step P messages shorter than any run can be.
pub fn papers_bubble_rate(
    schedule: &Schedule,
    timeline: &Timeline,
    costs: &Costs,
    metrics: &Metrics,
) -> f64 {
    let loops = schedule.pp() > 1 && schedule.stages() > schedule.pp();
    if schedule.kind != "interleaved" || !loops {
        return metrics.bubble_rate;
    }
    let work = timeline.ranks.iter().map(RankTimeline::busy_ns).max().unwrap_or(0);
    let messages = (schedule.pp() as u64).saturating_mul(costs.link.latency_ns);
    let cost = metrics.makespan_ns.saturating_sub(messages).max(work);
    if cost == 0 { 0.0 } else { (cost - work) as f64 / cost as f64 }
}

/// The number of whole steps in a run: those that every rank has ended with an optimizer step.
pub fn steps(timeline: &Timeline) -> usize {
    let ended = |rank: &RankTimeline| {
        rank.spans.iter().filter(|s| s.action == Action::OptimizerStep).count()
    };
    timeline.ranks.iter().map(ended).min().unwrap_or(0)
}

/// Step `index` (from 0) of a run of several: on every rank what starts after the optimizer step
/// before it and not after its own.
pub fn step(timeline: &Timeline, index: usize) -> Timeline {
    let of_rank = |rank: &RankTimeline| {
        let mut ends: Vec<(u64, u64)> = rank
            .spans
            .iter()
            .filter(|s| s.action == Action::OptimizerStep)
            .map(|s| (s.start_ns, s.end_ns))
            .collect();
        ends.sort_unstable();
        let from = index.checked_sub(1).and_then(|before| ends.get(before)).map_or(0, |s| s.1);
        let to = ends.get(index).map_or(u64::MAX, |s| s.0);
        let inside = |at: u64| at >= from && at <= to;
        RankTimeline {
            spans: rank.spans.iter().filter(|s| inside(s.start_ns)).copied().collect(),
            memory: rank.memory.iter().filter(|m| inside(m.at_ns)).copied().collect(),
            ..rank.clone()
        }
    };
    Timeline { ranks: timeline.ranks.iter().map(of_rank).collect(), ..timeline.clone() }
}

/// The ranks of the first pipeline alone, of a run with ZeRO-3 groups or replicas.
pub fn first_pipeline(timeline: &Timeline) -> Timeline {
    let first = timeline.ranks.iter().map(|r| r.group).min().unwrap_or(0);
    let ranks = timeline.ranks.iter().filter(|r| r.group == first).cloned().collect();
    Timeline { ranks, ..timeline.clone() }
}

/// From the first start to the last end of the pipeline's computes over all ranks, ns.
pub fn makespan_ns(timeline: &Timeline) -> u64 {
    let spans = || timeline.ranks.iter().filter_map(RankTimeline::own_span);
    let start = spans().map(|s| s.0).min().unwrap_or(0);
    spans().map(|s| s.1).max().unwrap_or(0) - start
}

/// Nanoseconds that a rank's communication lane was busy with anything, overlaps counted once.
pub fn communication_ns(rank: &RankTimeline) -> u64 {
    let works =
        |s: &&Span| s.lane == Lane::Communication && !matches!(s.action, Action::Recv { .. });
    let mut spans: Vec<(u64, u64)> =
        rank.spans.iter().filter(works).map(|s| (s.start_ns, s.end_ns)).collect();
    spans.sort_unstable();
    let mut until = 0;
    let mut sum = 0;
    for (start, end) in spans {
        sum += end.saturating_sub(start.max(until));
        until = until.max(end);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::samples::gpipe;
    use crate::schedules::{Shape, generate};
    use crate::simulate::simulate;

    fn run(kind: &str, shape: Shape, costs: &Costs) -> (Schedule, Timeline) {
        let schedule = generate(kind, &shape).unwrap();
        let timeline = simulate(&schedule, costs).unwrap();
        (schedule, timeline)
    }

    #[test]
    fn only_interleaved_is_counted_apart() {
        let shape = Shape { pp: 4, virtual_stages: 2, micro_batches: 8, unit: 8 };
        let costs = Costs::uniform(8, 50, 60, 40, 3);
        for kind in ["interleaved", "bf-pp", "zb-v", "zeropp"] {
            let (schedule, timeline) = run(kind, shape, &costs);
            let metrics = Metrics::new(&schedule, &timeline, &costs.memory);
            let rate = papers_bubble_rate(&schedule, &timeline, &costs, &metrics);
            if kind == "interleaved" {
                let cost = metrics.makespan_ns as f64 - 12.0;
                assert_eq!(rate, (cost - 2400.0) / cost);
                assert!(rate < metrics.bubble_rate);
            } else {
                assert_eq!(rate, metrics.bubble_rate, "{kind}");
            }
        }
        // One rank sends nothing.
        let (schedule, timeline) =
            run("interleaved", Shape { pp: 1, ..shape }, &Costs::uniform(2, 5, 6, 4, 3));
        let costs = Costs::uniform(2, 5, 6, 4, 3);
        let metrics = Metrics::new(&schedule, &timeline, &costs.memory);
        assert_eq!(papers_bubble_rate(&schedule, &timeline, &costs, &metrics), 0.0);
    }

    #[test]
    fn a_run_falls_into_its_steps() {
        let whole = gpipe(3, 2, 4, 3);
        assert_eq!(steps(&whole), 3);
        let parts: Vec<Timeline> = (0..3).map(|i| step(&whole, i)).collect();
        for (r, rank) in whole.ranks.iter().enumerate() {
            let spans: usize = parts.iter().map(|p| p.ranks[r].spans.len()).sum();
            assert_eq!(spans, rank.spans.len(), "no span is lost or twice there");
        }
        for part in &parts {
            assert_eq!(steps(part), 1);
            assert!(makespan_ns(part) < makespan_ns(&whole) / 2);
            let one = first_pipeline(part);
            assert_eq!(
                one.ranks.iter().map(|r| (r.pp, r.group)).collect::<Vec<_>>(),
                [(0, 0), (1, 0), (2, 0)]
            );
        }
    }

    #[test]
    fn communication_counts_overlaps_once() {
        let span =
            |start_ns, end_ns, action| Span { lane: Lane::Communication, action, start_ns, end_ns };
        let gather = Action::AllGather { stage: 0 };
        let receive =
            Action::Recv { message: crate::ir::Message::Gradient, stage: 0, micro_batch: 0 };
        let spans =
            vec![span(5, 9, gather), span(0, 4, gather), span(2, 6, gather), span(20, 90, receive)];
        assert_eq!(communication_ns(&RankTimeline { spans, ..Default::default() }), 9);
    }
}
