//! One rank's record as a file: a line of JSON for how it ended, then a line for each of its last
//! actions and operations, oldest first.

use std::borrow::Cow;
use std::io::{self, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use zeropp_data::files::{escaped, escaped_line};
use zeropp_schedule::ir::{Action, Message};

use super::error::CommError;
use super::flight::KEPT;
use super::mesh::{Coords, Mesh};
use super::operation::{GroupRecord, OpRecord, Operation, Outcome};
use super::tag::untag;

/// The version of the format that this build writes and reads.
pub(super) const FORMAT: u32 = 1;

/// Signals with which a process dies of its own fault: ILL, ABRT, BUS, FPE, SEGV.
const CRASHES: [i32; 5] = [4, 6, 7, 8, 11];

/// The record of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// How it ended, and who it was.
    pub header: Header,
    /// Its last actions and operations, oldest first.
    pub entries: Vec<Entry>,
}

/// The first line of a record. Times are nanoseconds since 1970 by the clock of the rank's host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Version of the format.
    pub format: u32,
    /// The run, the same for all of its ranks; later runs have greater names.
    pub run: String,
    /// The job, as its launcher calls it, of a process that failed before it had met the others:
    /// its run has a name of its own. Else empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub job: String,
    /// World rank.
    pub rank: usize,
    /// Its place in the mesh.
    pub coords: Coords,
    /// The mesh's sizes.
    pub mesh: Coords,
    /// The process and host of every world rank, this one's too.
    pub processes: Vec<Peer>,
    /// The engine that the ranks talked through.
    pub engine: String,
    /// The schedule's kind.
    pub schedule: String,
    /// The program that it ran at last, where one had taken another's place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exchanged: Option<ExchangedProgram>,
    /// How the last step that rank 0 saw whole spread tokens over experts, in its record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertLoad>,
    /// Pipeline rank of each stage.
    pub placement: Vec<usize>,
    /// How long an operation was waited for before the run failed, in seconds.
    pub timeout_s: f64,
    /// This host's clock less that of rank 0's, as measured at the start.
    pub ahead_ns: i64,
    /// How the rank ended.
    pub end: End,
    /// When the process stood still, as if frozen.
    pub pauses: Vec<Pause>,
    /// The groups that the rank was a member of.
    pub groups: Vec<GroupRecord>,
    /// Entries that follow.
    pub entries: usize,
}

/// A program that took another one's place in a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExchangedProgram {
    /// How many had taken the place of their predecessor by then, it included; 0 for the planned
    /// one, to which the run went back.
    pub number: u64,
    /// Its schedule's kind.
    pub kind: String,
    /// The first step with it.
    pub step: u64,
}

/// How a step spread tokens over experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertLoad {
    /// The step.
    pub step: u64,
    /// Tokens of the most loaded expert over the mean of its layer.
    pub fullest: f64,
    /// That layer.
    pub layer: String,
    /// Experts of all layers that no token went to.
    pub idle: usize,
    /// Where they were unbalanced: how many times as long the layer's stage computed as its
    /// operations say, by the times of the other stages. None where there are no others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slower: Option<f64>,
}

impl ExpertLoad {
    /// Whether an expert has so many times the mean that a rank's threads may wait for it: each
    /// takes whole experts.
    pub fn is_unbalanced(fullest: f64) -> bool {
        fullest >= 2.0
    }
}

/// Where a rank ran.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// Name of the machine.
    pub host: String,
    /// Number of the process there.
    pub pid: u32,
}

/// A time in which nothing of a process ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pause {
    /// When it was last seen running.
    pub from_ns: u64,
    /// When it was seen running again.
    pub to_ns: u64,
}

/// How a rank ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct End {
    /// In one word.
    pub kind: EndKind,
    /// When the rank learnt of its end.
    pub at_ns: u64,
    /// The message, as the user sees it.
    pub text: String,
    /// The error between ranks, where it was one.
    pub error: Option<CommError>,
}

impl End {
    /// The end of `rank` with an error, which was `between` ranks if it was one of those.
    pub fn of_error(rank: usize, at_ns: u64, text: String, between: Option<&CommError>) -> End {
        let kind = match between {
            Some(CommError::Timeout { .. }) => EndKind::Timeout,
            Some(error) if error.is_echo() => EndKind::Peer,
            // All ranks end with it, in the words of the one that saw it.
            Some(CommError::Mismatch { rank: seer, .. }) if *seer != rank => EndKind::Peer,
            _ => EndKind::Error,
        };
        End { kind, at_ns, text, error: between.cloned() }
    }

    /// Whether something went wrong on the rank itself, as opposed to what it learnt of others.
    pub(super) fn is_own_fault(&self) -> bool {
        match (&self.kind, &self.error) {
            (EndKind::Panic, _) | (EndKind::Error, None) => true,
            (EndKind::Signal(number), _) => CRASHES.contains(number),
            (EndKind::Error, Some(error)) => matches!(
                error,
                CommError::Invalid { .. }
                    | CommError::Unavailable { .. }
                    | CommError::Mismatch { .. }
            ),
            _ => false,
        }
    }
}

/// The kinds of end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndKind {
    /// Waited for others in vain.
    Timeout,
    /// An error of its own, or one that it saw first.
    Error,
    /// A panic.
    Panic,
    /// A signal of this number.
    Signal(i32),
    /// Another rank ended the run.
    Peer,
    /// It was still at work when its process was about to end.
    AtWork,
}

/// An action or an operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Entry {
    /// Of the schedule.
    Action(ActionEntry),
    /// Between ranks.
    Operation(OpEntry),
}

/// An action of the schedule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ActionEntry {
    /// Step, from 1.
    pub step: u64,
    /// The action as schedules spell it: `3F0`.
    pub action: String,
    /// Its stage.
    pub stage: Option<usize>,
    /// Its micro-batch.
    pub micro_batch: Option<usize>,
    /// When the rank came to it.
    pub begin_ns: u64,
    /// When it began to compute.
    pub compute_ns: Option<u64>,
    /// When it was done computing.
    pub computed_ns: Option<u64>,
    /// When the rank went on.
    pub end_ns: Option<u64>,
}

/// One action of one rank. Times are those of [`now_ns`](crate::flight::now_ns).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActionRecord {
    /// Step, from 1.
    pub step: u64,
    /// The action.
    pub action: Action,
    /// When the rank came to it.
    pub begin_ns: u64,
    /// When it began to compute, having what it needs from other ranks.
    pub compute_ns: Option<u64>,
    /// When it was done computing.
    pub computed_ns: Option<u64>,
    /// When the rank went on.
    pub end_ns: Option<u64>,
}

/// An operation between ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpEntry {
    /// Name of its group.
    pub group: String,
    /// The operation.
    pub operation: Operation,
    /// Its number in the group, or among the messages of its tag, peer and direction.
    pub number: u64,
    /// A message's tag.
    pub tag: Option<u64>,
    /// World rank at the other end.
    pub peer: Option<usize>,
    /// Type and number of elements.
    pub buffer: Option<(String, usize)>,
    /// When the rank asked for it.
    pub issued_ns: u64,
    /// When the rank began to block for it.
    pub waited_ns: Option<u64>,
    /// When the rank had its result or error.
    pub ended_ns: Option<u64>,
    /// How it ended.
    pub outcome: Outcome,
}

impl OpEntry {
    fn new(record: OpRecord, groups: &[GroupRecord]) -> OpEntry {
        let OpRecord { operation, number, tag, peer, issued_ns, waited_ns, ended_ns, .. } = record;
        OpEntry {
            group: groups[record.group].name.clone(),
            operation,
            number,
            tag,
            peer,
            buffer: record.buffer.map(|(dtype, len)| (dtype.into(), len)),
            issued_ns,
            waited_ns,
            ended_ns,
            outcome: record.outcome,
        }
    }

    /// The stage and action that make what a receive waits for.
    pub(super) fn producer(&self) -> Option<(usize, String)> {
        if self.operation != Operation::Recv || !self.group.starts_with("pipeline") {
            return None;
        }
        let tag = self.tag?;
        Some(match untag(tag)? {
            (Message::Activation, stage, micro_batch) => {
                (stage.checked_sub(1)?, format!("{}F{micro_batch}", stage - 1))
            }
            (Message::Gradient, stage, micro_batch) => {
                (stage + 1, format!("{}B{micro_batch}", stage + 1))
            }
        })
    }

    /// In words: `reduce_scatter #12 of 640 f32 in zero3[1]`, `what 3B5 gives, from rank 2 in …`.
    pub fn describe(&self) -> String {
        let buffer = self.buffer.as_ref();
        let buffer = buffer.map(|(dtype, len)| format!(" of {len} {dtype}")).unwrap_or_default();
        let OpEntry { operation, number, group, .. } = self;
        match (operation, self.peer) {
            (Operation::Recv, Some(peer)) => match self.producer() {
                Some((_, action)) => format!("what {action} gives, from rank {peer} in {group}"),
                None => format!("a message{buffer} from rank {peer} in {group}"),
            },
            (Operation::Send, Some(peer)) => format!("a message{buffer} to rank {peer} in {group}"),
            _ => format!("{operation} #{number}{buffer} in {group}"),
        }
    }
}

impl ActionEntry {
    fn new(record: ActionRecord) -> ActionEntry {
        let ActionRecord { step, action, begin_ns, compute_ns, computed_ns, end_ns } = record;
        let (stage, micro_batch) = (action.stage(), action.micro_batch());
        let action = action.to_string();
        ActionEntry { step, action, stage, micro_batch, begin_ns, compute_ns, computed_ns, end_ns }
    }
}

impl Entry {
    /// When it began.
    pub fn begin_ns(&self) -> u64 {
        match self {
            Entry::Action(action) => action.begin_ns,
            Entry::Operation(op) => op.issued_ns,
        }
    }
}

impl Record {
    /// The record of a rank that did `actions` and `ops`, both oldest first; keeps the last
    /// [`KEPT`] of all. `header` says the rest.
    pub fn new(header: Header, actions: Vec<ActionRecord>, ops: Vec<OpRecord>) -> Record {
        let actions = actions.into_iter().map(|a| Entry::Action(ActionEntry::new(a)));
        let ops = ops.into_iter().map(|op| Entry::Operation(OpEntry::new(op, &header.groups)));
        let mut entries: Vec<Entry> = actions.chain(ops).collect();
        entries.sort_by_key(Entry::begin_ns);
        entries.drain(..entries.len().saturating_sub(KEPT));
        let header = Header { format: FORMAT, entries: entries.len(), ..header };
        Record { header, entries }
    }

    /// The record of a rank of which nothing but its end was kept.
    pub fn of_end(rank: usize, mesh: Mesh, timeout_s: f64, end: End) -> Record {
        let header = Header {
            format: FORMAT,
            run: String::new(),
            job: String::new(),
            rank,
            coords: mesh.coords(rank),
            mesh: Coords { pp: mesh.pp, zero3: mesh.zero3, dp: mesh.dp },
            processes: vec![Peer::default(); mesh.world()],
            engine: String::new(),
            schedule: String::new(),
            exchanged: None,
            experts: None,
            placement: Vec::new(),
            timeout_s,
            ahead_ns: 0,
            end,
            pauses: Vec::new(),
            groups: Vec::new(),
            entries: 0,
        };
        Record { header, entries: Vec::new() }
    }

    /// The name of the file of `rank` in `run`.
    pub fn file_name(run: &str, rank: usize) -> String {
        format!("{run}-rank{rank:04}.jsonl")
    }

    /// Writes the record, a line each.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        serde_json::to_writer(&mut *out, &self.header)?;
        out.write_all(b"\n")?;
        for entry in &self.entries {
            serde_json::to_writer(&mut *out, entry)?;
            out.write_all(b"\n")?;
        }
        Ok(())
    }

    /// Reads what [`write`](Self::write) wrote. Where the end is missing or damaged, what comes
    /// before it, and what is wrong. Control characters in its texts are escaped: they are
    /// another machine's, and are printed.
    ///
    /// # Errors
    /// The fault of the first line, without which nothing is known.
    pub fn read(text: &[u8]) -> Result<(Record, Option<String>), String> {
        let mut lines = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let first = lines.next().ok_or("is empty")?;
        let header: Header =
            printable(first).map_err(|e| format!("line 1 cannot be read ({e})"))?;
        if header.format != FORMAT {
            return Err(format!("has format {}; this zeropp reads {FORMAT}", header.format));
        }
        let mut record = Record { entries: Vec::with_capacity(header.entries.min(KEPT)), header };
        for line in lines {
            match printable(line) {
                Ok(entry) => record.entries.push(entry),
                Err(e) => {
                    let at = record.entries.len() + 2;
                    return Ok((record, Some(format!("line {at} cannot be read ({e})"))));
                }
            }
        }
        let (found, reported) = (record.entries.len(), record.header.entries);
        let problem = format!("ends after {found} of {reported} entries");
        Ok((record, (found != reported).then_some(problem)))
    }
}

/// Reads a line whose texts are to be printed.
fn printable<T: DeserializeOwned>(line: &[u8]) -> serde_json::Result<T> {
    let mut value: Value = serde_json::from_slice(line)?;
    escape_texts(&mut value, false);
    serde_json::from_value(value)
}

/// Escapes every text in `value`. How a rank ended may take several lines; names may not.
fn escape_texts(value: &mut Value, keeps_lines: bool) {
    match value {
        Value::String(text) => {
            let shown = if keeps_lines { escaped(text) } else { escaped_line(text) };
            if let Cow::Owned(shown) = shown {
                *text = shown;
            }
        }
        Value::Array(all) => all.iter_mut().for_each(|one| escape_texts(one, keeps_lines)),
        Value::Object(fields) => {
            fields.iter_mut().for_each(|(key, one)| escape_texts(one, keeps_lines || key == "end"));
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// The name of a signal, as `kill -l` has it: `SIGTERM`.
pub fn signal_name(number: i32) -> String {
    let known = [
        (1, "HUP"),
        (2, "INT"),
        (3, "QUIT"),
        (4, "ILL"),
        (6, "ABRT"),
        (7, "BUS"),
        (8, "FPE"),
        (9, "KILL"),
        (10, "USR1"),
        (11, "SEGV"),
        (12, "USR2"),
        (15, "TERM"),
        (24, "XCPU"),
    ];
    match known.iter().find(|(n, _)| *n == number) {
        Some((_, name)) => format!("SIG{name}"),
        None => format!("signal {number}"),
    }
}
