//! A GPT as GPT-2 has it, by its sizes.

pub use zeropp_model::gpt::GptShape;

use crate::layer::Model;

/// A GPT of the given sizes.
pub fn build(shape: GptShape) -> Model {
    super::build(shape.into())
}
