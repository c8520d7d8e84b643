//! Actions: what a rank does, one after the other. All that can be said of one without a
//! rule of its own is in its row of [`ACTIONS`].

use std::fmt;

use serde::{Deserialize, Serialize};

pub use row::{
    ACTIONS, ActionKind, ActionRow, ActionStyle, Cost, HeldKind, Lane, Lowering, Names, Partners,
    Texture, Torch,
};

mod row;

/// The compute kinds of one stage and one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Compute {
    /// Forward.
    F,
    /// Gradient of the stage's input (`I` in PyTorch's spelling).
    B,
    /// Gradients of the stage's weights; needs no weights.
    W,
    /// A whole backward, B and W at once (`B` in PyTorch's spelling).
    BW,
    /// Recomputation of the forward, right before the B it serves.
    R,
}

/// One compute of one stage on one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Task {
    /// What to compute.
    pub kind: Compute,
    /// Stage, 0..S.
    pub stage: usize,
    /// Micro-batch of the step, 0..B.
    pub micro_batch: usize,
}

impl From<Task> for Action {
    fn from(Task { kind, stage, micro_batch }: Task) -> Action {
        Action::Compute { kind, stage, micro_batch }
    }
}

/// What passes between neighbouring stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Message {
    /// The output of a stage's F, to the next stage.
    Activation,
    /// The output of a stage's B, to the stage before.
    Gradient,
}

/// What passes between the ranks that a head is split over, which is stage S.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum HeadMessage {
    /// The head's input, down from the rank of the last stage.
    Input,
    /// Maxima and sums of exponentials of blocks, and the logits of targets, up to that rank.
    Sums,
    /// Maximum and sum over all ids, of which the log-sum-exp is made, down from it.
    Lse,
    /// Sums of the blocks' gradients of the input, up to it.
    Gradient,
}

impl HeadMessage {
    /// All of them, in the order in which a micro-batch has them.
    pub const ALL: [HeadMessage; 4] =
        [HeadMessage::Input, HeadMessage::Sums, HeadMessage::Lse, HeadMessage::Gradient];
}

/// One instruction of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Action {
    /// Compute on one micro-batch.
    Compute {
        /// What to compute.
        kind: Compute,
        /// Stage, 0..S.
        stage: usize,
        /// Micro-batch of the step, 0..B.
        micro_batch: usize,
    },
    /// A forward and a whole backward that overlap (DualPipeV); run one after the other where the
    /// device cannot overlap them.
    Overlap {
        /// Stage and micro-batch of the F.
        forward: (usize, usize),
        /// Stage and micro-batch of the BW.
        backward: (usize, usize),
    },
    /// Sends what `stage` has just produced for `micro_batch`; returns at once.
    Send {
        /// Activation (to stage + 1) or gradient (to stage − 1).
        message: Message,
        /// The producing stage.
        stage: usize,
        /// Micro-batch.
        micro_batch: usize,
    },
    /// Posts the receive of what `stage` needs for `micro_batch`; the compute action waits for it.
    Recv {
        /// Activation (from stage − 1) or gradient (from stage + 1).
        message: Message,
        /// The consuming stage.
        stage: usize,
        /// Micro-batch.
        micro_batch: usize,
    },
    /// Sends to `peer` what a split head has for it; returns at once. What is passed on from other
    /// ranks goes when it has arrived.
    SendHead {
        /// What is sent.
        message: HeadMessage,
        /// The head's stage, S.
        stage: usize,
        /// Micro-batch.
        micro_batch: usize,
        /// The rank that takes it.
        peer: usize,
    },
    /// Posts the receive of what a split head has from `peer`.
    RecvHead {
        /// What is received.
        message: HeadMessage,
        /// The head's stage, S.
        stage: usize,
        /// Micro-batch.
        micro_batch: usize,
        /// The rank that sends it.
        peer: usize,
    },
    /// Starts gathering a stage's weights inside the ZeRO-3 group; the first use waits for it.
    AllGather {
        /// Stage.
        stage: usize,
    },
    /// Drops a stage's gathered weights.
    Free {
        /// Stage.
        stage: usize,
    },
    /// Starts reducing a stage's gradients inside the ZeRO-3 group into the shard.
    ReduceScatter {
        /// Stage.
        stage: usize,
    },
    /// Starts summing a stage's gradient shard over the replicas.
    ReplicaReduce {
        /// Stage.
        stage: usize,
    },
    /// Waits for the reduction of a stage's gradients and drops the buffer that it was of. A
    /// program that has none for its reductions retires each when the next one starts, and the
    /// last one at the optimizer step.
    Retire {
        /// Stage.
        stage: usize,
    },
    /// Starts copying what the F of a stage and micro-batch has kept out of the rank's memory.
    Out {
        /// Stage.
        stage: usize,
        /// Micro-batch.
        micro_batch: usize,
    },
    /// Waits for the end of that copy, and gives its memory back.
    Gone {
        /// Stage.
        stage: usize,
        /// Micro-batch.
        micro_batch: usize,
    },
    /// Takes memory for it and starts copying it back; its R, or its backward, waits for that.
    In {
        /// Stage.
        stage: usize,
        /// Micro-batch.
        micro_batch: usize,
    },
    /// Waits for the reductions, agrees on the global norm and updates the rank's shards; in a
    /// program with [`Validate`](Self::Validate) the rank updates without waiting for the others.
    OptimizerStep,
    /// Waits for the global norm of the step before, whose update was done without it (Zero
    /// Bubble's post-validation). Where that was wrong, it is taken back and done right, and all
    /// that this step has done so far is done again: before it is a *warm-up* of forwards.
    Validate,
}

/// What an action names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operand {
    /// Nothing.
    Nothing,
    /// A stage.
    Stage(usize),
    /// A stage and a micro-batch.
    MicroBatch(usize, usize),
    /// A stage, a micro-batch and another rank.
    Peer(usize, usize, usize),
    /// Those of a forward and of a backward.
    Pair((usize, usize), (usize, usize)),
}

/// A send, or a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MessageEnd {
    pub(crate) is_send: bool,
    pub(crate) message: Message,
    /// The stage at this end: the producer of what is sent, the consumer of what is received.
    pub(crate) stage: usize,
    pub(crate) micro_batch: usize,
}

impl Action {
    /// Shorthand for a compute action.
    pub fn compute(kind: Compute, stage: usize, micro_batch: usize) -> Action {
        Action::Compute { kind, stage, micro_batch }
    }

    /// A forward and a whole backward that overlap; none for other kinds.
    pub(crate) fn overlap(forward: Task, backward: Task) -> Option<Action> {
        let fit = forward.kind == Compute::F && backward.kind == Compute::BW;
        let of = |task: Task| (task.stage, task.micro_batch);
        fit.then(|| Action::Overlap { forward: of(forward), backward: of(backward) })
    }

    /// The action of a kind at a place; none where the kind names something else.
    pub(crate) fn new(kind: ActionKind, place: Operand) -> Option<Action> {
        let stage = || if let Operand::Stage(stage) = place { Some(stage) } else { None };
        let is_of_rank = place == Operand::Nothing;
        let one = || if let Operand::MicroBatch(s, m) = place { Some((s, m)) } else { None };
        let compute = |kind| one().map(|(s, m)| Action::compute(kind, s, m));
        let send = |message| {
            one().map(|(stage, micro_batch)| Action::Send { message, stage, micro_batch })
        };
        let recv = |message| {
            one().map(|(stage, micro_batch)| Action::Recv { message, stage, micro_batch })
        };
        let peer = || if let Operand::Peer(s, m, peer) = place { Some((s, m, peer)) } else { None };
        let send_head = |message| {
            peer().map(|(stage, micro_batch, peer)| Action::SendHead {
                message,
                stage,
                micro_batch,
                peer,
            })
        };
        let recv_head = |message| {
            peer().map(|(stage, micro_batch, peer)| Action::RecvHead {
                message,
                stage,
                micro_batch,
                peer,
            })
        };
        match kind {
            ActionKind::F => compute(Compute::F),
            ActionKind::B => compute(Compute::B),
            ActionKind::W => compute(Compute::W),
            ActionKind::BW => compute(Compute::BW),
            ActionKind::R => compute(Compute::R),
            ActionKind::Overlap => match place {
                Operand::Pair(forward, backward) => Some(Action::Overlap { forward, backward }),
                Operand::Nothing
                | Operand::Stage(_)
                | Operand::MicroBatch(..)
                | Operand::Peer(..) => None,
            },
            ActionKind::SendActivation => send(Message::Activation),
            ActionKind::SendGradient => send(Message::Gradient),
            ActionKind::RecvActivation => recv(Message::Activation),
            ActionKind::RecvGradient => recv(Message::Gradient),
            ActionKind::SendInput => send_head(HeadMessage::Input),
            ActionKind::SendSums => send_head(HeadMessage::Sums),
            ActionKind::SendLse => send_head(HeadMessage::Lse),
            ActionKind::SendHeadGradient => send_head(HeadMessage::Gradient),
            ActionKind::RecvInput => recv_head(HeadMessage::Input),
            ActionKind::RecvSums => recv_head(HeadMessage::Sums),
            ActionKind::RecvLse => recv_head(HeadMessage::Lse),
            ActionKind::RecvHeadGradient => recv_head(HeadMessage::Gradient),
            ActionKind::AllGather => stage().map(|stage| Action::AllGather { stage }),
            ActionKind::Free => stage().map(|stage| Action::Free { stage }),
            ActionKind::ReduceScatter => stage().map(|stage| Action::ReduceScatter { stage }),
            ActionKind::ReplicaReduce => stage().map(|stage| Action::ReplicaReduce { stage }),
            ActionKind::Retire => stage().map(|stage| Action::Retire { stage }),
            ActionKind::Out => one().map(|(stage, micro_batch)| Action::Out { stage, micro_batch }),
            ActionKind::Gone => {
                one().map(|(stage, micro_batch)| Action::Gone { stage, micro_batch })
            }
            ActionKind::In => one().map(|(stage, micro_batch)| Action::In { stage, micro_batch }),
            ActionKind::OptimizerStep => is_of_rank.then_some(Action::OptimizerStep),
            ActionKind::Validate => is_of_rank.then_some(Action::Validate),
        }
    }

    /// Which row of the table it has, and the place that it names.
    pub(crate) fn parts(&self) -> (ActionKind, Operand) {
        match *self {
            Action::Compute { kind, stage, micro_batch } => {
                (kind.action(), Operand::MicroBatch(stage, micro_batch))
            }
            Action::Overlap { forward, backward } => {
                (ActionKind::Overlap, Operand::Pair(forward, backward))
            }
            Action::Send { message, stage, micro_batch } => {
                let kind = match message {
                    Message::Activation => ActionKind::SendActivation,
                    Message::Gradient => ActionKind::SendGradient,
                };
                (kind, Operand::MicroBatch(stage, micro_batch))
            }
            Action::Recv { message, stage, micro_batch } => {
                let kind = match message {
                    Message::Activation => ActionKind::RecvActivation,
                    Message::Gradient => ActionKind::RecvGradient,
                };
                (kind, Operand::MicroBatch(stage, micro_batch))
            }
            Action::SendHead { message, stage, micro_batch, peer } => {
                let kind = match message {
                    HeadMessage::Input => ActionKind::SendInput,
                    HeadMessage::Sums => ActionKind::SendSums,
                    HeadMessage::Lse => ActionKind::SendLse,
                    HeadMessage::Gradient => ActionKind::SendHeadGradient,
                };
                (kind, Operand::Peer(stage, micro_batch, peer))
            }
            Action::RecvHead { message, stage, micro_batch, peer } => {
                let kind = match message {
                    HeadMessage::Input => ActionKind::RecvInput,
                    HeadMessage::Sums => ActionKind::RecvSums,
                    HeadMessage::Lse => ActionKind::RecvLse,
                    HeadMessage::Gradient => ActionKind::RecvHeadGradient,
                };
                (kind, Operand::Peer(stage, micro_batch, peer))
            }
            Action::AllGather { stage } => (ActionKind::AllGather, Operand::Stage(stage)),
            Action::Free { stage } => (ActionKind::Free, Operand::Stage(stage)),
            Action::ReduceScatter { stage } => (ActionKind::ReduceScatter, Operand::Stage(stage)),
            Action::ReplicaReduce { stage } => (ActionKind::ReplicaReduce, Operand::Stage(stage)),
            Action::Retire { stage } => (ActionKind::Retire, Operand::Stage(stage)),
            Action::Out { stage, micro_batch } => {
                (ActionKind::Out, Operand::MicroBatch(stage, micro_batch))
            }
            Action::Gone { stage, micro_batch } => {
                (ActionKind::Gone, Operand::MicroBatch(stage, micro_batch))
            }
            Action::In { stage, micro_batch } => {
                (ActionKind::In, Operand::MicroBatch(stage, micro_batch))
            }
            Action::OptimizerStep => (ActionKind::OptimizerStep, Operand::Nothing),
            Action::Validate => (ActionKind::Validate, Operand::Nothing),
        }
    }

    /// Its kind.
    pub fn kind(&self) -> ActionKind {
        self.parts().0
    }

    /// Its facts.
    pub fn row(&self) -> &'static ActionRow {
        self.kind().row()
    }

    /// The lane this action's span belongs to.
    pub fn lane(&self) -> Lane {
        self.row().lane
    }

    /// The stage it is about; of an overlap, its forward's. The optimizer's step and its
    /// validation have none.
    pub fn stage(&self) -> Option<usize> {
        match self.parts().1 {
            Operand::Nothing => None,
            Operand::Stage(stage)
            | Operand::MicroBatch(stage, _)
            | Operand::Peer(stage, ..)
            | Operand::Pair((stage, _), _) => Some(stage),
        }
    }

    /// The micro-batch it is about, if it is about one; of an overlap, its forward's.
    pub fn micro_batch(&self) -> Option<usize> {
        match self.parts().1 {
            Operand::Nothing | Operand::Stage(_) => None,
            Operand::MicroBatch(_, micro_batch)
            | Operand::Peer(_, micro_batch, _)
            | Operand::Pair((_, micro_batch), _) => Some(micro_batch),
        }
    }

    /// All stages that it names, with the micro-batch where it has one: none, one, or two
    /// (overlap).
    pub(crate) fn touches(&self) -> impl Iterator<Item = (usize, Option<usize>)> + use<> {
        let (first, second) = match self.parts().1 {
            Operand::Nothing => (None, None),
            Operand::Stage(stage) => (Some((stage, None)), None),
            Operand::MicroBatch(stage, i) | Operand::Peer(stage, i, _) => {
                (Some((stage, Some(i))), None)
            }
            Operand::Pair(f, b) => (Some((f.0, Some(f.1))), Some((b.0, Some(b.1)))),
        };
        first.into_iter().chain(second)
    }

    /// The tasks of this action in the order they run: none, one, or two (overlap).
    pub fn computes(&self) -> impl Iterator<Item = Task> + use<> {
        let task = |kind, (stage, micro_batch)| Task { kind, stage, micro_batch };
        let (first, second) = match *self {
            Action::Compute { kind, stage, micro_batch } => {
                (Some(Task { kind, stage, micro_batch }), None)
            }
            Action::Overlap { forward, backward } => {
                (Some(task(Compute::F, forward)), Some(task(Compute::BW, backward)))
            }
            Action::Send { .. }
            | Action::Recv { .. }
            | Action::SendHead { .. }
            | Action::RecvHead { .. }
            | Action::AllGather { .. }
            | Action::Free { .. }
            | Action::ReduceScatter { .. }
            | Action::ReplicaReduce { .. }
            | Action::Retire { .. }
            | Action::Out { .. }
            | Action::Gone { .. }
            | Action::In { .. }
            | Action::OptimizerStep
            | Action::Validate => (None, None),
        };
        first.into_iter().chain(second)
    }

    /// The end of a message between neighbouring stages that it is, if it is one.
    pub(crate) fn message(&self) -> Option<MessageEnd> {
        let (is_send, message, stage, micro_batch) = match *self {
            Action::Send { message, stage, micro_batch } => (true, message, stage, micro_batch),
            Action::Recv { message, stage, micro_batch } => (false, message, stage, micro_batch),
            Action::Compute { .. }
            | Action::Overlap { .. }
            | Action::SendHead { .. }
            | Action::RecvHead { .. }
            | Action::AllGather { .. }
            | Action::Free { .. }
            | Action::ReduceScatter { .. }
            | Action::ReplicaReduce { .. }
            | Action::Retire { .. }
            | Action::Out { .. }
            | Action::Gone { .. }
            | Action::In { .. }
            | Action::OptimizerStep
            | Action::Validate => return None,
        };
        Some(MessageEnd { is_send, message, stage, micro_batch })
    }
}

impl Compute {
    /// The row of such a compute.
    pub(crate) fn action(self) -> ActionKind {
        match self {
            Compute::F => ActionKind::F,
            Compute::B => ActionKind::B,
            Compute::W => ActionKind::W,
            Compute::BW => ActionKind::BW,
            Compute::R => ActionKind::R,
        }
    }
}

/// zeropp's own short spelling, as in `2F0`, `2B0`, `AG2`, `>A2.0`.
impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, place) = self.parts();
        let ActionRow { short, lane, .. } = kind.row();
        match place {
            Operand::Nothing => write!(f, "{short}"),
            Operand::Stage(stage) => write!(f, "{short}{stage}"),
            Operand::MicroBatch(stage, i) if *lane == Lane::Compute => {
                write!(f, "{stage}{short}{i}")
            }
            Operand::MicroBatch(stage, i) => write!(f, "{short}{stage}.{i}"),
            Operand::Peer(stage, i, peer) => write!(f, "{short}{stage}.{i}@{peer}"),
            Operand::Pair(forward, backward) => {
                write!(f, "{}F{}{short}{}BW{}", forward.0, forward.1, backward.0, backward.1)
            }
        }
    }
}

#[cfg(test)]
mod tests;
