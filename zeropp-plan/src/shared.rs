//! Ranks that share the cores of their machine, and compute beside collectives on one device.
//!
//! Times are those of ranks that have a core each. Where more of them compute at once than there
//! are cores, some have to share one, and go on at half the pace or less; where some of them wait,
//! others have cores of their own. Systems move threads between cores seldom within a step, and
//! ranks wait for the slowest of them, so that three ranks on two cores take as long as four would.
//! All go on alike, so that nothing changes its order, and only the clock is stretched.
//! Gathers and reductions are work of the same cores.

use zeropp_schedule::action::Partners;
use zeropp_schedule::costs::Machine;
use zeropp_schedule::timeline::{Lane, RankTimeline, Span, Timeline};

use crate::layout::Layout;

/// How many times as long as `timeline` a step takes on devices where compute loses `contention` of
/// its pace to collectives that run beside it: kernels of both share a device's cores and
/// memory. Ranks wait for each other, so that what they lose counts on average.
pub(crate) fn contended(contention: f64, timeline: &Timeline) -> f64 {
    let overlap = |rank: &RankTimeline| {
        let spans = |of: fn(&Span) -> bool| rank.spans.iter().filter(move |s| of(s));
        let mut computes = spans(|s| s.lane == Lane::Compute).peekable();
        let mut both = 0;
        for collective in spans(is_collective) {
            // Both lanes are in the order of their times.
            while computes.next_if(|s| s.end_ns <= collective.start_ns).is_some() {}
            for compute in computes.clone().take_while(|s| s.start_ns < collective.end_ns) {
                let (from, to) = (compute.start_ns, compute.end_ns);
                both += to.min(collective.end_ns).saturating_sub(from.max(collective.start_ns));
            }
        }
        both
    };
    if contention == 0.0 {
        return 1.0;
    }
    let end = timeline.ranks.iter().flat_map(|r| &r.spans).map(|s| s.end_ns).max().unwrap_or(1);
    let both: u64 = timeline.ranks.iter().map(overlap).sum();
    1.0 + contention * both as f64 / timeline.ranks.len().max(1) as f64 / end.max(1) as f64
}

fn is_collective(span: &Span) -> bool {
    span.lane == Lane::Communication && span.action.row().partners == Partners::Group
}

/// What a rank's gather or reduction takes of a core: one of two ranks copies or adds, the other
/// waits.
const COLLECTIVE: f64 = 0.5;

/// Ranks that share cores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Crowd {
    /// Ranks on a machine.
    ranks: usize,
    /// Those that it has cores for.
    cores: usize,
}

impl Crowd {
    /// The ranks of `layout` that are on one machine; none where each has a device of its own.
    pub(crate) fn new(machine: &Machine, layout: &Layout) -> Option<Crowd> {
        let ranks = (layout.pp * layout.zero3 * layout.dp).min(machine.per_node);
        machine.ranks_at_once.map(|cores| Crowd { ranks, cores })
    }

    /// How many times as long everything takes while these shares of the ranks compute, and are in
    /// a gather or a reduction.
    pub(crate) fn slowdown(self, [computing, collecting]: [f64; 2]) -> f64 {
        let [computing, collecting] =
            [computing, collecting].map(|share| share * self.ranks as f64);
        let cores = self.cores as f64;
        // What is a whole number of ranks is not to be rounded up.
        let whole = ((computing - 1e-9) / cores).ceil();
        whole.max((computing + COLLECTIVE * collecting) / cores).max(1.0)
    }

    /// How many times as long as `timeline` it takes: each of its ranks stands for as many as
    /// there are ZeRO-3 ranks and replicas.
    pub(crate) fn stretch(self, timeline: &Timeline) -> f64 {
        let mut changes: Vec<(u64, [i64; 2])> = Vec::new();
        let mut end = 1;
        for span in timeline.ranks.iter().flat_map(|rank| &rank.spans) {
            end = end.max(span.end_ns);
            let change = match (span.lane, span.action.row().partners) {
                (Lane::Compute, _) => [1, 0],
                (Lane::Communication, Partners::Group) => [0, 1],
                (Lane::Copy, _) => continue,
                (Lane::Communication, Partners::NoRank | Partners::Neighbour) => continue,
                // It waits.
                (Lane::Communication, Partners::Everyone) => continue,
            };
            changes.extend([(span.start_ns, change), (span.end_ns, change.map(|n| -n))]);
        }
        changes.sort_unstable();
        let (mut at, mut busy, mut sum) = (0, [0; 2], 0.0);
        for (time, change) in changes.into_iter().chain([(end, [0; 2])]) {
            let shares = busy.map(|n| n as f64 / timeline.ranks.len() as f64);
            sum += (time - at) as f64 * self.slowdown(shares);
            (at, busy) = (time, [busy[0] + change[0], busy[1] + change[1]]);
        }
        sum / end as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zeropp_schedule::ir::Action;

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
        // A gather of one of two ranks takes half a core, which is missed where none is idle.
        let gather = Span {
            lane: Lane::Communication,
            action: Action::AllGather { stage: 0 },
            ..span(4, 8)
        };
        let mut ranks = timeline.ranks.clone();
        ranks[0].spans.push(gather);
        let timeline = Timeline { ranks, ..Timeline::default() };
        let stretch = |ranks, cores| Crowd { ranks, cores }.stretch(&timeline);
        assert_eq!(stretch(2, 3), 1.0);
        assert!((stretch(2, 2) - (8.0 + 2.0 * 1.25) / 10.0).abs() < 1e-12);
    }

    /// A rank computes for 10, and gathers from 4 to 8: with a contention of a half it takes 2
    /// longer, as much as both of two such ranks do; a message takes nothing from compute.
    #[test]
    fn compute_takes_longer_beside_collectives() {
        let span = |lane, action, start_ns, end_ns| Span { lane, action, start_ns, end_ns };
        let work = |from, to| span(Lane::Compute, Action::OptimizerStep, from, to);
        let gather = Action::AllGather { stage: 0 };
        let beside = |action| span(Lane::Communication, action, 4, 8);
        let rank = |spans| RankTimeline { spans, ..RankTimeline::default() };
        let one = rank(vec![work(0, 5), work(5, 7), beside(gather), work(7, 10)]);
        let alone = rank(vec![work(0, 4), beside(gather), work(8, 10)]);
        let of = |ranks: &[&RankTimeline], contention| {
            let ranks = ranks.iter().map(|rank| (*rank).clone()).collect();
            contended(contention, &Timeline { ranks, ..Timeline::default() })
        };
        assert_eq!(of(&[&one], 0.0), 1.0);
        assert!((of(&[&one], 0.5) - 1.2).abs() < 1e-12);
        assert!((of(&[&one, &one], 0.5) - 1.2).abs() < 1e-12);
        assert_eq!(of(&[&alone], 0.5), 1.0);
        let send = beside(Action::Send {
            message: zeropp_schedule::ir::Message::Activation,
            stage: 0,
            micro_batch: 0,
        });
        assert_eq!(of(&[&rank(vec![work(0, 10), send])], 0.5), 1.0);
    }
}
