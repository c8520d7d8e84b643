//! Operations between ranks, and what is kept of each for a record.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One kind of call on a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// Concatenate shards.
    AllGather,
    /// Sum, and keep a part.
    ReduceScatter,
    /// Sum.
    AllReduce,
    /// One rank's buffer to all.
    Broadcast,
    /// Bytes of all to all.
    Exchange,
    /// Bytes of all to one.
    Gather,
    /// Wait for all.
    Barrier,
    /// Make sub-groups.
    Split,
    /// Point to point, out.
    Send,
    /// Point to point, in.
    Recv,
}

impl Operation {
    /// The trait method's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllReduce => "all_reduce",
            Self::Broadcast => "broadcast",
            Self::Exchange => "exchange",
            Self::Gather => "gather",
            Self::Barrier => "barrier",
            Self::Split => "split",
            Self::Send => "send",
            Self::Recv => "recv",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How far an operation got.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The rank has asked for it and does not have its result.
    UnderWay,
    /// The rank has its result.
    Done,
    /// It ended with an error.
    Failed,
    /// The rank has let go of it.
    Detached,
}

/// One operation of one rank. Times are those of [`now_ns`](crate::flight::now_ns).
#[derive(Clone, Debug, PartialEq)]
pub struct OpRecord {
    /// Place of its group among those of its rank.
    pub group: usize,
    /// The operation that was asked for.
    pub operation: Operation,
    /// A collective's number in its group; of messages, how many of this tag, peer and direction
    /// came before.
    pub number: u64,
    /// A message's tag.
    pub tag: Option<u64>,
    /// World rank that it goes to or comes from, or that broadcasts or gathers.
    pub peer: Option<usize>,
    /// Name of the type and length of what the rank passes in, or of what it receives.
    pub buffer: Option<(&'static str, usize)>,
    /// When the rank asked for it.
    pub issued_ns: u64,
    /// When the rank began to block for it.
    pub waited_ns: Option<u64>,
    /// When the rank had its result or its error, or let go of it.
    pub ended_ns: Option<u64>,
    /// How it ended.
    pub outcome: Outcome,
}

/// A group of which the rank is a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupRecord {
    /// Its name, as in errors.
    pub name: String,
    /// World ranks, in the group's order.
    pub members: Vec<usize>,
    /// Collectives that this rank has joined.
    pub collectives: u64,
}
