//! A run as a Chrome trace (the JSON object format), which Perfetto and `chrome://tracing` open:
//! a process per rank, threads for compute, communication and copies, an event per span, an arrow
//! per message, a counter for memory, a row of steps, rows of saves.

use std::{
    collections::HashMap,
    io::{self, BufWriter, Write},
};

use super::{Placed, arrows::arrows, place};
use crate::action::{ActionRow, Operand};
use crate::ir::Action;
use crate::timeline::{Lane, RankTimeline, SaveSpan, Span, Timeline};

/// Thread of the saves, after any that actions may need.
const SAVES: usize = 1 << 16;
/// Thread of copies out and in, after those of compute and communication.
const COPIES: usize = 1 << 15;

/// Writes `timeline` as a Chrome trace. Times are µs with three decimals, so nanoseconds survive.
///
/// Thread 0 is `compute`, thread 1 `communication`; copies have one where there are any. Viewers
/// draw one event at a time in a thread, so spans that overlap in time open further threads
/// (`communication 2`, …). What a viewer does not show, facts, placement and each rank's
/// (pp, group), is in `otherData`, so that [`chrome_read`](super::chrome_read) gets the timeline
/// back.
///
/// # Errors
/// What writing to `out` returns.
pub fn write(timeline: &Timeline, out: impl Write) -> io::Result<()> {
    let mut events = Events { out: BufWriter::new(out), first: true };
    let flows = flows(timeline);
    write!(events.out, "{{\"displayTimeUnit\":\"ms\",\"otherData\":{{\"title\":")?;
    serde_json::to_writer(&mut events.out, &timeline.title)?;
    write!(events.out, ",\"facts\":")?;
    serde_json::to_writer(&mut events.out, &timeline.facts)?;
    write!(events.out, ",\"memory\":")?;
    serde_json::to_writer(&mut events.out, &timeline.memory_unit)?;
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
        events.steps(pid, &rank.spans)?;
        events.saves(pid, &rank.saves)?;
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

/// Thread number of a row: even for compute, odd for communication, high for copies.
fn thread(lane: Lane, row: usize) -> usize {
    match lane {
        Lane::Compute => 2 * row,
        Lane::Communication => 2 * row + 1,
        Lane::Copy => COPIES + row,
    }
}

/// What a viewer calls an action: computes by PyTorch's spelling, all else in words.
fn name(action: &Action) -> String {
    let (kind, place) = action.parts();
    let ActionRow { words, lane, .. } = kind.row();
    let of = if let Action::Recv { .. } = action { "for" } else { "of" };
    let way = if let Action::SendHead { .. } = action { "to" } else { "from" };
    match place {
        Operand::Pair(..) => action.to_string(),
        Operand::MicroBatch(..) if *lane == Lane::Compute => action.to_string(),
        Operand::MicroBatch(stage, i) => format!("{words} {of} stage {stage}, micro-batch {i}"),
        Operand::Peer(_, i, peer) => format!("{words} of micro-batch {i} {way} rank {peer}"),
        Operand::Stage(stage) => format!("{words} {of} stage {stage}"),
        Operand::Nothing => words.to_string(),
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
        for (lane, label, least) in [
            (Lane::Compute, "compute", 1),
            (Lane::Communication, "communication", 1),
            (Lane::Copy, "copies", 0),
        ] {
            let of_lane = placed.iter().filter(|p| rank.spans[p.span].lane == lane);
            let rows = of_lane.map(|p| p.row + 1).max().unwrap_or(least);
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
        let (action, place) = span.action.parts();
        let kind = action.row().words;
        let backward = match place {
            Operand::Pair(_, backward) => Some(backward),
            Operand::Nothing | Operand::Stage(_) | Operand::MicroBatch(..) | Operand::Peer(..) => {
                None
            }
        };
        let peer = if let Operand::Peer(.., peer) = place { Some(peer) } else { None };
        let category = match span.lane {
            Lane::Compute => "compute",
            Lane::Communication => "communication",
            Lane::Copy => "copy",
        };
        write!(
            self.out,
            "{{\"ph\":\"X\",\"name\":\"{}\",\"cat\":\"{category}\",\"pid\":{pid},\"tid\":{tid},\
             \"ts\":{us}.{ns:03},\"dur\":{dur_us}.{dur_ns:03},\"args\":{{\"kind\":\"{kind}\"",
            name(&span.action)
        )?;
        let backward_stage = backward.map(|b| b.0);
        let backward_micro_batch = backward.map(|b| b.1);
        for (key, value) in [
            ("stage", span.action.stage()),
            ("micro_batch", span.action.micro_batch()),
            ("peer", peer),
            ("backward_stage", backward_stage),
            ("backward_micro_batch", backward_micro_batch),
        ] {
            if let Some(value) = value {
                write!(self.out, ",\"{key}\":{value}")?;
            }
        }
        write!(self.out, "}}}}")
    }

    /// What was saved beside the program, checkpoints in a thread and copies in another.
    fn saves(&mut self, pid: usize, saves: &[SaveSpan]) -> io::Result<()> {
        for (in_memory, what, label) in [(false, "checkpoint", "saving"), (true, "copy", "copying")]
        {
            let tid = SAVES + usize::from(in_memory);
            let mut of = saves.iter().filter(|save| save.in_memory == in_memory).peekable();
            if of.peek().is_some() {
                self.metadata(pid, tid, "thread_name", "name", &label)?;
                self.metadata(pid, tid, "thread_sort_index", "sort_index", &tid)?;
            }
            for save in of {
                self.begin()?;
                let (us, ns) = micros(save.start_ns);
                let (dur_us, dur_ns) = micros(save.end_ns.saturating_sub(save.start_ns));
                let SaveSpan { step, blocked_ns, .. } = save;
                write!(
                    self.out,
                    "{{\"ph\":\"X\",\"name\":\"{what} of step {step}\",\"cat\":\"save\",\
                     \"pid\":{pid},\"tid\":{tid},\"ts\":{us}.{ns:03},\
                     \"dur\":{dur_us}.{dur_ns:03},\"args\":{{\"kind\":\"{what}\",\
                     \"step\":{step},\"blocked_ns\":{blocked_ns}}}}}"
                )?;
            }
        }
        Ok(())
    }

    /// From a step's first action to the end of its optimizer step, each.
    fn steps(&mut self, pid: usize, spans: &[Span]) -> io::Result<()> {
        let is_step = |s: &Span| s.action == Action::OptimizerStep;
        for (index, step) in spans.split_inclusive(is_step).enumerate() {
            let (Some(last), start) = (step.last(), step.iter().map(|s| s.start_ns).min()) else {
                continue;
            };
            if !is_step(last) {
                continue;
            }
            let start = start.unwrap_or(last.start_ns);
            for (phase, at) in [("b", start), ("e", last.end_ns.max(start))] {
                self.begin()?;
                let (us, ns) = micros(at);
                write!(
                    self.out,
                    "{{\"ph\":\"{phase}\",\"name\":\"step {}\",\"cat\":\"step\",\"id\":{pid},\
                     \"pid\":{pid},\"tid\":0,\"ts\":{us}.{ns:03}}}",
                    index + 1
                )?;
            }
        }
        Ok(())
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
mod tests;
