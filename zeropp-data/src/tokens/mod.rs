//! Text as tokens, and which of them a sample is.

mod bytes;
mod dataset;
mod error;
mod fingerprint;
mod ids;
mod megatron;
mod permutation;
mod sampler;
mod source;
mod turns;

pub use dataset::{Dataset, SplitPart};
pub use error::DataError;
pub use fingerprint::Fingerprint;
pub use sampler::Sampler;
