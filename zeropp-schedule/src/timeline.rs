//! What happened when: the common form of a simulated and a measured run.

use serde::{Deserialize, Serialize};

use crate::ir::Action;

/// Where on a rank an action takes its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Lane {
    /// F, B, W, BW, R and the optimizer step.
    Compute,
    /// Gathers, reductions, sends and receives.
    Communication,
}

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

impl Action {
    /// The lane this action's span belongs to.
    pub fn lane(&self) -> Lane {
        match self {
            Action::Compute { .. } | Action::Overlap { .. } | Action::OptimizerStep => {
                Lane::Compute
            }
            _ => Lane::Communication,
        }
    }
}

/// Bytes alive on a rank from `at_ns` on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryPoint {
    /// Time.
    pub at_ns: u64,
    /// Bytes (or units, where the costs gave units) until the next point.
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
}

/// A run: every rank's spans.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// What this is, for titles.
    pub title: String,
    /// Pipeline rank of each stage.
    pub placement: Vec<usize>,
    /// One entry a rank. Sends and receives with equal group, message, stage pair and micro-batch
    /// belong together, the n-th to the n-th where a run has several steps.
    pub ranks: Vec<RankTimeline>,
}

impl RankTimeline {
    /// Busy nanoseconds of F, B, W, BW and R (the optimizer step is not part of the pipeline).
    pub fn busy_ns(&self) -> u64 {
        busy_ns(&self.spans)
    }

    /// First start and last end of the pipeline's compute spans.
    pub fn own_span(&self) -> Option<(u64, u64)> {
        own_span(&self.spans)
    }

    /// Idle share between the rank's first and last action, 0 to 1.
    pub fn bubble(&self) -> f64 {
        bubble(&self.spans)
    }
}

/// Idle share between the first and last action of one rank's spans, 0 to 1.
pub fn bubble(spans: &[Span]) -> f64 {
    match own_span(spans) {
        Some((start, end)) if end > start => 1.0 - busy_ns(spans) as f64 / (end - start) as f64,
        _ => 0.0,
    }
}

fn busy_ns(spans: &[Span]) -> u64 {
    pipeline_spans(spans).map(|s| s.end_ns - s.start_ns).sum()
}

fn own_span(spans: &[Span]) -> Option<(u64, u64)> {
    let start = pipeline_spans(spans).map(|s| s.start_ns).min()?;
    let end = pipeline_spans(spans).map(|s| s.end_ns).max()?;
    Some((start, end))
}

fn pipeline_spans(spans: &[Span]) -> impl Iterator<Item = &Span> {
    spans.iter().filter(|s| s.lane == Lane::Compute && s.action != Action::OptimizerStep)
}

impl Timeline {
    /// The bubble averaged over ranks.
    pub fn bubble(&self) -> f64 {
        if self.ranks.is_empty() {
            return 0.0;
        }
        self.ranks.iter().map(RankTimeline::bubble).sum::<f64>() / self.ranks.len() as f64
    }
}
