//! The table of actions: a row says all that can be said of an action without a rule of its own.
//!
//! Spelling, parsing, pictures, traces, lanes, costs and what lowering keeps follow from the rows.
//! What each action needs and leaves on a rank is decided in places that list all of them, so that
//! the compiler names those which a new one has to be added to.

use serde::{Deserialize, Serialize};

/// Where on a rank an action takes its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Lane {
    /// F, B, W, BW, R and the optimizer step.
    Compute,
    /// Gathers, reductions, sends and receives.
    Communication,
    /// Copies of activations out of the rank's memory and back.
    Copy,
}

/// What an action names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// Nothing: it is about the whole rank.
    Nothing,
    /// A stage.
    Stage,
    /// A stage and a micro-batch.
    MicroBatch,
    /// These, and another rank.
    Peer,
    /// Two of the former: a forward's and a backward's.
    Pair,
}

/// How PyTorch's files have an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Torch {
    /// As zeropp's.
    Same,
    /// Once a step for each stage: the last one of zeropp's.
    LastOfStage,
    /// Not at all, so it is left out.
    Unknown,
}

/// Which given or measured duration is an action's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cost {
    /// A forward.
    F,
    /// The gradient of a stage's input.
    B,
    /// The gradients of a stage's weights.
    W,
    /// Both of these.
    BW,
    /// A recomputation.
    R,
    /// An overlapped forward and backward, together.
    Pair,
    /// A message on a link.
    Message,
    /// A gather of a stage.
    Gather,
    /// A reduction of a stage.
    Reduce,
    /// A sum of a stage's gradients over the replicas.
    ReplicaReduce,
    /// A copy of activations out or in.
    Copy,
    /// The optimizer's step.
    Step,
    /// None: it takes no time, or what it waits for.
    Nothing,
}

/// The ranks that take part in an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Partners {
    /// Its own rank alone.
    NoRank,
    /// The rank of a neighbouring stage, or the one that it names.
    Neighbour,
    /// The ranks of a stage: of its ZeRO-3 group, or of all replicas.
    Group,
    /// All ranks.
    Everyone,
}

/// A kind of memory, as [`MemoryBytes`](crate::memory::MemoryBytes) counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldKind {
    /// Gathered weights.
    Gathered,
    /// Copies of them as products read them.
    Packed,
    /// A unit's gradient.
    Gradient,
    /// The share of the sum over the units.
    GradientShard,
    /// What F keeps for B.
    Activation,
    /// What B keeps for W.
    Stash,
    /// What was kept for B and is out of the rank's memory.
    Host,
    /// Messages, and what collectives send or give.
    Communication,
}

/// What lowering does with an action of the schedule that it is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lowering {
    /// It stays where it is.
    Keeps,
    /// It stays in an order that was written with its recomputation; else R is made as asked for.
    Recomputes,
    /// It stays in an order that was written with its gathers; else they are made anew.
    Gathers,
    /// It is dropped and made anew.
    Makes,
}

/// What is drawn over a colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Texture {
    /// Nothing.
    Solid,
    /// Stripes that rise to the right.
    Diagonal,
    /// Stripes along the time axis.
    Horizontal,
    /// Dots.
    Dots,
}

/// How an action looks in pictures. Actions may share a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActionStyle {
    /// Its place in legends, from 0.
    pub place: usize,
    /// Its name in legends.
    pub name: &'static str,
    /// The same in a sentence's words.
    pub about: &'static str,
    /// Red, green, blue.
    pub color: [u8; 3],
    /// What is drawn over the colour.
    pub texture: Texture,
}

/// All facts of an action.
#[derive(Debug)]
pub struct ActionRow {
    /// Which action this is a row of.
    pub kind: ActionKind,
    /// What it names.
    pub names: Names,
    /// Its name in traces.
    pub words: &'static str,
    /// In messages and programs as text: what stands between stage and micro-batch of a compute, as
    /// in `2F0`, and before them otherwise, as in `AG2` and `>A2.0`.
    pub short: &'static str,
    /// In files of schedules: what stands between stage and micro-batch, after the stage, or alone.
    pub file: &'static str,
    /// How PyTorch's files have it.
    pub torch: Torch,
    /// The lane of its span.
    pub lane: Lane,
    /// How it looks.
    pub look: ActionStyle,
    /// Which duration it takes.
    pub cost: Cost,
    /// Who takes part.
    pub partners: Partners,
    /// Whether forwards alone need it: it may stand before a validation, and in a validation loss.
    pub is_forward: bool,
    /// The kinds of memory that a rank may hold more of after it.
    pub takes: &'static [HeldKind],
    /// The kinds of memory that a rank may hold less of after it.
    pub gives: &'static [HeldKind],
    /// What lowering does with it.
    pub lowering: Lowering,
    /// Where lowering puts several at one place, the lowest first: what other ranks wait for, then
    /// a gather, only after the free that makes room for it, and before the reduction, which no
    /// rank waits for yet, and the end of the one before it.
    pub order: u8,
}

const fn rgb(color: u32) -> [u8; 3] {
    [(color >> 16) as u8, (color >> 8) as u8, color as u8]
}

/// The enum of kinds and the table, from the rows.
macro_rules! actions {
    ($($kind:ident: $names:ident, $lane:ident, $cost:ident, $partners:ident, $forward:literal,
        $lowering:ident at $order:literal;
        spelled $words:literal $short:literal $file:literal $torch:ident;
        takes [$($takes:ident),*] gives [$($gives:ident),*];
        looks $place:literal $name:literal $about:literal $color:literal $texture:ident.)*) => {
        /// What an action does, without the stage and micro-batch that it does it for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum ActionKind {
            $(#[doc = $about] $kind,)*
        }

        /// All kinds of actions.
        pub static ACTIONS: &[ActionRow] = &[$(ActionRow {
            kind: ActionKind::$kind,
            names: Names::$names,
            words: $words,
            short: $short,
            file: $file,
            torch: Torch::$torch,
            lane: Lane::$lane,
            look: ActionStyle {
                place: $place,
                name: $name,
                about: $about,
                color: rgb($color),
                texture: Texture::$texture,
            },
            cost: Cost::$cost,
            partners: Partners::$partners,
            is_forward: $forward,
            takes: &[$(HeldKind::$takes),*],
            gives: &[$(HeldKind::$gives),*],
            lowering: Lowering::$lowering,
            order: $order,
        }),*];
    };
}

// Each row: the kind, what it names, lane, cost, partners, whether forwards need it, lowering; its
// name in traces, in zeropp's short spelling, in files, and if PyTorch knows it; memory; looks.
// The playground's page knows actions by the numbers of their rows: new ones go to the end.
actions! {
    F: MicroBatch, Compute, F, NoRank, true, Keeps at 5;
        spelled "F" "F" "F" Same;
        takes [Activation, Packed, Gradient, GradientShard, Communication] gives [Communication];
        looks 0 "F" "forward" 0x0072b2 Solid.
    B: MicroBatch, Compute, B, NoRank, false, Keeps at 5;
        spelled "B" "B" "I" Same;
        takes [Activation, Stash, Packed, GradientShard, Communication]
        gives [Activation, Communication, Host];
        looks 1 "B" "gradient of the input" 0xe69f00 Solid.
    W: MicroBatch, Compute, W, NoRank, false, Keeps at 5;
        spelled "W" "W" "W" Same;
        takes [Gradient, GradientShard, Communication] gives [Stash];
        looks 2 "W" "gradients of the weights" 0x009e73 Diagonal.
    BW: MicroBatch, Compute, BW, NoRank, false, Keeps at 5;
        spelled "BW" "BW" "B" Same;
        takes [Activation, Packed, Gradient, GradientShard, Communication]
        gives [Activation, Communication, Host];
        looks 3 "BW" "whole backward" 0xd55e00 Horizontal.
    R: MicroBatch, Compute, R, NoRank, false, Recomputes at 5;
        spelled "R" "R" "R" Unknown;
        takes [Activation, Packed, Gradient, GradientShard] gives [Communication, Host];
        looks 4 "R" "recomputation" 0x56b4e9 Dots.
    Overlap: Pair, Compute, Pair, NoRank, false, Keeps at 5;
        spelled "F&BW" "&" "OVERLAP_F_B" Same;
        takes [Activation, Packed, Gradient, GradientShard, Communication]
        gives [Activation, Communication, Host];
        looks 12 "F & BW overlapped" "forward and whole backward, overlapped" 0x0072b2 Solid.
    SendActivation: MicroBatch, Communication, Message, Neighbour, true, Makes at 0;
        spelled "send activation" ">A" "SEND_F" Same;
        takes [] gives [];
        looks 6 "send" "send" 0xcc79a7 Solid.
    SendGradient: MicroBatch, Communication, Message, Neighbour, false, Makes at 0;
        spelled "send gradient" ">G" "SEND_B" Same;
        takes [] gives [];
        looks 6 "send" "send" 0xcc79a7 Solid.
    RecvActivation: MicroBatch, Communication, Nothing, Neighbour, true, Makes at 5;
        spelled "receive activation" "<A" "RECV_F" Same;
        takes [Communication] gives [];
        looks 7 "receive" "receive" 0xe3b0cc Solid.
    RecvGradient: MicroBatch, Communication, Nothing, Neighbour, false, Makes at 5;
        spelled "receive gradient" "<G" "RECV_B" Same;
        takes [Communication] gives [];
        looks 7 "receive" "receive" 0xe3b0cc Solid.
    AllGather: Stage, Communication, Gather, Group, true, Gathers at 2;
        spelled "all-gather" "AG" "UNSHARD" Same;
        takes [Gathered, Communication] gives [];
        looks 8 "all-gather" "all-gather of the weights" 0xf0e442 Solid.
    Free: Stage, Communication, Nothing, NoRank, true, Gathers at 1;
        spelled "free" "FREE" "RESHARD" Same;
        takes [] gives [Gathered, Packed, Communication];
        looks 9 "free" "free the weights" 0x999999 Solid.
    ReduceScatter: Stage, Communication, Reduce, Group, false, Makes at 4;
        spelled "reduce-scatter" "RS" "REDUCE_GRAD" LastOfStage;
        takes [Communication, GradientShard] gives [Gradient, Communication];
        looks 10 "reduce-scatter" "reduce-scatter of the gradients" 0x5c4a72 Solid.
    ReplicaReduce: Stage, Communication, ReplicaReduce, Group, false, Makes at 5;
        spelled "replica reduce" "AR" "REPLICA_REDUCE" Unknown;
        takes [Communication, GradientShard] gives [];
        looks 11 "replica reduce" "sum over the replicas" 0x000000 Solid.
    OptimizerStep: Nothing, Compute, Step, Everyone, false, Makes at 5;
        spelled "optimizer step" "STEP" "OPTIMIZER_STEP" Unknown;
        takes [] gives [Gradient, GradientShard, Communication];
        looks 5 "optimizer" "optimizer step" 0x806040 Solid.
    Validate: Nothing, Communication, Nothing, Everyone, false, Makes at 6;
        spelled "validate update" "VALID" "VALIDATE_UPDATE" Unknown;
        takes [] gives [];
        looks 13 "validate update" "waiting for the norm of the step before" 0xb2182b Solid.
    Retire: Stage, Communication, Nothing, NoRank, false, Makes at 3;
        spelled "retire" "END" "RETIRE_GRAD" Unknown;
        takes [GradientShard] gives [Gradient, Communication];
        looks 14 "retire" "end of a reduction, whose buffer goes" 0xb3a2c7 Solid.
    SendInput: Peer, Communication, Message, Neighbour, true, Makes at 6;
        spelled "send input" ">X" "SEND_INPUT" Unknown;
        takes [] gives [];
        looks 6 "send" "send" 0xcc79a7 Solid.
    SendSums: Peer, Communication, Message, Neighbour, true, Makes at 6;
        spelled "send sums" ">S" "SEND_SUMS" Unknown;
        takes [] gives [];
        looks 6 "send" "send" 0xcc79a7 Solid.
    SendLse: Peer, Communication, Message, Neighbour, false, Makes at 6;
        spelled "send log-sum-exp" ">L" "SEND_LSE" Unknown;
        takes [] gives [Communication];
        looks 6 "send" "send" 0xcc79a7 Solid.
    SendHeadGradient: Peer, Communication, Message, Neighbour, false, Makes at 6;
        spelled "send head's gradient" ">D" "SEND_HEAD_GRAD" Unknown;
        takes [] gives [Communication];
        looks 6 "send" "send" 0xcc79a7 Solid.
    RecvInput: Peer, Communication, Nothing, Neighbour, true, Makes at 5;
        spelled "receive input" "<X" "RECV_INPUT" Unknown;
        takes [Communication] gives [];
        looks 7 "receive" "receive" 0xe3b0cc Solid.
    RecvSums: Peer, Communication, Nothing, Neighbour, true, Makes at 5;
        spelled "receive sums" "<S" "RECV_SUMS" Unknown;
        takes [Communication] gives [];
        looks 7 "receive" "receive" 0xe3b0cc Solid.
    RecvLse: Peer, Communication, Nothing, Neighbour, false, Makes at 5;
        spelled "receive log-sum-exp" "<L" "RECV_LSE" Unknown;
        takes [Communication] gives [];
        looks 7 "receive" "receive" 0xe3b0cc Solid.
    RecvHeadGradient: Peer, Communication, Nothing, Neighbour, false, Makes at 5;
        spelled "receive head's gradient" "<D" "RECV_HEAD_GRAD" Unknown;
        takes [Communication] gives [];
        looks 7 "receive" "receive" 0xe3b0cc Solid.
    Out: MicroBatch, Copy, Copy, NoRank, true, Makes at 1;
        spelled "copy out" "OUT" "OUT" Unknown;
        takes [Host] gives [];
        looks 15 "copy out" "copy of activations out" 0x1b7837 Solid.
    Gone: MicroBatch, Copy, Nothing, NoRank, true, Makes at 1;
        spelled "end of copy out" "GONE" "GONE" Unknown;
        takes [] gives [Activation];
        looks 16 "gone" "end of a copy out, whose memory goes" 0xa6dba0 Solid.
    In: MicroBatch, Copy, Copy, NoRank, false, Makes at 8;
        spelled "copy in" "IN" "IN" Unknown;
        takes [Activation] gives [];
        looks 17 "copy in" "copy of activations in" 0x762a83 Solid.
}

impl ActionKind {
    /// Its facts.
    pub fn row(self) -> &'static ActionRow {
        &ACTIONS[self as usize]
    }
}
