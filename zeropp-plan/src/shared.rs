//! Ranks that share the cores of their machine.
//!
//! Times are those of ranks that have a core each. Where more of them compute at once than there
//! are cores, some have to share one, and go on at half the pace or less; where some of them wait,
//! others have cores of their own. Systems move threads between cores seldom within a step, and
//! ranks wait for the slowest of them, so that three ranks on two cores take as long as four would.
//! All are taken to go on alike, so that nothing changes its order, and only the clock is stretched.

use zeropp_schedule::costs::Machine;
use zeropp_schedule::timeline::{Lane, Timeline};

use crate::layout::Layout;

/// Ranks that share cores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Crowd {
    /// Ranks on a machine.
    ranks: usize,
    /// Those that it has cores for.
    cores: usize,
}

impl Crowd {
    /// The ranks of `layout` that are on one machine; none where each has a core.
    pub(crate) fn new(machine: &Machine, layout: &Layout) -> Option<Crowd> {
        let ranks = (layout.pp * layout.zero3 * layout.dp).min(machine.per_node);
        let cores = machine.ranks_at_once.filter(|cores| ranks > *cores)?;
        Some(Crowd { ranks, cores })
    }

    /// How many times as long everything takes while `share` of the ranks compute.
    pub(crate) fn slowdown(self, share: f64) -> f64 {
        // What is a whole number of ranks is not to be rounded up.
        let busy = share * self.ranks as f64 - 1e-9;
        (busy / self.cores as f64).ceil().max(1.0)
    }

    /// How many times as long as `timeline` it takes: each of its ranks stands for as many as
    /// there are ZeRO-3 ranks and replicas.
    pub(crate) fn stretch(self, timeline: &Timeline) -> f64 {
        let mut changes: Vec<(u64, i64)> = Vec::new();
        let mut end = 1;
        for span in timeline.ranks.iter().flat_map(|rank| &rank.spans) {
            end = end.max(span.end_ns);
            if span.lane == Lane::Compute && span.end_ns > span.start_ns {
                changes.extend([(span.start_ns, 1), (span.end_ns, -1)]);
            }
        }
        changes.sort_unstable();
        let (mut at, mut busy, mut sum) = (0, 0, 0.0);
        for (time, change) in changes.into_iter().chain([(end, 0)]) {
            let share = busy as f64 / timeline.ranks.len() as f64;
            sum += (time - at) as f64 * self.slowdown(share);
            (at, busy) = (time, busy + change);
        }
        sum / end as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zeropp_schedule::ir::Action;
    use zeropp_schedule::timeline::{RankTimeline, Span};

    /// Two ranks of which one computes for 10, the other for its last 4: on one core 4 of them take
    /// twice as long, and what one computes alone takes no longer.
    #[test]
    fn the_clock_is_stretched_where_more_compute_than_there_are_cores() {
        let span = |start_ns, end_ns| Span {
            lane: Lane::Compute,
            action: Action::OptimizerStep,
            start_ns,
            end_ns,
        };
        let rank = |spans| RankTimeline { spans, ..RankTimeline::default() };
        let ranks = vec![rank(vec![span(0, 5), span(5, 10)]), rank(vec![span(6, 10)])];
        let timeline = Timeline { ranks, ..Timeline::default() };
        let stretch = |ranks, cores| Crowd { ranks, cores }.stretch(&timeline);
        assert_eq!(stretch(2, 2), 1.0);
        assert!((stretch(2, 1) - 1.4).abs() < 1e-12);
        // Each stands for two: alone they have a core each, of four two have to share one.
        assert!((stretch(4, 2) - 1.4).abs() < 1e-12);
        assert!((stretch(4, 3) - 1.4).abs() < 1e-12);
        assert!((stretch(4, 1) - (6.0 * 2.0 + 4.0 * 4.0) / 10.0).abs() < 1e-12);
    }
}
