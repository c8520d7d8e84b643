//! Checkpoints of the training state: fp32 parameters, both moments, the count of steps and
//! updates. Random numbers are a function of (seed, step, sample), so there is no more to keep.
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

mod error;
mod file;
mod manifest;
mod open;
mod state;
mod store;

pub use error::CheckpointError;
pub use file::WRITER_BYTES;
pub use manifest::{Base, FileRecord, Manifest, Parameter, Piece, Plateau};
pub use open::{Checkpoint, ParameterReader};
pub use state::{StateToWrite, UnsyncedState, WrittenState, read_state};
pub use store::{Store, StoreLock};
