//! Schedules in files: PyTorch's CSV and zeropp's own JSON.
//!
//! Both spell an action as PyTorch does, `stage kind micro-batch`:
//!
//! | spelling | action | |
//! |---|---|---|
//! | `0F1` | forward | PyTorch |
//! | `0I1` | B, the input's gradient | PyTorch |
//! | `0W1` | W, the weights' gradients | PyTorch |
//! | `0B1` | BW, a whole backward | PyTorch |
//! | `(0F7;7B3)OVERLAP_F_B` | a forward and a whole backward that overlap | PyTorch |
//! | `0SEND_F1`, `0RECV_F1` | send and receive of an activation | PyTorch |
//! | `0SEND_B1`, `0RECV_B1` | send and receive of a gradient | PyTorch |
//! | `0UNSHARD`, `0RESHARD` | all-gather and free | PyTorch |
//! | `0REDUCE_GRAD` | reduce-scatter | PyTorch |
//! | `0R1` | recomputation | zeropp only |
//! | `0REPLICA_REDUCE` | sum over the replicas | zeropp only |
//! | `0RETIRE_GRAD` | end of a reduce-scatter, whose buffer goes | zeropp only |
//! | `0OUT1`, `0GONE1`, `0IN1` | copy of activations out, its end, copy in | zeropp only |
//! | `OPTIMIZER_STEP` | optimizer step | zeropp only |
//! | `VALIDATE_UPDATE` | validation of the update before this step | zeropp only |
//! | `0SEND_INPUT1@2`, `0RECV_INPUT1@2` | a split head's input to, or from, rank 2 | zeropp only |
//! | `0SEND_SUMS1@2`, `0RECV_SUMS1@2` | its blocks' sums | zeropp only |
//! | `0SEND_LSE1@2`, `0RECV_LSE1@2` | their log-sum-exp | zeropp only |
//! | `0SEND_HEAD_GRAD1@2`, `0RECV_HEAD_GRAD1@2` | gradients of its input | zeropp only |
//!
//! PyTorch refuses what is zeropp's only with an error, it never reads it as something else.

pub mod csv;
pub mod json;
mod layout;
#[cfg(test)]
mod samples;

use std::fmt;

pub use layout::ActionPositions;

use crate::action::{ACTIONS, ActionRow, Names, Operand};
use crate::ir::{Action, Compute, Schedule, Task};

/// The form of a schedule file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// PyTorch's CSV.
    Csv,
    /// zeropp's JSON.
    Json,
}

impl Format {
    /// The form that a file's extension names, whatever its case; none but `csv` and `json` do.
    pub fn from_extension(extension: &str) -> Option<Format> {
        match extension.to_ascii_lowercase().as_str() {
            "csv" => Some(Format::Csv),
            "json" => Some(Format::Json),
            _ => None,
        }
    }
}

/// Reads a schedule from the text of a file of either form.
///
/// # Errors
/// What [`csv::read`] or [`json::read`] found, in words.
pub fn read(text: &str, format: Format) -> Result<json::Document, String> {
    match format {
        Format::Json => json::read(text).map_err(|e| e.to_string()),
        Format::Csv => {
            let schedule = csv::read(text).map_err(|e| e.to_string())?;
            Ok(json::Document { schedule, costs: None, measures: None })
        }
    }
}

/// Spells an action as the module's table says.
pub fn spell(action: &Action) -> String {
    let (kind, place) = action.parts();
    let ActionRow { file, .. } = kind.row();
    match place {
        Operand::Nothing => file.to_string(),
        Operand::Stage(stage) => format!("{stage}{file}"),
        Operand::MicroBatch(stage, i) => format!("{stage}{file}{i}"),
        Operand::Peer(stage, i, peer) => format!("{stage}{file}{i}@{peer}"),
        Operand::Pair(forward, backward) => {
            let compute = |kind, (stage, i)| spell(&Action::compute(kind, stage, i));
            let [f, b] = [compute(Compute::F, forward), compute(Compute::BW, backward)];
            format!("({f};{b}){file}")
        }
    }
}

/// Reads one action, the whole of `text` and nothing beside it.
///
/// # Errors
/// Says what was found and what would work.
pub fn parse(text: &str) -> Result<Action, SpellingError> {
    let fail = |problem: String| SpellingError { found: clip(text), problem };
    let named = |names: Names| ACTIONS.iter().filter(move |row| row.names == names);
    if let Some(row) = named(Names::Nothing).find(|row| row.file == text) {
        return Ok(Action::new(row.kind, Operand::Nothing).expect("it names nothing"));
    }
    if let Some(inside) = text.strip_prefix('(') {
        return parse_overlap(inside).ok_or_else(|| {
            let names: Vec<&str> = named(Names::Pair).map(|row| row.file).collect();
            fail(format!("an overlap is written like (0F7;7B3){}", names.join(" or ")))
        });
    }
    let (stage, rest) = digits(text);
    if stage.is_empty() {
        return Err(fail("an action starts with its stage, as in 0F1".into()));
    }
    let (kind, number) = rest
        .split_at(rest.find(|c: char| !c.is_ascii_uppercase() && c != '_').unwrap_or(rest.len()));
    let (micro_batch, rest) = digits(number);
    let (peer, junk) = rest.strip_prefix('@').map_or(("", rest), digits);
    if !junk.is_empty() {
        return Err(fail(format!("{:?} does not belong to the action", clip(junk))));
    }
    let stage = stage.parse().map_err(|_| fail("the stage is too large".into()))?;
    let micro_batch = match micro_batch {
        "" => None,
        m => Some(m.parse().map_err(|_| fail("the micro-batch is too large".into()))?),
    };
    let peer = match peer {
        "" => None,
        peer => Some(peer.parse().map_err(|_| fail("the rank is too large".into()))?),
    };
    let of_stage = || named(Names::MicroBatch).chain(named(Names::Stage)).chain(named(Names::Peer));
    let Some(row) = of_stage().find(|row| row.file == kind) else {
        let known: Vec<&str> = of_stage().map(|row| row.file).collect();
        let (found, known) = (clip(kind), known.join(", "));
        return Err(fail(format!("unknown kind {found:?}; known kinds: {known}")));
    };
    let place = match (micro_batch, peer) {
        (None, _) => Operand::Stage(stage),
        (Some(micro_batch), None) => Operand::MicroBatch(stage, micro_batch),
        (Some(micro_batch), Some(peer)) => Operand::Peer(stage, micro_batch, peer),
    };
    Action::new(row.kind, place).ok_or_else(|| match micro_batch {
        _ if row.names == Names::Peer => {
            fail(format!("{kind} needs a micro-batch and a rank, as in 8{kind}1@3"))
        }
        _ if peer.is_some() => fail(format!("{kind} takes no rank")),
        Some(_) => fail(format!("{kind} takes no micro-batch")),
        None => fail(format!("{kind} needs a micro-batch, as in 0{kind}1")),
    })
}

/// What follows the bracket of `(0F7;7B3)OVERLAP_F_B`.
fn parse_overlap(inside: &str) -> Option<Action> {
    let (pair, name) = inside.split_once(')')?;
    let (forward, backward) = pair.split_once(';')?;
    let pair = Action::overlap(parse_flat(forward)?, parse_flat(backward)?);
    pair.filter(|pair| pair.row().file == name)
}

/// A single compute action; no bracket, so the parser cannot recurse.
fn parse_flat(text: &str) -> Option<Task> {
    if text.starts_with('(') {
        return None;
    }
    match parse(text) {
        Ok(Action::Compute { kind, stage, micro_batch }) => Some(Task { kind, stage, micro_batch }),
        Ok(_) | Err(_) => None,
    }
}

/// The ASCII digits at the start of `text`, and the rest.
fn digits(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()))
}

/// The start of a text that may be anything, for a message.
fn clip(text: &str) -> String {
    const LENGTH_MAX: usize = 40;
    match text.char_indices().nth(LENGTH_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into(),
    }
}

/// A text that spells no action.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("found {found:?}: {problem}")]
pub struct SpellingError {
    /// The text, its first 40 characters.
    pub found: String,
    /// What is wrong and what would work.
    pub problem: String,
}

/// An action that does not fit the rest of its schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Misfit {
    rank: usize,
    /// Index in the rank's list.
    index: usize,
    problem: String,
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "actions[{}][{}]: {}", self.rank, self.index, self.problem)
    }
}

/// Checks what every user of a [`Schedule`] may rely on: stages and micro-batches in range, and
/// computes on the rank that holds the stage. All else is the verifier's.
fn check_places(schedule: &Schedule) -> Result<(), Misfit> {
    let stages = schedule.stages() + usize::from(schedule.wide_stage().is_some());
    let micro_batches = schedule.micro_batches();
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        for (index, action) in actions.iter().enumerate() {
            let fail = |problem| Err(Misfit { rank, index, problem });
            for (stage, micro_batch) in action.touches() {
                if stage >= stages {
                    return fail(format!("{}: stage {stage} of {stages}", spell(action)));
                }
                if micro_batch.is_some_and(|m| m >= micro_batches) {
                    let m = micro_batch.unwrap_or_default();
                    return fail(format!("{}: micro-batch {m} of {micro_batches}", spell(action)));
                }
            }
            for Task { stage, .. } in action.computes().filter(|t| !schedule.has(rank, t.stage)) {
                let Some(home) = schedule.placement.get(stage).copied() else {
                    let what = spell(action);
                    return fail(format!("{what}: rank {rank} has no blocks of the split head"));
                };
                if home != rank {
                    let what = spell(action);
                    return fail(format!("{what}: stage {stage} is on rank {home}, not {rank}"));
                }
            }
        }
    }
    Ok(())
}
