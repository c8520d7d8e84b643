//! Errors between ranks, the records that the ranks of a failed run leave behind, and the judgement
//! of which rank broke it.
//!
//! Every rank has a [`Record`]: how it ended, and its last actions and operations. [`judge`] names
//! the rank, stage and operation behind the failure; it is a pure function of the records. A run's
//! own process asks it about its ranks, `zeropp why` about the files that [`Run::read`] finds.

mod error;
mod evidence;
pub mod flight;
mod folder;
pub mod mesh;
mod moment;
mod operation;
mod record;
pub mod tag;
mod verdict;
mod waits;

#[cfg(test)]
mod tests;

pub use error::{CommError, CommResult};
pub use folder::{FlightError, Run};
pub use mesh::Coords;
pub use moment::{Doing, FailureMoment};
pub use operation::{GroupRecord, OpRecord, Operation, Outcome};
pub use record::{
    ActionEntry, ActionRecord, End, EndKind, Entry, ExchangedProgram, ExpertLoad, Header, OpEntry,
    Pause, Peer, Record, signal_name,
};
pub use verdict::{Cause, Verdict, judge};
