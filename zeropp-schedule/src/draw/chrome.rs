//! A run as a Chrome trace (the JSON object format), which Perfetto and `chrome://tracing` open:
//! a process per rank, threads for compute and communication, an event per span, an arrow per
//! message, a counter for memory.

use std::{
    collections::HashMap,
    io::{self, BufWriter, Write},
};

use super::{Parts, Placed, arrows::arrows, parts, place};
use crate::timeline::{Lane, RankTimeline, Span, Timeline};

/// Writes `timeline` as a Chrome trace. Times are µs with three decimals, so nanoseconds survive.
///
/// Thread 0 is `compute`, thread 1 `communication`. Viewers draw one event at a time in a
/// thread, so spans that overlap in time open further threads (`communication 2`, …). What a
/// viewer does not show, the placement and each rank's (pp, group), is in `otherData`, so that
/// [`chrome_read`](super::chrome_read) gets the timeline back.
///
/// # Errors
/// What writing to `out` returns.
pub fn write(timeline: &Timeline, out: impl Write) -> io::Result<()> {
    let mut events = Events { out: BufWriter::new(out), first: true };
    let flows = flows(timeline);
    write!(events.out, "{{\"displayTimeUnit\":\"ms\",\"otherData\":{{\"title\":")?;
    serde_json::to_writer(&mut events.out, &timeline.title)?;
    write!(events.out, ",\"placement\":")?;
    serde_json::to_writer(&mut events.out, &timeline.placement)?;
    let places: Vec<(usize, usize)> = timeline.ranks.iter().map(|r| (r.pp, r.group)).collect();
    write!(events.out, ",\"ranks\":")?;
    serde_json::to_writer(&mut events.out, &places)?;
    write!(events.out, "}},\"traceEvents\":[")?;
    for (pid, rank) in timeline.ranks.iter().enumerate() {
        let placed = place(&rank.spans);
        events.describe(pid, rank, &placed)?;
        for p in &placed {
            let span = &rank.spans[p.span];
            events.span(pid, thread(span.lane, p.row), span)?;
            for flow in flows.get(&(pid, p.span)).into_iter().flatten() {
                events.flow(pid, thread(span.lane, p.row), span, *flow)?;
            }
        }
        for point in &rank.memory {
            events.begin()?;
            let (us, ns) = micros(point.at_ns);
            write!(
                events.out,
                "{{\"ph\":\"C\",\"name\":\"memory\",\"pid\":{pid},\"ts\":{us}.{ns:03},\
                 \"args\":{{\"bytes\":{}}}}}",
                point.bytes
            )?;
        }
    }
    writeln!(events.out, "\n]}}")?;
    events.out.flush()
}

/// One end of an arrow.
#[derive(Clone, Copy)]
enum Flow {
    Start(usize),
    End(usize),
}

/// The arrow ends of each (rank, span).
fn flows(timeline: &Timeline) -> HashMap<(usize, usize), Vec<Flow>> {
    let mut flows: HashMap<_, Vec<Flow>> = HashMap::new();
    for (id, arrow) in arrows(timeline).into_iter().enumerate() {
        flows.entry(arrow.from).or_default().push(Flow::Start(id));
        flows.entry(arrow.to).or_default().push(Flow::End(id));
    }
    flows
}

/// Thread number of a row: even for compute, odd for communication.
fn thread(lane: Lane, row: usize) -> usize {
    match lane {
        Lane::Compute => 2 * row,
        Lane::Communication => 2 * row + 1,
    }
}

fn micros(ns: u64) -> (u64, u64) {
    (ns / 1000, ns % 1000)
}

/// The event list as it is written.
struct Events<W: Write> {
    out: BufWriter<W>,
    first: bool,
}

impl<W: Write> Events<W> {
    /// Separates an event from the one before, one a line.
    fn begin(&mut self) -> io::Result<()> {
        let separator: &[u8] = if self.first { b"\n" } else { b",\n" };
        self.first = false;
        self.out.write_all(separator)
    }

    /// Names the process of a rank and its threads, and fixes their order.
    fn describe(&mut self, pid: usize, rank: &RankTimeline, placed: &[Placed]) -> io::Result<()> {
        let name = if rank.name.is_empty() { format!("rank {pid}") } else { rank.name.clone() };
        self.metadata(pid, 0, "process_name", "name", &name)?;
        self.metadata(pid, 0, "process_sort_index", "sort_index", &pid)?;
        let mut sort_index = 0;
        for (lane, label) in [(Lane::Compute, "compute"), (Lane::Communication, "communication")] {
            let of_lane = placed.iter().filter(|p| rank.spans[p.span].lane == lane);
            let rows = of_lane.map(|p| p.row + 1).max().unwrap_or(1);
            for row in 0..rows {
                let tid = thread(lane, row);
                let label =
                    if row == 0 { label.to_string() } else { format!("{label} {}", row + 1) };
                self.metadata(pid, tid, "thread_name", "name", &label)?;
                self.metadata(pid, tid, "thread_sort_index", "sort_index", &sort_index)?;
                sort_index += 1;
            }
        }
        Ok(())
    }

    fn metadata(
        &mut self,
        pid: usize,
        tid: usize,
        event: &str,
        key: &str,
        value: &impl serde::Serialize,
    ) -> io::Result<()> {
        self.begin()?;
        write!(
            self.out,
            "{{\"ph\":\"M\",\"name\":\"{event}\",\"pid\":{pid},\"tid\":{tid},\"args\":{{\"{key}\":"
        )?;
        serde_json::to_writer(&mut self.out, value)?;
        write!(self.out, "}}}}")
    }

    fn span(&mut self, pid: usize, tid: usize, span: &Span) -> io::Result<()> {
        self.begin()?;
        let (us, ns) = micros(span.start_ns);
        let (dur_us, dur_ns) = micros(span.end_ns.saturating_sub(span.start_ns));
        let Parts { kind, stage, micro_batch, backward } = parts(&span.action);
        let category = match span.lane {
            Lane::Compute => "compute",
            Lane::Communication => "communication",
        };
        write!(
            self.out,
            "{{\"ph\":\"X\",\"name\":\"{}\",\"cat\":\"{category}\",\"pid\":{pid},\"tid\":{tid},\
             \"ts\":{us}.{ns:03},\"dur\":{dur_us}.{dur_ns:03},\"args\":{{\"kind\":\"{kind}\"",
            span.action
        )?;
        let backward_stage = backward.map(|b| b.0);
        let backward_micro_batch = backward.map(|b| b.1);
        for (key, value) in [
            ("stage", stage),
            ("micro_batch", micro_batch),
            ("backward_stage", backward_stage),
            ("backward_micro_batch", backward_micro_batch),
        ] {
            if let Some(value) = value {
                write!(self.out, ",\"{key}\":{value}")?;
            }
        }
        write!(self.out, "}}}}")
    }

    /// An end of an arrow. A viewer hangs it on the slice that is open at that time in that
    /// thread, so it follows the slice's event and carries the slice's start.
    fn flow(&mut self, pid: usize, tid: usize, span: &Span, flow: Flow) -> io::Result<()> {
        self.begin()?;
        let (us, ns) = micros(span.start_ns);
        let (phase, id, bind) = match flow {
            Flow::Start(id) => ("s", id, ""),
            Flow::End(id) => ("f", id, "\"bp\":\"e\","),
        };
        write!(
            self.out,
            "{{\"ph\":\"{phase}\",{bind}\"name\":\"message\",\"cat\":\"message\",\"id\":{id},\
             \"pid\":{pid},\"tid\":{tid},\"ts\":{us}.{ns:03}}}"
        )
    }
}

#[cfg(test)]
mod tests {
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
        for e in trace.phase("X") {
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
                wanted.push((pid, lane, s.action.to_string(), s.start_ns, s.end_ns - s.start_ns));
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
            let (stage, i) = name[2..].split_once('.').unwrap();
            let stage: usize = stage.parse().unwrap();
            let wanted = if name.starts_with(">A") {
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
}
