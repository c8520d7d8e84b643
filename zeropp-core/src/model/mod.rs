//! Built-in models: a [`Decoder`](decoder::Decoder) says what one is, [`build`] makes it.
//!
//! Sizes, parameters, costs, presets and `config.json` need no Burn and are in `zeropp_model`;
//! `parts` and `block` are the layers that compute.

mod block;
pub mod gpt;
mod parts;
mod whole;

pub use parts::{build, build_tuned};
pub use whole::{EvaluationError, Whole, logits};
pub use zeropp_model::tensors::DecoderTensor;
pub use zeropp_model::{decoder, hf_config, hf_written, presets, tensors, tuning};
