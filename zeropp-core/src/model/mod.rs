//! Built-in models: a [`Decoder`](decoder::Decoder) says what one is, [`build`] makes it.
//!
//! `decoder`, `tensors`, `presets` and `hf_config` are data and need no Burn; `parts`, `block`
//! and `cost` are the layers that compute.

mod block;
mod cost;
pub mod decoder;
pub mod gpt;
pub mod hf_config;
mod parts;
pub mod presets;
mod tensors;
mod whole;

pub use parts::build;
pub use tensors::DecoderTensor;
pub use whole::{EvaluationError, Whole, logits};
