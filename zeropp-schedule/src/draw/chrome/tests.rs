use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::draw::samples::{any_timeline, gpipe};

/// A trace read back; times in ns.
struct Trace {
    events: Vec<Value>,
}

impl Trace {
    fn of(timeline: &Timeline) -> Trace {
        let mut text = Vec::new();
        write(timeline, &mut text).unwrap();
        let trace: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(trace["otherData"]["title"], timeline.title.as_str());
        Trace { events: trace["traceEvents"].as_array().unwrap().clone() }
    }

    fn phase<'a>(&'a self, phase: &'a str) -> impl Iterator<Item = &'a Value> {
        self.events.iter().filter(move |e| e["ph"] == phase)
    }
}

fn ns(value: &Value) -> u64 {
    (value.as_f64().unwrap() * 1000.0).round() as u64
}

fn number(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

fn check_spans(timeline: &Timeline, trace: &Trace) {
    let mut threads: BTreeMap<(usize, usize), Vec<(u64, u64)>> = BTreeMap::new();
    let mut written = Vec::new();
    let saves: usize = timeline.ranks.iter().map(|rank| rank.saves.len()).sum();
    assert_eq!(trace.phase("X").filter(|e| e["cat"] == "save").count(), saves);
    for e in trace.phase("X").filter(|e| e["cat"] != "save") {
        let (start, duration) = (ns(&e["ts"]), ns(&e["dur"]));
        let place = (number(&e["pid"]), number(&e["tid"]));
        threads.entry(place).or_default().push((start, start + duration));
        let lane = e["cat"].as_str().unwrap().to_string();
        written.push((place.0, lane, e["name"].as_str().unwrap().to_string(), start, duration));
    }
    let mut wanted = Vec::new();
    for (pid, rank) in timeline.ranks.iter().enumerate() {
        for s in &rank.spans {
            let lane = format!("{:?}", s.lane).to_lowercase();
            wanted.push((pid, lane, name(&s.action), s.start_ns, s.end_ns - s.start_ns));
        }
    }
    written.sort();
    wanted.sort();
    assert_eq!(written, wanted, "every span once");
    for (thread, spans) in threads {
        for pair in spans.windows(2) {
            assert!(pair[0].0 <= pair[1].0, "time goes on in {thread:?}");
            assert!(pair[0].1 <= pair[1].0, "no overlap in {thread:?}");
        }
    }
}

/// Every arrow has one start and one end, and both hang on a slice that came before them.
fn check_arrows(trace: &Trace) -> usize {
    let mut ends: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
    let mut last_slice: BTreeMap<(usize, usize), u64> = BTreeMap::new();
    for e in &trace.events {
        let thread = || (number(&e["pid"]), number(&e["tid"]));
        match e["ph"].as_str().unwrap() {
            "X" => {
                last_slice.insert(thread(), ns(&e["ts"]));
            }
            "s" => ends.entry(number(&e["id"])).or_default().0 += 1,
            "f" => ends.entry(number(&e["id"])).or_default().1 += 1,
            _ => {}
        }
        if e["ph"] == "s" || e["ph"] == "f" {
            assert_eq!(last_slice.get(&thread()), Some(&ns(&e["ts"])));
        }
    }
    assert!(ends.values().all(|n| *n == (1, 1)), "{ends:?}");
    ends.len()
}

#[test]
fn a_run_has_every_span_arrow_and_point() {
    for (pp, groups, m, steps) in [(1, 1, 3, 1), (2, 1, 3, 2), (4, 3, 5, 2)] {
        let timeline = gpipe(pp, groups, m, steps);
        let trace = Trace::of(&timeline);
        check_spans(&timeline, &trace);
        assert_eq!(check_arrows(&trace), 2 * (pp - 1) * groups * m * steps);
        let points: usize = timeline.ranks.iter().map(|r| r.memory.len()).sum();
        assert_eq!(trace.phase("C").count(), points);
    }
}

#[test]
fn every_step_is_marked_from_its_first_action_to_its_optimizer_step() {
    let timeline = gpipe(2, 1, 3, 2);
    let trace = Trace::of(&timeline);
    let mut marks = Vec::new();
    for phase in ["b", "e"] {
        for e in trace.phase(phase) {
            marks.push((number(&e["pid"]), e["name"].as_str().unwrap(), phase, ns(&e["ts"])));
        }
    }
    marks.sort();
    let mut wanted = Vec::new();
    for (pid, rank) in timeline.ranks.iter().enumerate() {
        let is_step = |s: &Span| s.action == Action::OptimizerStep;
        for (spans, step) in rank.spans.split_inclusive(is_step).zip(["step 1", "step 2"]) {
            let start = spans.iter().map(|s| s.start_ns).min().unwrap();
            wanted.push((pid, step, "b", start));
            wanted.push((pid, step, "e", spans.last().unwrap().end_ns));
        }
    }
    wanted.sort();
    assert_eq!(marks, wanted);
    assert_eq!(marks.len(), 8);
}

#[test]
fn messages_and_collectives_are_named_in_words() {
    use crate::ir::Message::{Activation, Gradient};
    for (action, words) in [
        (Action::compute(crate::ir::Compute::BW, 1, 2), "1BW2"),
        (
            Action::Send { message: Gradient, stage: 2, micro_batch: 7 },
            "send gradient of stage 2, micro-batch 7",
        ),
        (
            Action::Recv { message: Activation, stage: 1, micro_batch: 0 },
            "receive activation for stage 1, micro-batch 0",
        ),
        (Action::AllGather { stage: 3 }, "all-gather of stage 3"),
        (Action::OptimizerStep, "optimizer step"),
        (Action::Validate, "validate update"),
    ] {
        assert_eq!(name(&action), words);
    }
}

#[test]
fn arrows_stay_in_their_group_and_step_and_end_at_the_consumer() {
    let timeline = gpipe(3, 2, 2, 2);
    let trace = Trace::of(&timeline);
    let mut slice: BTreeMap<(usize, usize), (u64, String)> = BTreeMap::new();
    let mut starts = BTreeMap::new();
    let mut ends = BTreeMap::new();
    for e in &trace.events {
        let thread = (number(&e["pid"]), e["tid"].as_u64().unwrap_or(0) as usize);
        let name = e["name"].as_str().unwrap().to_string();
        match e["ph"].as_str().unwrap() {
            "X" => drop(slice.insert(thread, (ns(&e["ts"]), name))),
            "s" => drop(starts.insert(number(&e["id"]), (thread.0, slice[&thread].clone()))),
            "f" => drop(ends.insert(number(&e["id"]), (thread.0, slice[&thread].clone()))),
            _ => {}
        }
    }
    for (id, (rank, (sent, name))) in &starts {
        let (to, (used, consumer)) = &ends[id];
        let (from, to) = (&timeline.ranks[*rank], &timeline.ranks[*to]);
        assert_eq!(from.group, to.group);
        assert!(sent < used, "{name} at {sent} is used at {used}");
        let (place, i) = name.split_once(", micro-batch ").unwrap();
        let stage: usize = place.rsplit(' ').next().unwrap().parse().unwrap();
        let wanted = if name.starts_with("send activation of stage ") {
            format!("{}F{i}", stage + 1)
        } else {
            format!("{}B{i}", stage - 1)
        };
        assert_eq!(*consumer, wanted);
    }
}

#[test]
fn an_arrow_ends_at_the_receive_where_nothing_consumes() {
    let mut timeline = gpipe(2, 1, 1, 1);
    timeline.ranks[1].spans.retain(|s| s.lane == Lane::Communication);
    let trace = Trace::of(&timeline);
    let mut ends: Vec<_> =
        trace.phase("f").map(|e| (number(&e["pid"]), number(&e["tid"]) % 2)).collect();
    ends.sort();
    // The gradient ends at rank 0's B, the activation at rank 1's receive.
    assert_eq!(ends, [(0, 0), (1, 1)]);
}

#[test]
fn names_of_processes_and_threads() {
    let timeline = gpipe(2, 1, 2, 1);
    let trace = Trace::of(&timeline);
    let names: Vec<_> = trace
        .phase("M")
        .filter(|e| e["name"] == "process_name" || e["name"] == "thread_name")
        .map(|e| e["args"]["name"].as_str().unwrap())
        .collect();
    assert_eq!(names[..3], ["pp 0 · zero3 0", "compute", "communication"]);
    assert!(names.contains(&"pp 1 · zero3 0"));
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 200,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn any_timeline_is_a_sound_trace(timeline in any_timeline()) {
        let trace = Trace::of(&timeline);
        check_spans(&timeline, &trace);
        check_arrows(&trace);
    }
}
