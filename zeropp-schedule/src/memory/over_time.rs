//! Memory by kind over the time of a run, simulated or measured.

use super::{Ledger, MemoryBytes, StageBytes};
use crate::timeline::RankTimeline;

/// Bytes by kind alive on a rank from `at_ns` to the next point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KindPoint {
    /// Time of the timeline.
    pub at_ns: u64,
    /// Bytes by kind.
    pub bytes: MemoryBytes,
}

/// What a rank holds over one step of its timeline, a point for every change.
///
/// `stages` has an entry for each stage of the schedule. An action that takes no time of the
/// compute thread (a gather, a receive) counts from when it is issued: the end of the compute
/// action before it.
pub fn over_time(rank: &RankTimeline, stages: &[StageBytes]) -> Vec<KindPoint> {
    let program: Vec<_> = rank.spans.iter().map(|s| s.action).collect();
    let mut ledger = Ledger::new(&program, stages);
    let mut points: Vec<KindPoint> = Vec::new();
    let mut clock = rank.spans.first().map_or(0, |s| s.start_ns);
    for span in &rank.spans {
        if span.action.computes().next().is_none() {
            ledger.run(&span.action);
            note(&mut points, clock, ledger.now());
            continue;
        }
        clock = clock.max(span.start_ns);
        span.action.computes().for_each(|c| ledger.start(c));
        note(&mut points, clock, ledger.now());
        clock = clock.max(span.end_ns);
        span.action.computes().for_each(|c| ledger.end(c));
        note(&mut points, clock, ledger.now());
    }
    points
}

/// Appends a change. Several at one time stay apart, so that no peak between them is lost.
fn note(points: &mut Vec<KindPoint>, at_ns: u64, bytes: MemoryBytes) {
    if points.last().is_none_or(|last| last.bytes != bytes) {
        points.push(KindPoint { at_ns, bytes });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower::{LowerOptions, lower};
    use crate::memory::predict;
    use crate::schedules::{Shape, generate};
    use crate::simulate::{Costs, simulate};

    #[test]
    fn its_peaks_are_the_predicted_ones_and_nothing_is_left() {
        let stage = StageBytes {
            input: 2,
            activation: 7,
            stash: 5,
            weights: 11,
            workspace: 3,
            gradient: 13,
            gradient_in_forward: 6,
            message: 2,
            keeps_first_gradient: false,
            ..StageBytes::default()
        };
        for (kind, v, recompute) in
            [("zeropp", 2, false), ("zeropp", 3, true), ("1f1b", 1, false), ("zb-v", 2, false)]
        {
            let shape = Shape { pp: 3, virtual_stages: v, micro_batches: 9, unit: 5 };
            let options = LowerOptions { recompute, ..LowerOptions::default() };
            let program = lower(&generate(kind, &shape).unwrap(), &options);
            let stages = vec![stage; shape.stages()];
            let costs =
                Costs { memory: stages.clone(), ..Costs::uniform(shape.stages(), 5, 6, 4, 1) };
            let timeline = simulate(&program, &costs).unwrap();
            for (rank, expected) in timeline.ranks.iter().zip(predict(&program, &stages)) {
                let points = over_time(rank, &stages);
                assert!(points.windows(2).all(|w| w[0].at_ns <= w[1].at_ns), "{kind}");
                let peak = points.iter().fold(MemoryBytes::default(), |m, p| m.max(&p.bytes));
                // A whole backward holds its stash for no time at all.
                assert_eq!(
                    MemoryBytes { weight_stash: 0, ..peak },
                    MemoryBytes { weight_stash: 0, ..expected },
                    "{kind}"
                );
                if kind != "1f1b" {
                    assert_eq!(peak.weight_stash, expected.weight_stash, "{kind}");
                }
                let last = points.last().unwrap();
                assert_eq!(last.bytes, MemoryBytes::default(), "{kind}");
            }
        }
    }
}
