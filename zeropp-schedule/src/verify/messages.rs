//! Sends and receives of a program: each message once, after it was made, before it is taken, and
//! in one order on both ends of a link.

use super::tables::Tables;
use super::{Enough, Fault, Faults, VerifyError, fault};
use crate::head::{End, HeadTree};
use crate::ir::{Action, Compute, Message, Schedule, Task};
use crate::links::Named;

/// A message on a link: rank-local index of the action, and what it carries, named by its producer.
type Entry = (usize, Named);

/// The messages of every link (from, to), of each in program order.
type Links = Vec<((usize, usize), Entry)>;

/// Checks sends, receives and their pairing.
pub(super) fn check(
    schedule: &Schedule,
    tables: &Tables,
    faults: &mut Faults,
) -> Result<(), Enough> {
    let (mut sends, mut receives) = (Links::new(), Links::new());
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        for (index, action) in actions.iter().enumerate() {
            for compute in action.computes() {
                faults.note(both_ends(schedule, tables, rank, index, compute))?;
            }
            let of_head =
                tables.head.as_ref().and_then(|head| Some((head, head.end(rank, action)?)));
            if let Some((head, Ok(end))) = of_head {
                let sent = head_sent(schedule, tables, head, end, rank, index);
                faults.note(sent.or_else(|f| fault(schedule, rank, index, f)))?;
                let edge = &head.edges[end.edge];
                let named = Named::Head(edge.message, end.micro_batch);
                let list = if end.is_send { &mut sends } else { &mut receives };
                list.push(((edge.from, edge.to), (index, named)));
                continue;
            }
            let Some(end) = action.message() else { continue };
            let Some((peer, named)) = schedule.other_end(action) else {
                faults.note(fault(schedule, rank, index, Fault::NoNeighbour))?;
                continue;
            };
            if end.is_send {
                let sent = sent_after(tables, end.message, end.stage, end.micro_batch, index);
                faults.note(sent.or_else(|f| fault(schedule, rank, index, f)))?;
                sends.push(((rank, peer), (index, named)));
            } else {
                receives.push(((peer, rank), (index, named)));
            }
        }
    }
    for (head, end) in tables.head.iter().flat_map(|head| all_ends(head, schedule)) {
        if tables.head_end(end).is_none() {
            let edge = &head.edges[end.edge];
            let rank = if end.is_send { edge.from } else { edge.to };
            let action = head.action(end);
            faults.note(Err(VerifyError::Missing { rank, action, unit: None }))?;
        }
    }
    faults.none_yet()?;
    // Every message that some compute makes or takes has both ends by now, so that the lists of a
    // link are equally long.
    for messages in [&mut sends, &mut receives] {
        messages.sort_by_key(|(link, _)| *link);
    }
    for received in receives.chunk_by(|a, b| a.0 == b.0) {
        let link = received[0].0;
        let sent = &sends[sends.partition_point(|(other, _)| *other < link)..];
        let sent = sent.iter().take_while(|(other, _)| *other == link);
        for ((_, (_, what)), (_, (index, wanted))) in sent.zip(received) {
            if what != wanted {
                let next = what.sent(schedule, link.1);
                faults.note(fault(schedule, link.1, *index, Fault::Crossed(next)))?;
                // From here on the two ends are out of step.
                break;
            }
        }
    }
    Ok(())
}

/// A compute action's message must be sent somewhere, and what it takes received before.
fn both_ends(
    schedule: &Schedule,
    tables: &Tables,
    rank: usize,
    index: usize,
    Task { kind, stage, micro_batch }: Task,
) -> Result<(), VerifyError> {
    let stages = schedule.stages();
    for edge in tables.head.iter().flat_map(|head| head.needs(rank, kind, stage)) {
        let end = End { edge: *edge, is_send: false, micro_batch };
        if tables.head_end(end).is_none_or(|posted| posted > index) {
            let recv = tables.head.as_ref().expect("it has edges").action(end);
            return fault(schedule, rank, index, Fault::NoActionBefore(recv));
        }
    }
    if let Some(message) = kind.gives(stage, stages)
        && schedule.destination(message, stage).is_some()
        && tables.send(message, stage, micro_batch).is_none()
    {
        let action = Action::Send { message, stage, micro_batch };
        return Err(VerifyError::Missing { rank, action, unit: None });
    }
    if let Some(message) = kind.needs(stage, stages)
        && schedule.source(message, stage).is_some()
        && tables.recv(message, stage, micro_batch).is_none_or(|posted| posted > index)
    {
        let recv = Action::Recv { message, stage, micro_batch };
        return fault(schedule, rank, index, Fault::NoActionBefore(recv));
    }
    Ok(())
}

/// Both ends of all messages of a split head.
fn all_ends<'a>(
    head: &'a HeadTree,
    schedule: &Schedule,
) -> impl Iterator<Item = (&'a HeadTree, End)> + use<'a> {
    let micro_batches = schedule.micro_batches();
    (0..head.edges.len()).flat_map(move |edge| {
        (0..micro_batches).flat_map(move |micro_batch| {
            [true, false].map(move |is_send| (head, End { edge, is_send, micro_batch }))
        })
    })
}

/// A send of a split head comes after what makes its message, and after the receives of what it
/// passes on.
fn head_sent(
    schedule: &Schedule,
    tables: &Tables,
    head: &HeadTree,
    end: End,
    rank: usize,
    index: usize,
) -> Result<(), Fault> {
    let micro_batch = end.micro_batch;
    let edge = &head.edges[end.edge];
    if !end.is_send {
        return Ok(());
    }
    if let Some((kind, stage)) = edge.after {
        let made = tables.compute(kind, schedule.cell(rank, stage), micro_batch);
        if made.is_none_or(|made| made > index) {
            return Err(Fault::NothingBefore(Task { kind, stage, micro_batch }));
        }
    }
    for before in &edge.needs {
        let end = End { edge: *before, is_send: false, micro_batch };
        if tables.head_end(end).is_none_or(|posted| posted > index) {
            return Err(Fault::NotThere(head.action(end)));
        }
    }
    Ok(())
}

/// A send comes after the compute action that makes its message.
fn sent_after(
    tables: &Tables,
    message: Message,
    stage: usize,
    micro_batch: usize,
    index: usize,
) -> Result<(), Fault> {
    let (kind, made) = match message {
        Message::Activation => (Compute::F, tables.compute(Compute::F, stage, micro_batch)),
        Message::Gradient => {
            let whole = tables.compute(Compute::BW, stage, micro_batch);
            let kind = if whole.is_some() { Compute::BW } else { Compute::B };
            (kind, tables.backward(stage, micro_batch))
        }
    };
    match made {
        Some(made) if made < index => Ok(()),
        _ => Err(Fault::NothingBefore(Task { kind, stage, micro_batch })),
    }
}
