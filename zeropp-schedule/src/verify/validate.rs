//! What stands before a validation can run again: all ranks' warm-ups are forwards, and no message
//! leaves them.

use super::tables::Tables;
use super::{Enough, Fault, Faults, VerifyError, fault};
use crate::head::End;
use crate::ir::{Action, Schedule};
use crate::links::Named;

/// Checks that all ranks validate once, or none does, after warm-ups that are closed.
pub(super) fn check(
    schedule: &Schedule,
    tables: &Tables,
    faults: &mut Faults,
) -> Result<(), Enough> {
    if !schedule.validates_late() {
        return Ok(());
    }
    let is_validation = |action: &Action| *action == Action::Validate;
    let mut ends = Vec::new();
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        let mut all = actions.iter().enumerate().filter(|(_, action)| is_validation(action));
        match all.next() {
            Some((first, _)) => {
                ends.push(first);
                for (index, _) in all {
                    faults.note(fault(schedule, rank, index, Fault::Duplicate { first }))?;
                }
            }
            None => {
                let action = Action::Validate;
                faults.note(Err(VerifyError::Missing { rank, action, unit: None }))?;
            }
        }
    }
    faults.none_yet()?;
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        for (index, action) in actions.iter().enumerate() {
            let is_before = index < ends[rank];
            if is_before && !action.row().is_forward {
                faults.note(fault(schedule, rank, index, Fault::NotWarmUp))?;
            }
            let other = other_end(schedule, tables, rank, action);
            if other.is_some_and(|(peer, at)| is_before != (at < ends[peer])) {
                faults.note(fault(schedule, rank, index, Fault::CrossesValidation))?;
            }
        }
    }
    Ok(())
}

/// Rank and index of the receive of a send, or of the send of a receive.
fn other_end(
    schedule: &Schedule,
    tables: &Tables,
    rank: usize,
    action: &Action,
) -> Option<(usize, usize)> {
    let (peer, named) = schedule.other_end(action)?;
    let Named::Stage(message, producer, micro_batch) = named else {
        let End { edge, is_send, micro_batch } = tables.head.as_ref()?.end(rank, action)?.ok()?;
        return Some((peer, tables.head_end(End { edge, is_send: !is_send, micro_batch })?));
    };
    let is_send = action.message().is_some_and(|end| end.is_send);
    let at = if is_send {
        let consumer = message.consumer(producer, schedule.stages())?;
        tables.recv(message, consumer, micro_batch)?
    } else {
        tables.send(message, producer, micro_batch)?
    };
    Some((peer, at))
}
