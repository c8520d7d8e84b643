//! Faults of data.

use std::path::PathBuf;

use thiserror::Error;

use crate::choices::Tokenizer;

/// Data that cannot be trained on, found before any rank starts.
#[derive(Debug, Error)]
pub enum DataError {
    /// A file or folder cannot be read.
    #[error(
        "data = {}: cannot be read ({source}); name a text file or a folder of text files",
        path.display()
    )]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A folder without a file to read.
    #[error(
        "data = {}: the folder has no files (names that begin with a dot do not count); \
         put text files into it, or name another",
        path.display()
    )]
    NoFiles {
        /// The folder.
        path: PathBuf,
    },
    /// A file that is not what the tokenizer reads.
    #[error("data = {}: {problem}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The fault, and the way that would work.
        problem: String,
    },
    /// A token id that the model has no row for.
    #[error(
        "data = {origin}: token id {id} at byte {offset} is not below vocab = {vocabulary}; use a \
         larger vocab, or another tokenizer if {tokenizer} is not what the file was written as"
    )]
    UnknownId {
        /// The file or folder (whose files count as one, with a line feed between them).
        origin: String,
        /// The id.
        id: u32,
        /// Its first byte, from the beginning of the file.
        offset: usize,
        /// One more than the largest id that may be there.
        vocabulary: usize,
        /// The tokenizer that the data was read with.
        tokenizer: Tokenizer,
    },
    /// Data of which a model would learn nothing.
    #[error("data = {origin}: none of its tokens is scored: {why}")]
    NothingScored {
        /// The file or folder.
        origin: String,
        /// Why they are hidden, and the way that would work.
        why: &'static str,
    },
    /// Too little for one sample and the token after it.
    #[error(
        "data = {origin}: {tokens} tokens are too short, since seq = {seq} needs {} for one \
         sample and the token after it; use a longer text{}",
        .seq.saturating_add(1),
        smaller_seq(*.tokens)
    )]
    TooShort {
        /// The file or folder.
        origin: String,
        /// Tokens in it.
        tokens: usize,
        /// Tokens in a sample.
        seq: usize,
    },
}

fn smaller_seq(tokens: usize) -> String {
    if tokens < 2 { String::new() } else { format!(" or a seq of at most {}", tokens - 1) }
}
