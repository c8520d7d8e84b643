//! Checkpoints of the training state, without tensors: fp32 parameters, what the optimizer keeps of
//! them, the count of steps and updates; how they are saved, and how a run goes on after a failure.
//! Random numbers are a function of (seed, step, sample), so there is no more to keep.
//!
//! A checkpoint is a folder `step-000123` of one safetensors file for each rank that owns state,
//! and `manifest.json`. A file holds pieces: elements `offset..offset + len` of a parameter in
//! row-major order, without padding, under the parameter's name. No mesh, stage or shard is
//! written, so any run of the same model reads it, whatever its P, V, D, K and ZeRO-1.
//!
//! Everything is written into a hidden folder and flushed, the manifest last; then the folder gets
//! its name. So a folder with this name and a manifest is complete. The manifest has the size and
//! BLAKE3 digest of every file and its own digest in its first lines. Reading checks what it reads,
//! on the way: no process reads a file twice, or one that it does not need.
//!
//! Nothing here starts a thread, asks a clock or touches a file but through [`disk::Disk`].

pub mod attempts;
pub mod complete;
pub mod disk;
mod error;
mod file;
mod kept;
mod manifest;
pub mod moves;
mod open;
pub mod pace;
pub mod part;
pub mod places;
pub mod reschedule;
pub mod resume;
pub mod step_end;
mod store;
pub mod under_way;
mod written;

/// The locks that threads wait with; a test has others (`zeropp-checkpoint/tests/shuttle.rs`).
mod sync {
    pub(crate) use parking_lot::{Condvar, Mutex};
}

pub use error::{Checked, CheckpointError};
pub use file::{PARAMETER, StateWriter, WRITER_BYTES, WrittenFile, tensor_name};
pub use kept::{EMA, StateTensor};
pub use manifest::SavedProgram;
pub use manifest::{Base, FileRecord, MANIFEST, Manifest, Piece, Plateau, SavedParameter};
pub use open::{Checkpoint, CheckpointReader, ParameterReader, StateSource};
pub use store::{Holder, Store, StoreLock, checkpoint_at};
pub use written::{UnsyncedState, WrittenPiece, WrittenState};
