//! Which send feeds which action: the arrows of a picture.

use std::collections::HashMap;

use crate::{
    action::MessageEnd,
    ir::{Action, Compute, Message, Task},
    timeline::{RankTimeline, Timeline},
};

/// One message, from the span that sends it to the span that uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arrow {
    /// Rank (index into the timeline) and span of the send.
    pub(super) from: (usize, usize),
    /// Rank and span of the compute that consumes it, or of the receive where no compute does.
    pub(super) to: (usize, usize),
}

/// A message as both ends name it: group, kind, producing stage, micro-batch, and how many of the
/// same name came before (one a step).
type Name = (usize, Message, usize, usize, usize);

/// All arrows, in the order of the sends. A send without a receive in its group has none.
pub(super) fn arrows(timeline: &Timeline) -> Vec<Arrow> {
    let mut received = HashMap::new();
    let mut consumed = HashMap::new();
    for (r, rank) in timeline.ranks.iter().enumerate() {
        name_all(rank, &taken_by_receive, |name, span| {
            received.insert(name, (r, span));
        });
        name_all(rank, &taken_by_compute, |name, span| {
            consumed.insert(name, (r, span));
        });
    }
    let mut arrows = Vec::new();
    for (r, rank) in timeline.ranks.iter().enumerate() {
        name_all(rank, &sent, |name, span| {
            let to = consumed.get(&name).or_else(|| received.get(&name));
            arrows.extend(to.map(|to| Arrow { from: (r, span), to: *to }));
        });
    }
    arrows
}

/// The messages an action touches: kind, producing stage and micro-batch.
type Touched = [Option<(Message, usize, usize)>; 2];

/// Gives every message that `of` sees in the rank's spans its name.
fn name_all(
    rank: &RankTimeline,
    of: &dyn Fn(&Action) -> Touched,
    mut found: impl FnMut(Name, usize),
) {
    let mut seen: HashMap<(Message, usize, usize), usize> = HashMap::new();
    for (span, s) in rank.spans.iter().enumerate() {
        for (message, stage, micro_batch) in of(&s.action).into_iter().flatten() {
            let n = seen.entry((message, stage, micro_batch)).or_insert(0);
            found((rank.group, message, stage, micro_batch, *n), span);
            *n += 1;
        }
    }
}

fn sent(action: &Action) -> Touched {
    let sent = action.message().filter(|end| end.is_send);
    [sent.map(|end| (end.message, end.stage, end.micro_batch)), None]
}

fn taken_by_receive(action: &Action) -> Touched {
    let received = action.message().filter(|end| !end.is_send);
    let named = |end: MessageEnd| {
        let stage = producer(end.message, end.stage)?;
        Some((end.message, stage, end.micro_batch))
    };
    [received.and_then(named), None]
}

fn taken_by_compute(action: &Action) -> Touched {
    let mut touched = [None, None];
    for (slot, Task { kind, stage, micro_batch }) in touched.iter_mut().zip(action.computes()) {
        let message = match kind {
            Compute::F => Message::Activation,
            Compute::B | Compute::BW => Message::Gradient,
            // W and R use what the rank already has.
            Compute::W | Compute::R => continue,
        };
        *slot = producer(message, stage).map(|s| (message, s, micro_batch));
    }
    touched
}

/// The stage whose output `stage` consumes.
fn producer(message: Message, stage: usize) -> Option<usize> {
    match message {
        Message::Activation => stage.checked_sub(1),
        Message::Gradient => stage.checked_add(1),
    }
}
