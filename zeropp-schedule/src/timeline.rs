//! What happened when: the common form of a simulated and a measured run.

use serde::{Deserialize, Serialize};

pub use crate::action::Lane;
use crate::ir::Action;

/// One action with its times. Times are nanoseconds from the start of the run or step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// The lane.
    pub lane: Lane,
    /// The action.
    pub action: Action,
    /// Start.
    pub start_ns: u64,
    /// End; equal to the start where an action takes no time of its own (free).
    pub end_ns: u64,
}

/// A rank's part of a save: the state of a step on its way to a checkpoint, or to a copy in memory.
/// It goes on beside the program's actions, and is none of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveSpan {
    /// Steps that the state has behind it.
    pub step: u64,
    /// Whether it becomes a copy in memory.
    pub in_memory: bool,
    /// When the rank handed the state over.
    pub start_ns: u64,
    /// When all of it was written, so that it might change.
    pub end_ns: u64,
    /// Nanoseconds that this kept the rank from its work.
    pub blocked_ns: u64,
}

/// Bytes alive on a rank from `at_ns` on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryPoint {
    /// Time.
    pub at_ns: u64,
    /// Bytes, or what else [`Timeline::memory_unit`] says, until the next point.
    pub bytes: u64,
}

/// One rank's part of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankTimeline {
    /// Label, for example `pp 0 · zero3 3 · dp 0`.
    pub name: String,
    /// Pipeline rank.
    pub pp: usize,
    /// Which pipeline this rank is part of: equal for the ranks that have the same ZeRO-3 and
    /// replica places, which are the ones that send to each other. 0 where there is one pipeline.
    pub group: usize,
    /// Spans in the order in which the rank's program has them.
    pub spans: Vec<Span>,
    /// Activation memory over time; empty where it was not followed.
    pub memory: Vec<MemoryPoint>,
    /// Saves in the order in which they began.
    pub saves: Vec<SaveSpan>,
}

/// What the numbers of memory count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryUnit {
    /// Units of a cost model, of any size.
    #[default]
    Units,
    /// Bytes.
    Bytes,
}

impl MemoryUnit {
    /// An amount with its unit: `48 units`, `1.50 GiB`.
    pub fn text(self, amount: u64) -> String {
        let of = |size: u64| amount as f64 / size as f64;
        match (self, amount) {
            (MemoryUnit::Units, _) => format!("{amount} units"),
            (MemoryUnit::Bytes, 0..1024) => format!("{amount} B"),
            (MemoryUnit::Bytes, 1024..1_048_576) => format!("{:.1} KiB", of(1 << 10)),
            (MemoryUnit::Bytes, 1_048_576..1_073_741_824) => format!("{:.1} MiB", of(1 << 20)),
            (MemoryUnit::Bytes, _) => format!("{:.2} GiB", of(1 << 30)),
        }
    }
}

/// In the title of a run whose spans are of slices of samples.
pub const IN_SLICES: &str = "samples in slices";

/// A run: every rank's spans.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// What this is, for titles.
    pub title: String,
    /// What belongs below the title, a line each: shape, costs, version and command.
    pub facts: Vec<String>,
    /// What the ranks' memory counts.
    pub memory_unit: MemoryUnit,
    /// Pipeline rank of each stage.
    pub placement: Vec<usize>,
    /// One entry a rank. Sends and receives with equal group, message, stage pair and micro-batch
    /// belong together, the n-th to the n-th where a run has several steps.
    pub ranks: Vec<RankTimeline>,
}

/// When one rank computed in a step (F, B, W, BW and R; the optimizer step is not part of the
/// pipeline), and for how long: what every bubble is made of.
///
/// One name means one thing everywhere:
/// * *bubble*: idle share of all ranks from the first start of any to the last end of any;
/// * *bubble_own_span*: idle share of a rank between its own first start and last end, averaged;
/// * *bubble_step*: as *bubble*, from one step's first action to the next one's, so that the
///   optimizer and the reductions count as idle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Computed {
    /// First start.
    pub start_ns: u64,
    /// Last end.
    pub end_ns: u64,
    /// Busy in between.
    pub busy_ns: u64,
}

impl Computed {
    /// Of the spans of one rank and step; `None` where it computes nothing.
    pub fn of<'a>(spans: impl IntoIterator<Item = &'a Span>) -> Option<Computed> {
        let computes = spans.into_iter().filter(|s| is_pipeline(s));
        computes.fold(None, |all: Option<Computed>, s| {
            let all =
                all.unwrap_or(Computed { start_ns: s.start_ns, end_ns: s.end_ns, busy_ns: 0 });
            Some(Computed {
                start_ns: all.start_ns.min(s.start_ns),
                end_ns: all.end_ns.max(s.end_ns),
                busy_ns: all.busy_ns + (s.end_ns - s.start_ns),
            })
        })
    }

    /// Its `bubble_own_span`, 0 to 1.
    pub fn bubble_own_span(&self) -> f64 {
        idle_share_ns(self.busy_ns, self.end_ns - self.start_ns)
    }
}

/// The `bubble` of one step, 0 to 1, from what every rank computed.
pub fn bubble(ranks: &[Computed]) -> f64 {
    idle_share_ns(ranks.iter().map(|r| r.busy_ns).sum(), makespan(ranks) * ranks.len() as u64)
}

/// The `bubble_own_span` of one step, averaged over ranks, 0 to 1.
pub fn bubble_own_span(ranks: &[Computed]) -> f64 {
    ranks.iter().map(Computed::bubble_own_span).sum::<f64>() / ranks.len().max(1) as f64
}

/// The `bubble_step` of a step that ends, with the next one's start, `step_ns` after its own.
pub fn bubble_step(ranks: &[Computed], step_ns: u64) -> f64 {
    idle_share_ns(ranks.iter().map(|r| r.busy_ns).sum(), step_ns * ranks.len() as u64)
}

fn makespan(ranks: &[Computed]) -> u64 {
    let start = ranks.iter().map(|r| r.start_ns).min().unwrap_or(0);
    ranks.iter().map(|r| r.end_ns).max().unwrap_or(0) - start
}

fn idle_share_ns(busy: u64, all: u64) -> f64 {
    idle_share(busy.into(), all.into())
}

/// What is not `busy` of `all`, 0 to 1.
pub(crate) fn idle_share(busy: u128, all: u128) -> f64 {
    if all == 0 { 0.0 } else { (1.0 - busy as f64 / all as f64).max(0.0) }
}

fn is_pipeline(span: &Span) -> bool {
    span.lane == Lane::Compute && span.action != Action::OptimizerStep
}

impl RankTimeline {
    /// Busy nanoseconds of F, B, W, BW and R.
    pub fn busy_ns(&self) -> u64 {
        Computed::of(&self.spans).map_or(0, |c| c.busy_ns)
    }

    /// First start and last end of the pipeline's compute spans.
    pub fn own_span(&self) -> Option<(u64, u64)> {
        Computed::of(&self.spans).map(|c| (c.start_ns, c.end_ns))
    }

    /// What it computed in each step.
    fn steps(&self) -> Vec<Computed> {
        let steps = self.spans.split(|s| s.action == Action::OptimizerStep);
        steps.filter_map(Computed::of).collect()
    }
}

impl Timeline {
    /// The last end of any rank's span, ns; 0 without any.
    pub fn end_ns(&self) -> u64 {
        let spans = self.ranks.iter().flat_map(|rank| &rank.spans);
        spans.map(|span| span.end_ns).max().unwrap_or(0)
    }

    /// The `bubble`, 0 to 1; over several steps the idle share of all of them together.
    pub fn bubble(&self) -> f64 {
        self.bubbles().iter().sum::<f64>() / self.ranks.len().max(1) as f64
    }

    /// Each rank's part of the `bubble`: its idle share from the first start to the last end of any
    /// rank, 0 to 1. Their average is the `bubble`.
    pub fn bubbles(&self) -> Vec<f64> {
        let steps: Vec<Vec<Computed>> = self.ranks.iter().map(RankTimeline::steps).collect();
        let count = steps.iter().map(Vec::len).max().unwrap_or(0);
        let in_step = |i: usize| -> Vec<Computed> {
            steps.iter().filter_map(|rank| rank.get(i).copied()).collect()
        };
        let length: u64 = (0..count).map(|i| makespan(&in_step(i))).sum();
        let busy = |rank: &Vec<Computed>| rank.iter().map(|c| c.busy_ns).sum();
        steps.iter().map(|rank| idle_share_ns(busy(rank), length)).collect()
    }

    /// The `bubble_step` of all steps but the last, whose next one is not there; none of a run of a
    /// single step. Steps that others are laid out apart from, as a trace's may be, count as they
    /// stand.
    pub fn bubble_step(&self) -> Option<f64> {
        let steps: Vec<Vec<Computed>> = self.ranks.iter().map(RankTimeline::steps).collect();
        let count = steps.iter().map(Vec::len).min().filter(|count| *count > 1)?;
        let start = |i: usize| steps.iter().map(|rank| rank[i].start_ns).min().unwrap_or(0);
        let all = u128::from(start(count - 1).saturating_sub(start(0))) * steps.len() as u128;
        let busy = steps.iter().flat_map(|rank| &rank[..count - 1]);
        Some(idle_share(busy.map(|computed| u128::from(computed.busy_ns)).sum(), all))
    }

    /// The `bubble_own_span`, averaged over ranks and steps, 0 to 1.
    pub fn bubble_own_span(&self) -> f64 {
        bubble_own_span(&self.ranks.iter().flat_map(RankTimeline::steps).collect::<Vec<_>>())
    }

    /// The largest `bubble_own_span` of a rank in a step, 0 to 1.
    pub fn bubble_own_span_max(&self) -> f64 {
        let steps = self.ranks.iter().flat_map(RankTimeline::steps);
        steps.map(|c| c.bubble_own_span()).fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Compute;

    fn span(action: Action, start_ns: u64, end_ns: u64) -> Span {
        Span { lane: Lane::Compute, action, start_ns, end_ns }
    }

    fn rank(spans: &[(u64, u64)]) -> RankTimeline {
        let compute = |(start, end): &(u64, u64)| match end - start {
            0 => span(Action::OptimizerStep, *start, *end),
            _ => span(Action::compute(Compute::F, 0, 0), *start, *end),
        };
        RankTimeline { spans: spans.iter().map(compute).collect(), ..Default::default() }
    }

    #[test]
    fn each_bubble_is_what_its_name_says() {
        // Busy 6 of 10 and 5 of 10; of their own spans 6 of 8 and 5 of 6.
        let one = [rank(&[(0, 4), (6, 8)]), rank(&[(4, 7), (8, 10)])];
        let timeline = Timeline { ranks: one.to_vec(), ..Timeline::default() };
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} and {b}");
        close(timeline.bubble(), 0.45);
        close(timeline.bubbles()[0], 0.4);
        close(timeline.bubble_own_span(), (2.0 / 8.0 + 1.0 / 6.0) / 2.0);
        close(timeline.bubble_own_span_max(), 0.25);
        let computed: Vec<_> = one.iter().filter_map(|r| Computed::of(&r.spans)).collect();
        close(bubble(&computed), timeline.bubble());
        close(bubble_own_span(&computed), timeline.bubble_own_span());
        close(bubble_step(&computed, 22), 0.75);
    }

    #[test]
    fn memory_is_shown_with_its_unit() {
        for (unit, amount, text) in [
            (MemoryUnit::Units, 20_000, "20000 units"),
            (MemoryUnit::Bytes, 20, "20 B"),
            (MemoryUnit::Bytes, 1536, "1.5 KiB"),
            (MemoryUnit::Bytes, 3 << 19, "1.5 MiB"),
            (MemoryUnit::Bytes, 3 << 29, "1.50 GiB"),
        ] {
            assert_eq!(unit.text(amount), text);
        }
    }

    #[test]
    fn gaps_between_steps_are_not_bubble() {
        let ranks = vec![rank(&[(0, 4), (5, 5), (105, 109)]), rank(&[(0, 2), (5, 5), (107, 109)])];
        let timeline = Timeline { ranks, ..Timeline::default() };
        assert_eq!(timeline.bubbles(), [0.0, 0.5]);
        assert_eq!((timeline.bubble(), timeline.bubble_own_span()), (0.25, 0.0));
        assert_eq!(Timeline::default().bubble(), 0.0);
    }
}
