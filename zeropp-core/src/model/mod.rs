//! Built-in models, each a list of parts.

pub mod gpt;
