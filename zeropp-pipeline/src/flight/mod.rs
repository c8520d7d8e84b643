//! The records that the ranks of a failed run left behind, and the judgement of which rank broke
//! it.
//!
//! Every rank writes a [`Record`]: how it ended, and its last actions and operations. [`Run::read`]
//! finds those of one run, [`judge`] names the rank, stage and operation behind the failure. The
//! judge is a pure function of the records.

mod evidence;
mod folder;
mod moment;
mod record;
mod verdict;
mod waits;

#[cfg(test)]
mod tests;

pub use folder::{FlightError, Run};
pub use moment::{Doing, FailureMoment};
pub use record::{
    ActionEntry, Coords, End, EndKind, Entry, Header, OpEntry, Pause, Peer, Record, signal_name,
};
pub use verdict::{Cause, Verdict, judge};
