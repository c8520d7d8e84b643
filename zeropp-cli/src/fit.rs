//! Whether data and a model that was read from files have the same kind of tokens: one rule for the
//! commands that train on data and measure it.

use std::path::Path;

use zeropp::config::{Config, Tokenizer};
use zeropp::is_model;
use zeropp_core::data::Dataset;

use crate::failure::Failure;

/// Ids of a model of bytes. One that was exported knows as many ids as there are bytes.
const BYTES: usize = 256;

/// Refuses text as data for a model of other tokens than bytes, which has its file or folder at
/// `model` and `vocabulary` ids; `insists` where `tokenizer` was given.
pub(crate) fn check_tokens(
    config: &Config,
    model: &Path,
    vocabulary: Option<usize>,
    insists: bool,
    data: &Path,
) -> Result<(), Failure> {
    let are_bytes = insists || vocabulary == Some(BYTES);
    let reads_bytes = config.tokenizer == Tokenizer::Bytes && !Dataset::is_indexed(data);
    if !is_model(model) || !reads_bytes || are_bytes {
        return Ok(());
    }
    Err(Failure::bad_input(format!(
        "data = {}: the tokens of this model are not bytes; turn text into tokens with zeropp \
         tokenize, or say with --tokenizer u16 or u32 that this is a file of ids (--tokenizer \
         bytes takes bytes all the same)",
        data.display()
    )))
}
