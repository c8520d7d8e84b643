//! Text as tokens, and which of them a sample is.

mod dataset;
mod error;
mod sampler;

pub use dataset::Dataset;
pub use error::DataError;
pub use sampler::Sampler;
