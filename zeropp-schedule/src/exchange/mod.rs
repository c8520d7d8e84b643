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
//! | `OPTIMIZER_STEP` | optimizer step | zeropp only |
//! | `VALIDATE_UPDATE` | validation of the update before this step | zeropp only |
//!
//! PyTorch refuses the last four with an error, it never reads them as something else.

pub mod csv;
pub mod json;
mod layout;
#[cfg(test)]
mod samples;

use std::fmt;

pub use layout::Layout;

use crate::ir::{Action, Compute, Message, Schedule, Task};

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
    match *action {
        Action::Compute { kind, stage, micro_batch } => {
            let letter = match kind {
                Compute::F => 'F',
                Compute::B => 'I',
                Compute::W => 'W',
                Compute::BW => 'B',
                Compute::R => 'R',
            };
            format!("{stage}{letter}{micro_batch}")
        }
        Action::Overlap { forward, backward } => {
            format!("({}F{};{}B{}){OVERLAP}", forward.0, forward.1, backward.0, backward.1)
        }
        Action::Send { message: Message::Activation, stage, micro_batch } => {
            format!("{stage}SEND_F{micro_batch}")
        }
        Action::Send { message: Message::Gradient, stage, micro_batch } => {
            format!("{stage}SEND_B{micro_batch}")
        }
        Action::Recv { message: Message::Activation, stage, micro_batch } => {
            format!("{stage}RECV_F{micro_batch}")
        }
        Action::Recv { message: Message::Gradient, stage, micro_batch } => {
            format!("{stage}RECV_B{micro_batch}")
        }
        Action::AllGather { stage } => format!("{stage}UNSHARD"),
        Action::Free { stage } => format!("{stage}RESHARD"),
        Action::ReduceScatter { stage } => format!("{stage}REDUCE_GRAD"),
        Action::ReplicaReduce { stage } => format!("{stage}REPLICA_REDUCE"),
        Action::OptimizerStep => STEP.into(),
        Action::Validate => VALIDATE.into(),
    }
}

const OVERLAP: &str = "OVERLAP_F_B";
const STEP: &str = "OPTIMIZER_STEP";
const VALIDATE: &str = "VALIDATE_UPDATE";
const KINDS: &str = "F, I, W, B, R, SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD, REDUCE_GRAD, \
                     REPLICA_REDUCE";

/// Reads one action, the whole of `text` and nothing beside it.
///
/// # Errors
/// Says what was found and what would work.
pub fn parse(text: &str) -> Result<Action, SpellingError> {
    let fail = |problem: String| SpellingError { found: clip(text), problem };
    if text == STEP {
        return Ok(Action::OptimizerStep);
    }
    if text == VALIDATE {
        return Ok(Action::Validate);
    }
    if let Some(inside) = text.strip_prefix('(') {
        return parse_overlap(inside)
            .ok_or_else(|| fail(format!("an overlap is written like (0F7;7B3){OVERLAP}")));
    }
    let (stage, rest) = digits(text);
    if stage.is_empty() {
        return Err(fail("an action starts with its stage, as in 0F1".into()));
    }
    let (kind, number) = rest
        .split_at(rest.find(|c: char| !c.is_ascii_uppercase() && c != '_').unwrap_or(rest.len()));
    let (micro_batch, junk) = digits(number);
    if !junk.is_empty() {
        return Err(fail(format!("{:?} does not belong to the action", clip(junk))));
    }
    let stage = stage.parse().map_err(|_| fail("the stage is too large".into()))?;
    let micro_batch = match micro_batch {
        "" => None,
        m => Some(m.parse().map_err(|_| fail("the micro-batch is too large".into()))?),
    };
    match (of_stage(kind, stage), of_micro_batch(kind), micro_batch) {
        (Some(action), _, None) => Ok(action),
        (Some(_), _, Some(_)) => Err(fail(format!("{kind} takes no micro-batch"))),
        (_, Some(action), Some(micro_batch)) => Ok(action(stage, micro_batch)),
        (_, Some(_), None) => Err(fail(format!("{kind} needs a micro-batch, as in 0{kind}1"))),
        (None, None, _) => {
            Err(fail(format!("unknown kind {:?}; known kinds: {KINDS}", clip(kind))))
        }
    }
}

fn of_stage(kind: &str, stage: usize) -> Option<Action> {
    match kind {
        "UNSHARD" => Some(Action::AllGather { stage }),
        "RESHARD" => Some(Action::Free { stage }),
        "REDUCE_GRAD" => Some(Action::ReduceScatter { stage }),
        "REPLICA_REDUCE" => Some(Action::ReplicaReduce { stage }),
        _ => None,
    }
}

fn of_micro_batch(kind: &str) -> Option<fn(usize, usize) -> Action> {
    use Message::{Activation, Gradient};
    Some(match kind {
        "F" => |s, m| Action::compute(Compute::F, s, m),
        "I" => |s, m| Action::compute(Compute::B, s, m),
        "W" => |s, m| Action::compute(Compute::W, s, m),
        "B" => |s, m| Action::compute(Compute::BW, s, m),
        "R" => |s, m| Action::compute(Compute::R, s, m),
        "SEND_F" => |stage, micro_batch| Action::Send { message: Activation, stage, micro_batch },
        "RECV_F" => |stage, micro_batch| Action::Recv { message: Activation, stage, micro_batch },
        "SEND_B" => |stage, micro_batch| Action::Send { message: Gradient, stage, micro_batch },
        "RECV_B" => |stage, micro_batch| Action::Recv { message: Gradient, stage, micro_batch },
        _ => return None,
    })
}

/// What follows the bracket of `(0F7;7B3)OVERLAP_F_B`.
fn parse_overlap(inside: &str) -> Option<Action> {
    let (pair, name) = inside.split_once(')')?;
    let (forward, backward) = pair.split_once(';')?;
    let pair = Action::overlap(parse_flat(forward)?, parse_flat(backward)?);
    pair.filter(|_| name == OVERLAP)
}

/// A single compute action; no bracket, so the parser cannot recurse.
fn parse_flat(text: &str) -> Option<Task> {
    if text.starts_with('(') {
        return None;
    }
    match parse(text) {
        Ok(Action::Compute { kind, stage, micro_batch }) => Some(Task { kind, stage, micro_batch }),
        _ => None,
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
    let (stages, micro_batches) = (schedule.stages(), schedule.micro_batches());
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        for (index, action) in actions.iter().enumerate() {
            let fail = |problem| Err(Misfit { rank, index, problem });
            for (stage, micro_batch) in touches(action).into_iter().flatten() {
                if stage >= stages {
                    return fail(format!("{}: stage {stage} of {stages}", spell(action)));
                }
                if micro_batch.is_some_and(|m| m >= micro_batches) {
                    let m = micro_batch.unwrap_or_default();
                    return fail(format!("{}: micro-batch {m} of {micro_batches}", spell(action)));
                }
            }
            for Task { stage, micro_batch, .. } in action.computes() {
                let home = schedule.home(stage, micro_batch);
                if home != rank {
                    let what = spell(action);
                    return fail(format!("{what}: stage {stage} is on rank {home}, not {rank}"));
                }
            }
        }
    }
    Ok(())
}

/// Stages that an action names, with the micro-batch where it has one.
fn touches(action: &Action) -> [Option<(usize, Option<usize>)>; 2] {
    match *action {
        Action::Compute { stage, micro_batch, .. }
        | Action::Send { stage, micro_batch, .. }
        | Action::Recv { stage, micro_batch, .. } => [Some((stage, Some(micro_batch))), None],
        Action::Overlap { forward: f, backward: b } => {
            [Some((f.0, Some(f.1))), Some((b.0, Some(b.1)))]
        }
        Action::AllGather { stage }
        | Action::Free { stage }
        | Action::ReduceScatter { stage }
        | Action::ReplicaReduce { stage } => [Some((stage, None)), None],
        Action::OptimizerStep | Action::Validate => [None, None],
    }
}
