//! Causal attention straight on the fused projection: q, k and v of every token in one row.
//!
//! Two ways, of which the sizes decide ([`keeps_probabilities`]): short samples keep the
//! probabilities for the backward, long ones a number a query, from which it has them again. A
//! sliding window has a way of its own. But for the first, they also take a slice of a sample, with
//! the keys and values of the slices before it, and then have the bits of the whole sample.

pub mod cached;
mod dropped;
mod earlier;
pub mod kept;
mod matrix_rows;
pub mod recomputed;
pub mod windowed;

pub use dropped::Dropped;
pub(crate) use dropped::DroppedHead;
pub use earlier::{EarlierRows, EarlierSums, SliceForward};
pub(crate) use earlier::{gathered, rows_of, tokens};

use core::ops::Range;

use crate::mat_mut::MatMut;

/// Tokens of a sample from which writing the probabilities and reading them again takes longer than
/// computing them again.
const LONG: usize = 512;

/// Whether samples of `s` tokens take [`kept`], else [`recomputed`].
pub fn keeps_probabilities(s: usize) -> bool {
    s < LONG
}

/// Sizes of one attention. A token's row holds `heads` queries, `groups` keys and `groups` values.
#[derive(Clone, Copy, Debug)]
pub struct Dims {
    /// Samples.
    pub b: usize,
    /// Tokens of a sample.
    pub s: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`. Consecutive query heads share one.
    pub groups: usize,
    /// Elements of one head.
    pub d: usize,
    /// Tokens of its sample before the first row, where the rows are of one document: blocks of
    /// queries are those of the sample, so that they do not depend on where slices end.
    pub place: usize,
}

impl Dims {
    /// Elements of a row of qkv.
    pub fn width(&self) -> usize {
        (self.heads + 2 * self.groups) * self.d
    }

    /// Elements of a row of the output.
    pub fn out_width(&self) -> usize {
        self.heads * self.d
    }

    pub(crate) fn scale(&self) -> f32 {
        1.0 / (self.d as f32).sqrt()
    }

    /// First column of query head `head` in a row of qkv, and of its output in a row of that.
    fn query(&self, head: usize) -> usize {
        head * self.d
    }

    /// First column of the keys of group `group`.
    fn key(&self, group: usize) -> usize {
        (self.heads + group) * self.d
    }

    /// First column of the values of group `group`.
    fn value(&self, group: usize) -> usize {
        (self.heads + self.groups + group) * self.d
    }

    /// Elements of sample `b` in a tensor of `width` elements a row.
    fn sample(&self, b: usize, width: usize) -> Range<usize> {
        b * self.s * width..(b + 1) * self.s * width
    }

    /// The rows of every sample in `y: [b·s, cols]`, first rows first.
    fn samples<'a, T>(self, y: &'a mut [T], cols: usize) -> impl Iterator<Item = MatMut<'a, T>> {
        MatMut::new(y, self.b * self.s, cols).blocks(self.s).map(|(_, sample)| sample)
    }

    /// The columns of every query head of every sample in an output, head after head.
    pub(crate) fn heads_of<'a, T>(self, out: &'a mut [T]) -> impl Iterator<Item = MatMut<'a, T>> {
        let samples = self.samples(out, self.out_width());
        samples.flat_map(move |sample| sample.bands(self.d).map(|(_, head)| head))
    }

    /// The columns of every group in every sample of qkv's gradient: its queries, its key and its
    /// value.
    pub(crate) fn groups_of<'a, T>(
        self,
        dqkv: &'a mut [T],
    ) -> impl Iterator<Item = [MatMut<'a, T>; 3]> {
        self.samples(dqkv, self.width()).flat_map(move |sample| {
            let (queries, rest) = sample.split_cols(self.out_width());
            let (keys, values) = rest.split_cols(self.groups * self.d);
            let queries = queries.bands(self.heads / self.groups * self.d);
            let others = keys.bands(self.d).zip(values.bands(self.d));
            queries.zip(others).map(|((_, q), ((_, k), (_, v)))| [q, k, v])
        })
    }

    /// The rows of every block of up to `rows` queries, of which [`GRID`](crate::tokens::GRID) has
    /// a whole number.
    pub(crate) fn blocks(
        self,
        rows: usize,
    ) -> impl DoubleEndedIterator<Item = Range<usize>> + Clone {
        let skipped = self.place % rows;
        let end = move |i: usize| self.s.min(i * rows - skipped.min(i * rows));
        (0..(self.s + skipped).div_ceil(rows)).map(move |i| end(i)..end(i + 1))
    }

    pub(crate) fn check(&self, elements: usize) {
        assert_eq!(elements, self.b * self.s * self.width());
        assert_eq!(self.heads % self.groups, 0, "{} heads in {} groups", self.heads, self.groups);
        assert!(self.place == 0 || self.b == 1, "a document of {} samples", self.b);
    }

    /// The same for a slice with earlier ones; the tokens of these.
    pub(crate) fn check_slice<T>(&self, elements: usize, earlier: &[EarlierRows<'_, T>]) -> usize {
        self.check(elements);
        assert!(earlier.is_empty() || self.b == 1, "slices of one sample, not of {}", self.b);
        tokens(earlier)
    }
}

/// The heads that share a group's keys and values.
pub(crate) fn heads_in(d: Dims, group: usize) -> Range<usize> {
    let share = d.heads / d.groups;
    group * share..(group + 1) * share
}

/// Which of the three matrices of a head.
#[derive(Clone, Copy)]
pub(crate) enum QkvPart {
    Query,
    Key,
    Value,
}

impl QkvPart {
    /// First element of query head `head`'s from row `from` of a sample.
    pub(crate) fn start(self, d: Dims, head: usize, from: usize) -> usize {
        let group = head / (d.heads / d.groups);
        let column = match self {
            QkvPart::Query => d.query(head),
            QkvPart::Key => d.key(group),
            QkvPart::Value => d.value(group),
        };
        from * d.width() + column
    }
}

#[cfg(test)]
mod tests;
