//! Text as tokens, and which of them a sample is.

mod bytes;
mod dataset;
mod epochs;
mod error;
mod fingerprint;
mod ids;
mod loss_mask;
mod megatron;
mod one_pass;
mod permutation;
mod position;
mod sample;
mod sampler;
mod source;
mod turns;

pub use dataset::{Dataset, SplitPart};
pub use error::DataError;
pub use fingerprint::Fingerprint;
pub use loss_mask::LOSS_MASK_MAGIC;
pub use one_pass::OnePass;
pub use position::{Position, Stretch};
pub use sample::{Hidden, Sample};
pub use sampler::Sampler;
