//! Which compute needs which message, and between which stages a message passes.

use crate::action::MessageEnd;
use crate::ir::{Action, Compute, HeadMessage, Message, Schedule};

/// A message on the link between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Named {
    /// Of a stage to its neighbour: what it is, the producing stage, the micro-batch.
    Stage(Message, usize, usize),
    /// Of a split head: what it is, and the micro-batch.
    Head(HeadMessage, usize),
}

impl Named {
    /// Its send to rank `to`.
    pub(crate) fn sent(self, schedule: &Schedule, to: usize) -> Action {
        match self {
            Named::Stage(message, stage, micro_batch) => {
                Action::Send { message, stage, micro_batch }
            }
            Named::Head(message, micro_batch) => {
                let stage = schedule.stages();
                Action::SendHead { message, stage, micro_batch, peer: to }
            }
        }
    }
}

impl Compute {
    /// True for what reads the stage's weights; W needs none.
    pub(crate) fn needs_weights(self) -> bool {
        self != Compute::W
    }

    /// What this compute of `stage` takes from a neighbouring stage, if anything. A split head's
    /// messages are others ([`crate::head`]).
    pub fn needs(self, stage: usize, stages: usize) -> Option<Message> {
        match self {
            Compute::F if stage > 0 && stage < stages => Some(Message::Activation),
            Compute::B | Compute::BW if stage + 1 < stages => Some(Message::Gradient),
            _ => None,
        }
    }

    /// What this compute of `stage` makes for a neighbouring stage, if anything.
    pub fn gives(self, stage: usize, stages: usize) -> Option<Message> {
        match self {
            Compute::F if stage + 1 < stages => Some(Message::Activation),
            Compute::B | Compute::BW if stage > 0 && stage < stages => Some(Message::Gradient),
            _ => None,
        }
    }
}

impl Message {
    /// The place of a message of a stage and micro-batch in a list of all that there can be: two of
    /// each.
    pub(crate) fn slot(self, stage: usize, micro_batch: usize, micro_batches: usize) -> usize {
        (2 * stage + usize::from(self == Message::Gradient)) * micro_batches + micro_batch
    }

    /// The stage that produces what `consumer` takes; none at the pipeline's ends.
    pub fn producer(self, consumer: usize, stages: usize) -> Option<usize> {
        match self {
            Message::Activation => consumer.checked_sub(1),
            Message::Gradient => Some(consumer + 1).filter(|s| *s < stages),
        }
    }

    /// The stage that takes what `producer` makes; none at the pipeline's ends.
    pub fn consumer(self, producer: usize, stages: usize) -> Option<usize> {
        match self {
            Message::Activation => Some(producer + 1).filter(|s| *s < stages),
            Message::Gradient => producer.checked_sub(1),
        }
    }
}

impl Schedule {
    /// The rank that `message` of the producing `stage` travels to; none where the next stage is on
    /// the same rank, or there is none.
    pub fn destination(&self, message: Message, stage: usize) -> Option<usize> {
        let to = self.placement[message.consumer(stage, self.stages())?];
        (to != self.placement[stage]).then_some(to)
    }

    /// The rank that `message` of the consuming `stage` comes from; none where the stage it comes
    /// from is on the same rank, or there is none.
    pub fn source(&self, message: Message, stage: usize) -> Option<usize> {
        let from = self.placement[message.producer(stage, self.stages())?];
        (from != self.placement[stage]).then_some(from)
    }

    /// The rank at the other end of a message, and the message; none for what is no message.
    pub(crate) fn other_end(&self, action: &Action) -> Option<(usize, Named)> {
        if let Action::SendHead { message, micro_batch, peer, .. }
        | Action::RecvHead { message, micro_batch, peer, .. } = *action
        {
            return Some((peer, Named::Head(message, micro_batch)));
        }
        let MessageEnd { is_send, message, stage, micro_batch } = action.message()?;
        if is_send {
            let peer = self.destination(message, stage)?;
            return Some((peer, Named::Stage(message, stage, micro_batch)));
        }
        let producer = message.producer(stage, self.stages())?;
        Some((self.source(message, stage)?, Named::Stage(message, producer, micro_batch)))
    }

    /// True where some backward is split into B and W, but for a split head's, which always is.
    pub(crate) fn splits_backward(&self) -> bool {
        let stages = self.stages();
        let is_b = |a: &Action| a.computes().any(|t| t.kind == Compute::B && t.stage < stages);
        self.ranks.iter().flatten().any(is_b)
    }
}
