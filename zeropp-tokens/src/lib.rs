//! Text to tokens: tokenizers in the files they come in, and files of tokens made of text in
//! parallel, in Megatron's form, which `zeropp-data` reads.
//!
//! The bytes that are written depend on inputs, tokenizer and settings alone, and a run that is
//! killed goes on where it was.

mod chat;
mod corpus;
mod error;
mod gpt2;
mod known;
mod output;
#[cfg(feature = "parquet")]
mod rows;
mod run;
#[cfg(test)]
mod run_tests;
mod tiktoken;
mod tokenizer;
#[cfg(test)]
mod tokenizer_tests;
mod zst;

pub use chat::ChatTemplate;
pub use error::TokensError;
pub use run::{TokenizeOptions, Tokenized, left_out, tokenize};
pub use tokenizer::TextTokenizer;
