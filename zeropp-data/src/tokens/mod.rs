//! Text as tokens, and which of them a sample is.

mod bytes;
mod dataset;
mod error;
mod fingerprint;
mod ids;
mod sampler;

pub use dataset::Dataset;
pub use error::DataError;
pub use fingerprint::Fingerprint;
pub use sampler::Sampler;
