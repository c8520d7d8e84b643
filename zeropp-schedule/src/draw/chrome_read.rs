//! Reads back the Chrome traces that [`chrome`](super::chrome) writes, and no others.
//!
//! The trace of another tool has no placement and other names; it is refused with the first event
//! that is not zeropp's, never read as something it is not.

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::ir::{Action, Compute, Message, Task};
use crate::timeline::{Lane, MemoryPoint, RankTimeline, Span, Timeline};

/// A text that is no trace of zeropp.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// Not JSON, or not the keys of a trace.
    #[error("not a trace of zeropp: {0}")]
    Syntax(String),
    /// An event is wrong.
    #[error("traceEvents[{index}]: {problem}")]
    Event {
        /// Its index, from 0.
        index: usize,
        /// What was found and what would work.
        problem: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    #[serde(rename = "displayTimeUnit")]
    _unit: IgnoredAny,
    #[serde(rename = "otherData")]
    other: Other,
    #[serde(rename = "traceEvents")]
    events: Vec<Event>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Other {
    title: String,
    placement: Vec<usize>,
    /// Pipeline rank and group of each rank.
    ranks: Vec<(usize, usize)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Event {
    ph: String,
    name: String,
    pid: usize,
    #[serde(rename = "tid")]
    _tid: Option<usize>,
    cat: Option<String>,
    ts: Option<f64>,
    dur: Option<f64>,
    #[serde(rename = "id")]
    _id: Option<usize>,
    #[serde(rename = "bp")]
    _bind: Option<IgnoredAny>,
    #[serde(default)]
    args: Args,
}

/// The arguments of all events; each has some. Those of a span repeat what its name says.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Args {
    name: Option<String>,
    #[serde(rename = "sort_index")]
    _sort_index: Option<usize>,
    bytes: Option<u64>,
    #[serde(rename = "kind")]
    _kind: Option<String>,
    #[serde(rename = "stage")]
    _stage: Option<usize>,
    #[serde(rename = "micro_batch")]
    _micro_batch: Option<usize>,
    #[serde(rename = "backward_stage")]
    _backward_stage: Option<usize>,
    #[serde(rename = "backward_micro_batch")]
    _backward_micro_batch: Option<usize>,
}

/// True where `text` has the look of a Chrome trace and not of a schedule.
pub fn is_trace(text: &str) -> bool {
    #[derive(Deserialize)]
    struct Probe {
        #[serde(rename = "traceEvents")]
        _events: IgnoredAny,
    }
    // A list would do for a struct, too.
    text.trim_start().starts_with('{') && serde_json::from_str::<Probe>(text).is_ok()
}

/// Reads a trace. The spans of a rank come in order of start, which is the order of its program
/// within each kind of action.
///
/// # Errors
/// Names the first event that [`chrome::write`](super::chrome::write) would not have written.
pub fn read(text: &str) -> Result<Timeline, TraceError> {
    let raw: Raw = serde_json::from_str(text).map_err(|e| TraceError::Syntax(e.to_string()))?;
    let Other { title, placement, ranks } = raw.other;
    let empty = |(pp, group)| RankTimeline { pp, group, ..Default::default() };
    let mut timeline = Timeline { title, placement, ranks: ranks.into_iter().map(empty).collect() };
    for (index, event) in raw.events.iter().enumerate() {
        add(&mut timeline, event).map_err(|problem| TraceError::Event { index, problem })?;
    }
    for rank in &mut timeline.ranks {
        rank.spans.sort_by_key(|s| (s.start_ns, s.end_ns));
    }
    Ok(timeline)
}

fn add(timeline: &mut Timeline, event: &Event) -> Result<(), String> {
    let (stages, ranks) = (timeline.placement.len(), timeline.ranks.len());
    let Some(rank) = timeline.ranks.get_mut(event.pid) else {
        return Err(format!("pid = {}: otherData has ranks 0..{ranks}", event.pid));
    };
    match (event.ph.as_str(), event.name.as_str()) {
        ("M", "process_name") => {
            rank.name = event.args.name.clone().ok_or("process_name without args.name")?;
        }
        ("M", "process_sort_index" | "thread_name" | "thread_sort_index") => {}
        ("s" | "f", "message") => {}
        ("C", "memory") => {
            let bytes = event.args.bytes.ok_or("memory without args.bytes")?;
            rank.memory.push(MemoryPoint { at_ns: nanos("ts", event.ts)?, bytes });
        }
        ("X", name) => rank.spans.push(span(name, event, stages)?),
        (phase, name) => return Err(format!("zeropp writes no event {name:?} of phase {phase:?}")),
    }
    Ok(())
}

fn span(name: &str, event: &Event, stages: usize) -> Result<Span, String> {
    let action =
        action(name).ok_or_else(|| format!("{name:?} is no action, such as 0F1 or AG0"))?;
    let lane = match event.cat.as_deref() {
        Some("compute") => Lane::Compute,
        Some("communication") => Lane::Communication,
        other => return Err(format!("cat = {other:?}: use compute or communication")),
    };
    if lane != action.lane() {
        return Err(format!("cat = {:?} does not suit {name:?}", event.cat));
    }
    if let Some(stage) = stages_of(&action).into_iter().flatten().find(|s| *s >= stages) {
        return Err(format!("{name:?}: stage {stage} of {stages}"));
    }
    let start_ns = nanos("ts", event.ts)?;
    Ok(Span { lane, action, start_ns, end_ns: start_ns + nanos("dur", event.dur)? })
}

/// µs as nanoseconds; up to 2^53 ns, a hundred days, every nanosecond is its own number.
fn nanos(field: &str, micros: Option<f64>) -> Result<u64, String> {
    match micros.map(|t| (t * 1000.0).round()) {
        Some(ns) if (0.0..=9.007e15).contains(&ns) => Ok(ns as u64),
        _ => Err(format!("{field} = {micros:?}: a time of 0 µs or more is needed")),
    }
}

fn stages_of(action: &Action) -> [Option<usize>; 2] {
    match *action {
        Action::Compute { stage, .. }
        | Action::Send { stage, .. }
        | Action::Recv { stage, .. }
        | Action::AllGather { stage }
        | Action::Free { stage }
        | Action::ReduceScatter { stage }
        | Action::ReplicaReduce { stage } => [Some(stage), None],
        Action::Overlap { forward, backward } => [Some(forward.0), Some(backward.0)],
        Action::OptimizerStep => [None, None],
    }
}

/// Reads the spelling of [`Action`]'s `Display`.
fn action(name: &str) -> Option<Action> {
    if name == "STEP" {
        return Some(Action::OptimizerStep);
    }
    for (prefix, of_stage) in [
        ("AG", (|stage| Action::AllGather { stage }) as fn(usize) -> Action),
        ("FREE", |stage| Action::Free { stage }),
        ("RS", |stage| Action::ReduceScatter { stage }),
        ("AR", |stage| Action::ReplicaReduce { stage }),
    ] {
        if let Some(stage) = name.strip_prefix(prefix) {
            return number(stage).map(of_stage);
        }
    }
    if let Some(sent) = name.strip_prefix('>') {
        let (message, stage, micro_batch) = message(sent)?;
        return Some(Action::Send { message, stage, micro_batch });
    }
    if let Some(received) = name.strip_prefix('<') {
        let (message, stage, micro_batch) = message(received)?;
        return Some(Action::Recv { message, stage, micro_batch });
    }
    if let Some((forward, backward)) = name.split_once('&') {
        return Action::overlap(compute(forward)?, compute(backward)?);
    }
    compute(name).map(Action::from)
}

/// `A2.0`: message, stage and micro-batch.
fn message(text: &str) -> Option<(Message, usize, usize)> {
    let (message, rest) = match (text.strip_prefix('A'), text.strip_prefix('G')) {
        (Some(rest), _) => (Message::Activation, rest),
        (_, Some(rest)) => (Message::Gradient, rest),
        _ => return None,
    };
    let (stage, micro_batch) = rest.split_once('.')?;
    Some((message, number(stage)?, number(micro_batch)?))
}

/// `2BW0`: kind, stage and micro-batch.
fn compute(text: &str) -> Option<Task> {
    let start = text.find(|c: char| c.is_ascii_uppercase())?;
    let (stage, rest) = text.split_at(start);
    let end = rest.find(|c: char| c.is_ascii_digit())?;
    let (kind, micro_batch) = rest.split_at(end);
    let kind = match kind {
        "F" => Compute::F,
        "B" => Compute::B,
        "W" => Compute::W,
        "BW" => Compute::BW,
        "R" => Compute::R,
        _ => return None,
    };
    Some(Task { kind, stage: number(stage)?, micro_batch: number(micro_batch)? })
}

/// Digits only: `parse` alone would take a sign.
fn number(text: &str) -> Option<usize> {
    if text.bytes().all(|b| b.is_ascii_digit()) { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::draw::chrome::write;
    use crate::draw::samples::{any_timeline, gpipe};

    fn text(timeline: &Timeline) -> String {
        let mut text = Vec::new();
        write(timeline, &mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    /// What a trace keeps: everything but the order of a rank's spans, and empty names.
    fn kept(timeline: &Timeline) -> Timeline {
        let mut kept = timeline.clone();
        for (index, rank) in kept.ranks.iter_mut().enumerate() {
            rank.spans.sort_by_key(|s| (s.start_ns, s.end_ns, s.action));
            if rank.name.is_empty() {
                rank.name = format!("rank {index}");
            }
        }
        kept
    }

    #[test]
    fn a_measured_run_reads_back() {
        for (pp, groups, m, steps) in [(1, 1, 3, 1), (2, 1, 3, 2), (4, 3, 5, 2)] {
            let timeline = gpipe(pp, groups, m, steps);
            let trace = text(&timeline);
            assert!(is_trace(&trace));
            assert_eq!(kept(&read(&trace).unwrap()), kept(&timeline));
        }
        assert!(!is_trace("{\"kind\": \"1f1b\"}") && !is_trace("0F0"));
    }

    #[test]
    fn every_action_reads_back_and_nothing_else_does() {
        use crate::ir::Message::{Activation, Gradient};
        for spelled in [
            Action::compute(Compute::F, 0, 12),
            Action::compute(Compute::B, 3, 0),
            Action::compute(Compute::W, 10, 1),
            Action::compute(Compute::BW, 1, 1),
            Action::compute(Compute::R, 1, 2),
            Action::Overlap { forward: (3, 4), backward: (5, 6) },
            Action::Send { message: Activation, stage: 2, micro_batch: 10 },
            Action::Recv { message: Gradient, stage: 2, micro_batch: 10 },
            Action::AllGather { stage: 7 },
            Action::Free { stage: 7 },
            Action::ReduceScatter { stage: 7 },
            Action::ReplicaReduce { stage: 7 },
            Action::OptimizerStep,
        ] {
            assert_eq!(action(&spelled.to_string()), Some(spelled));
        }
        for junk in [
            "", "F", "0F", "F0", "0X1", "0F1 ", "+0F1", "0F+1", "AG", "AG-1", "AG1x", ">A1",
            ">B1.0", "0F1&0B1", "0BW1&0F1", "STEP1", "<A.1",
        ] {
            assert_eq!(action(junk), None, "{junk}");
        }
    }

    #[test]
    fn a_trace_that_zeropp_would_not_write_is_refused() {
        let good = text(&gpipe(2, 1, 2, 1));
        for (from, to, message) in [
            ("\"title\"", "\"titel\"", "unknown field `titel`"),
            ("\"placement\":[0,1]", "\"placement\":[0,-1]", "invalid value"),
            ("\"0F0\"", "\"0G0\"", "\"0G0\" is no action"),
            ("\"0F0\"", "\"9F0\"", "stage 9 of 2"),
            ("\"cat\":\"compute\"", "\"cat\":\"gpu\"", "use compute or communication"),
            ("\"cat\":\"compute\"", "\"cat\":\"communication\"", "does not suit"),
            ("\"dur\":1000.001", "\"dur\":-1", "dur = Some(-1.0)"),
            ("\"ph\":\"X\"", "\"ph\":\"B\"", "of phase \"B\""),
            ("\"pid\":1", "\"pid\":7", "pid = 7"),
            ("\"process_name\"", "\"process_title\"", "no event \"process_title\""),
        ] {
            let bad = good.replacen(from, to, 1);
            assert_ne!(bad, good, "{from} is not in the trace");
            let error = read(&bad).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 200,
            failure_persistence: None,
            ..Default::default()
        })]

        #[test]
        fn any_timeline_reads_back(timeline in any_timeline()) {
            let timeline = Timeline { placement: vec![0; 4], ..timeline };
            prop_assert_eq!(kept(&read(&text(&timeline)).unwrap()), kept(&timeline));
        }
    }
}
