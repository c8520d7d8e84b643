//! From runs to the numbers and pieces that people compare.

use crate::exchange::json::Measures;
use crate::ir::{Action, Schedule};
use crate::metrics::Metrics;
use crate::simulate::Costs;
use crate::timeline::{Lane, RankTimeline, Span, Timeline};

/// What `timeline` measured, a simulation of `schedule` with `costs`. The unit of time is the
/// costs'; `micros` turns it into µs.
pub fn measures(
    schedule: &Schedule,
    timeline: &Timeline,
    costs: &Costs,
    micros: impl Fn(u64) -> f64,
) -> Measures {
    let metrics = Metrics::new(schedule, timeline, costs);
    Measures {
        makespan: micros(metrics.makespan_ns),
        own_span_max: micros(metrics.own_span_max_ns),
        bubble_rate: metrics.bubble_rate,
        bubble_step: Some(metrics.bubble_step),
        idle: metrics.idle_ns.iter().map(|t| micros(*t)).collect(),
        ends: metrics.ends_ns.iter().map(|t| micros(*t)).collect(),
        peak_activation: metrics.peak_activation,
        all_gathers: metrics.all_gathers,
        reduce_scatters: metrics.reduce_scatters,
    }
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
            saves: rank.saves.iter().filter(|s| inside(s.start_ns)).copied().collect(),
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
