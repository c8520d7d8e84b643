//! Reads back the Chrome traces that [`chrome`](super::chrome) writes, and no others.
//!
//! The trace of another tool has no placement and other names; it is refused with the first event
//! that is not zeropp's, never read as something it is not.

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::action::{ACTIONS, Names, Operand};
use crate::ir::Action;
use crate::timeline::{Lane, MemoryPoint, MemoryUnit, RankTimeline, SaveSpan, Span, Timeline};

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
struct RawTrace {
    #[serde(rename = "displayTimeUnit")]
    _unit: IgnoredAny,
    #[serde(rename = "otherData")]
    other: TraceHeader,
    #[serde(rename = "traceEvents")]
    events: Vec<TraceEvent>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TraceHeader {
    title: String,
    #[serde(default)]
    facts: Vec<String>,
    /// Traces of earlier versions name no unit; theirs are bytes.
    #[serde(default = "bytes")]
    memory: MemoryUnit,
    placement: Vec<usize>,
    /// Pipeline rank and group of each rank.
    ranks: Vec<(usize, usize)>,
}

fn bytes() -> MemoryUnit {
    MemoryUnit::Bytes
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TraceEvent {
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

/// The arguments of all events; each has some. Those of a span say which action it is.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Args {
    name: Option<String>,
    #[serde(rename = "sort_index")]
    _sort_index: Option<usize>,
    bytes: Option<u64>,
    kind: Option<String>,
    stage: Option<usize>,
    micro_batch: Option<usize>,
    peer: Option<usize>,
    backward_stage: Option<usize>,
    backward_micro_batch: Option<usize>,
    step: Option<u64>,
    blocked_ns: Option<u64>,
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
    let raw: RawTrace =
        serde_json::from_str(text).map_err(|e| TraceError::Syntax(e.to_string()))?;
    let TraceHeader { title, facts, memory: memory_unit, placement, ranks } = raw.other;
    let empty = |(pp, group)| RankTimeline { pp, group, ..Default::default() };
    let ranks = ranks.into_iter().map(empty).collect();
    let mut timeline = Timeline { title, facts, memory_unit, placement, ranks };
    for (index, event) in raw.events.iter().enumerate() {
        add(&mut timeline, event).map_err(|problem| TraceError::Event { index, problem })?;
    }
    for rank in &mut timeline.ranks {
        rank.spans.sort_by_key(|s| (s.start_ns, s.end_ns));
        rank.saves.sort_by_key(|s| (s.start_ns, s.end_ns));
    }
    Ok(timeline)
}

fn add(timeline: &mut Timeline, event: &TraceEvent) -> Result<(), String> {
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
        ("b" | "e", _) if event.cat.as_deref() == Some("step") => {}
        ("C", "memory") => {
            let bytes = event.args.bytes.ok_or("memory without args.bytes")?;
            rank.memory.push(MemoryPoint { at_ns: nanos("ts", event.ts)?, bytes });
        }
        ("X", name) if event.cat.as_deref() == Some("save") => rank.saves.push(save(name, event)?),
        ("X", name) => rank.spans.push(span(name, event, stages)?),
        (phase, name) => return Err(format!("zeropp writes no event {name:?} of phase {phase:?}")),
    }
    Ok(())
}

fn span(name: &str, event: &TraceEvent, stages: usize) -> Result<Span, String> {
    let action = action(&event.args)
        .ok_or_else(|| format!("{name:?}: its args are of no action, such as an F with a stage"))?;
    let lane = match event.cat.as_deref() {
        Some("compute") => Lane::Compute,
        Some("communication") => Lane::Communication,
        Some("copy") => Lane::Copy,
        other => return Err(format!("cat = {other:?}: use compute, communication or copy")),
    };
    if lane != action.lane() {
        return Err(format!("cat = {:?} does not suit {name:?}", event.cat));
    }
    if let Some((stage, _)) = action.touches().find(|(stage, _)| *stage >= stages) {
        return Err(format!("{name:?}: stage {stage} of {stages}"));
    }
    let start_ns = nanos("ts", event.ts)?;
    Ok(Span { lane, action, start_ns, end_ns: start_ns + nanos("dur", event.dur)? })
}

fn save(name: &str, event: &TraceEvent) -> Result<SaveSpan, String> {
    let Args { kind: Some(kind), step: Some(step), blocked_ns: Some(blocked_ns), .. } = &event.args
    else {
        return Err(format!("{name:?}: a save needs args.kind, step and blocked_ns"));
    };
    let in_memory = match kind.as_str() {
        "checkpoint" => false,
        "copy" => true,
        other => return Err(format!("kind = {other:?}: use checkpoint or copy")),
    };
    let start_ns = nanos("ts", event.ts)?;
    let end_ns = start_ns + nanos("dur", event.dur)?;
    Ok(SaveSpan { step: *step, in_memory, start_ns, end_ns, blocked_ns: *blocked_ns })
}

/// µs as nanoseconds; up to 2^53 ns, a hundred days, every nanosecond is its own number.
fn nanos(field: &str, micros: Option<f64>) -> Result<u64, String> {
    match micros.map(|t| (t * 1000.0).round()) {
        Some(ns) if (0.0..=9.007e15).contains(&ns) => Ok(ns as u64),
        _ => Err(format!("{field} = {micros:?}: a time of 0 µs or more is needed")),
    }
}

/// The action that a span's arguments are of.
fn action(args: &Args) -> Option<Action> {
    let words = args.kind.as_deref()?;
    let row = ACTIONS.iter().find(|row| row.words == words)?;
    let stage_and_batch = args.stage.zip(args.micro_batch);
    let place = match row.names {
        Names::Nothing => Operand::Nothing,
        Names::Stage => Operand::Stage(args.stage?),
        Names::MicroBatch => stage_and_batch.map(|(stage, i)| Operand::MicroBatch(stage, i))?,
        Names::Peer => {
            let (stage, micro_batch) = stage_and_batch?;
            Operand::Peer(stage, micro_batch, args.peer?)
        }
        Names::Pair => {
            let backward = args.backward_stage.zip(args.backward_micro_batch)?;
            Operand::Pair(stage_and_batch?, backward)
        }
    };
    Action::new(row.kind, place)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::draw::chrome::write;
    use crate::draw::samples::{any_timeline, gpipe};
    use crate::draw::svg;
    use crate::lower::{LowerOptions, lower};
    use crate::schedules::{Shape, generate};
    use crate::simulate::{Costs, simulate};

    fn text(timeline: &Timeline) -> String {
        let mut text = Vec::new();
        write(timeline, &mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    /// What a trace keeps: everything but the order of a rank's spans and saves, and empty names.
    fn kept(timeline: &Timeline) -> Timeline {
        let mut kept = timeline.clone();
        for (index, rank) in kept.ranks.iter_mut().enumerate() {
            rank.spans.sort_by_key(|s| (s.start_ns, s.end_ns, s.action));
            rank.saves.sort_by_key(|s| (s.start_ns, s.end_ns, s.in_memory));
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

    /// Copies have a thread of their own, which a run without them has not, and so in pictures.
    #[test]
    fn copies_are_drawn_and_read_back() {
        let shape = Shape { pp: 2, virtual_stages: 2, micro_batches: 6, unit: 6 };
        let compact = generate("zeropp", &shape).unwrap();
        let run = |out| {
            let program = lower(&compact, &LowerOptions { out, ..LowerOptions::default() });
            let costs = Costs { file_bytes_per_s: Some(1 << 28), ..Costs::uniform(4, 9, 9, 9, 1) };
            simulate(&program, &costs).unwrap()
        };
        let (with, without) = (run(6), run(0));
        assert_eq!(kept(&read(&text(&with)).unwrap()), kept(&with));
        let svg = |timeline: &Timeline| {
            let mut text = Vec::new();
            svg::write(timeline, &mut text).unwrap();
            String::from_utf8(text).unwrap()
        };
        assert!(text(&with).contains("\"name\":\"copies\"") && svg(&with).contains(">copy out<"));
        assert!(!text(&without).contains("copies") && !svg(&without).contains("copy out"));
    }

    #[test]
    fn a_trace_that_zeropp_would_not_write_is_refused() {
        let good = text(&gpipe(2, 1, 2, 1));
        for (from, to, message) in [
            ("\"title\"", "\"titel\"", "unknown field `titel`"),
            ("\"placement\":[0,1]", "\"placement\":[0,-1]", "invalid value"),
            ("\"kind\":\"F\"", "\"kind\":\"G\"", "its args are of no action"),
            (",\"micro_batch\":0", "", "its args are of no action"),
            ("\"stage\":0", "\"stage\":9", "stage 9 of 2"),
            ("\"cat\":\"compute\"", "\"cat\":\"gpu\"", "use compute, communication or copy"),
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

    /// Earlier versions had no facts, no unit and no steps, and the program's short names.
    #[test]
    fn a_trace_of_an_earlier_version_reads_back() {
        let timeline = gpipe(2, 1, 1, 1);
        let trace = text(&timeline).replace(",\"facts\":[],\"memory\":\"units\"", "");
        let lines = trace.lines().filter(|line| !line.contains("\"cat\":\"step\""));
        let trace = lines.collect::<Vec<_>>().join("\n").replace("all-gather of stage 0", "AG0");
        let back = read(&trace).unwrap();
        assert_eq!(back.memory_unit, MemoryUnit::Bytes);
        assert_eq!(kept(&back).ranks, kept(&timeline).ranks);
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
