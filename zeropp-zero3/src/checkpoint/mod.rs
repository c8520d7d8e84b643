//! A rank's shards to and from checkpoints, which are `zeropp-checkpoint`'s: what is complete, how
//! it is saved and which one a run goes on from. Here is the only place that knows both shards and
//! pieces.

mod state;

pub(crate) use state::values_of;
pub use state::{StateToWrite, read_from, read_state};
pub use zeropp_checkpoint::{
    Base, Checkpoint, CheckpointError, FileRecord, Manifest, ParameterReader, Piece, Plateau,
    SavedParameter, Store, StoreLock, WRITER_BYTES,
};
