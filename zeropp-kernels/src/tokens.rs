//! The grid on which sums over the tokens of a sample are made.
//!
//! A sum over tokens is made of those of blocks of [`GRID`] tokens or of a whole part of so many,
//! and the blocks are added from the last to the first (in the head, whose gradient is made in the
//! forward, from the first to the last). So a sample that is cut into slices, whose backwards come
//! from the last slice to the first, has the bits that it has whole, wherever the grid is cut.

use std::ops::Range;

/// Tokens of a block. Slices of a sample are multiples of it but for the sample's end.
pub const GRID: usize = 256;

/// The blocks of `rows` tokens, first tokens first.
pub fn blocks(rows: usize) -> impl DoubleEndedIterator<Item = Range<usize>> + Clone {
    (0..rows.div_ceil(GRID)).map(move |i| i * GRID..rows.min((i + 1) * GRID))
}
