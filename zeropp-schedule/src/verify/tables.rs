//! Where every action is; finds duplicates, strangers and gaps on the way.

use super::{Fault, VerifyError, fault};
use crate::ir::{Action, Compute, Message, Schedule};

const NOWHERE: u32 = u32::MAX;

/// The index, in its rank's list, of everything that may occur once per stage and micro-batch.
pub(super) struct Tables {
    micro_batches: usize,
    /// One table a kind of compute, then sends and receives of both messages.
    index: [Vec<u32>; 9],
}

fn compute_table(kind: Compute) -> usize {
    match kind {
        Compute::F => 0,
        Compute::B => 1,
        Compute::W => 2,
        Compute::BW => 3,
        Compute::R => 4,
    }
}

fn message_table(send: bool, message: Message) -> usize {
    5 + 2 * usize::from(send) + usize::from(message == Message::Gradient)
}

impl Tables {
    /// Tables of a schedule whose actions all name known stages and micro-batches on the right
    /// ranks, none twice, with one F and one backward each.
    pub(super) fn new(schedule: &Schedule) -> Result<Tables, VerifyError> {
        let micro_batches = schedule.micro_batches();
        let size = schedule.stages() * micro_batches;
        // A table costs nothing until its kind occurs.
        let mut tables = Tables { micro_batches, index: std::array::from_fn(|_| Vec::new()) };
        for (rank, actions) in schedule.ranks.iter().enumerate() {
            for (index, action) in actions.iter().enumerate() {
                for (table, stage, micro_batch) in entries(action) {
                    known(schedule, stage, micro_batch)
                        .or_else(|f| fault(schedule, rank, index, f))?;
                    if schedule.placement[stage] != rank {
                        let home = schedule.placement[stage];
                        return fault(schedule, rank, index, Fault::WrongRank { stage, home });
                    }
                    let table = &mut tables.index[table];
                    if table.is_empty() {
                        table.resize(size, NOWHERE);
                    }
                    let slot = &mut table[stage * micro_batches + micro_batch];
                    if *slot != NOWHERE {
                        let first = *slot as usize;
                        return fault(schedule, rank, index, Fault::Duplicate { first });
                    }
                    *slot = index as u32;
                }
                if let Some(stage) = bare_stage(action) {
                    known(schedule, stage, 0).or_else(|f| fault(schedule, rank, index, f))?;
                    let home = schedule.placement[stage];
                    if home != rank {
                        return fault(schedule, rank, index, Fault::WrongRank { stage, home });
                    }
                }
            }
        }
        tables.complete(schedule)?;
        Ok(tables)
    }

    /// Index of a compute action.
    pub(super) fn compute(&self, kind: Compute, stage: usize, micro_batch: usize) -> Option<usize> {
        self.get(compute_table(kind), stage, micro_batch)
    }

    /// Index of B or BW.
    pub(super) fn backward(&self, stage: usize, micro_batch: usize) -> Option<usize> {
        let find = |kind| self.compute(kind, stage, micro_batch);
        find(Compute::B).or_else(|| find(Compute::BW))
    }

    /// Index of the send of what `stage` produces.
    pub(super) fn send(&self, message: Message, stage: usize, micro_batch: usize) -> Option<usize> {
        self.get(message_table(true, message), stage, micro_batch)
    }

    /// Index of the receive of what `stage` takes.
    pub(super) fn recv(&self, message: Message, stage: usize, micro_batch: usize) -> Option<usize> {
        self.get(message_table(false, message), stage, micro_batch)
    }

    fn get(&self, table: usize, stage: usize, micro_batch: usize) -> Option<usize> {
        let index = *self.index[table].get(stage * self.micro_batches + micro_batch)?;
        (index != NOWHERE).then_some(index as usize)
    }

    /// Each stage and micro-batch needs F, and either BW or both B and W.
    fn complete(&self, schedule: &Schedule) -> Result<(), VerifyError> {
        for (stage, &rank) in schedule.placement.iter().enumerate() {
            for i in 0..self.micro_batches {
                let at = |kind| self.compute(kind, stage, i);
                let missing = |what: Compute| {
                    let what = Action::compute(what, stage, i).to_string();
                    Err(VerifyError::Missing { rank, what })
                };
                if at(Compute::F).is_none() {
                    return missing(Compute::F);
                }
                match (at(Compute::BW), at(Compute::B), at(Compute::W)) {
                    (Some(whole), Some(other), _) | (Some(whole), None, Some(other)) => {
                        return fault(schedule, rank, whole, Fault::WholeAndSplit { other });
                    }
                    (Some(_), None, None) | (None, Some(_), Some(_)) => {}
                    (None, None, None) if !self.index[compute_table(Compute::BW)].is_empty() => {
                        return missing(Compute::BW);
                    }
                    (None, None, _) => return missing(Compute::B),
                    (None, Some(_), None) => return missing(Compute::W),
                }
            }
        }
        Ok(())
    }
}

/// What an action enters into which table: (table, stage, micro-batch).
fn entries(action: &Action) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
    let message = match *action {
        Action::Send { message, stage, micro_batch } => {
            Some((message_table(true, message), stage, micro_batch))
        }
        Action::Recv { message, stage, micro_batch } => {
            Some((message_table(false, message), stage, micro_batch))
        }
        _ => None,
    };
    let computes = action.computes().map(|(kind, s, i)| (compute_table(kind), s, i));
    computes.chain(message)
}

/// The stage of an action that has no micro-batch.
fn bare_stage(action: &Action) -> Option<usize> {
    match *action {
        Action::AllGather { stage }
        | Action::Free { stage }
        | Action::ReduceScatter { stage }
        | Action::ReplicaReduce { stage } => Some(stage),
        _ => None,
    }
}

fn known(schedule: &Schedule, stage: usize, micro_batch: usize) -> Result<(), Fault> {
    let (stages, micro_batches) = (schedule.stages(), schedule.micro_batches());
    if stage >= stages {
        return Err(Fault::UnknownStage { stages });
    }
    if micro_batch >= micro_batches {
        return Err(Fault::UnknownMicroBatch { micro_batches });
    }
    Ok(())
}
