//! What attention has from the other slices of its sample: keys and values of those before it,
//! which its queries see too, and in the backward sums of gradients for keys and values.
//!
//! The backward goes from the last slice to the first. A gradient of keys and values is a sum over
//! all blocks of queries that see them, from the sample's last block on and, within a block, over
//! the heads of a group. It goes in fp32 from the backward of one slice to that of the slice before
//! it, so its bits do not depend on where the sample was cut.

use super::matrix_rows::MatrixRows;
use super::{Dims, QkvPart};
use crate::mat_mut::MatMut;

/// Keys and values of an earlier slice of one sample: rows, one a token, whose last columns are the
/// keys and then the values of all groups. Rows of qkv are such rows.
#[derive(Clone, Copy, Debug)]
pub struct EarlierRows<'a, T = f32> {
    rows: &'a [T],
    width: usize,
}

impl<'a, T> EarlierRows<'a, T> {
    /// Rows of `width` elements, of a slice that ends on the grid of
    /// [`tokens`](crate::tokens).
    ///
    /// # Panics
    /// Panics if they are not whole rows.
    pub fn new(rows: &'a [T], width: usize) -> Self {
        let tokens = rows.len() / width;
        assert_eq!(tokens * width, rows.len(), "whole rows of {width} elements");
        Self { rows, width }
    }

    /// Tokens of the slice.
    pub fn tokens(&self) -> usize {
        self.rows.len() / self.width
    }
}

/// What the forward of a slice had and left for its backward.
#[derive(Clone, Copy)]
pub struct SliceForward<'a, T = f32> {
    /// The slices before it.
    pub earlier: &'a [EarlierRows<'a, T>],
    /// Its own queries, keys and values.
    pub qkv: &'a [T],
    /// Of each of its queries the logarithm of the sum of exponentials.
    pub sums: &'a [f32],
}

/// Tokens of all these slices.
pub(crate) fn tokens<T>(earlier: &[EarlierRows<'_, T>]) -> usize {
    earlier.iter().map(EarlierRows::tokens).sum()
}

/// The keys or values of `group`, those of earlier slices first and then those of sample `b` of
/// `qkv`.
pub(crate) fn rows_of<'a, T: Copy>(
    earlier: &'a [EarlierRows<'a, T>],
    qkv: &'a [T],
    d: Dims,
    b: usize,
    part: QkvPart,
    group: usize,
) -> impl Iterator<Item = MatrixRows<'a, T>> + Clone {
    let before_end = match part {
        QkvPart::Key => 2 * d.groups - group,
        QkvPart::Value => d.groups - group,
        QkvPart::Query => unreachable!("of the slice itself alone"),
    };
    let own = EarlierRows { rows: &qkv[d.sample(b, d.width())], width: d.width() };
    earlier.iter().copied().chain([own]).map(move |slice| MatrixRows {
        data: slice.rows,
        width: slice.width,
        column: slice.width - before_end * d.d,
        from: 0,
        to: slice.tokens(),
    })
}

/// A copy of rows of `d` columns, one after another, from the first `skipped` on.
pub(crate) fn gathered<'a, T: Copy + 'a>(
    rows: impl Iterator<Item = MatrixRows<'a, T>>,
    d: usize,
    skipped: usize,
) -> Vec<T> {
    let mut all = Vec::new();
    let mut skipped = skipped;
    for part in rows {
        let from = part.to.min(part.from + skipped);
        skipped -= from - part.from;
        MatrixRows { from, ..part }.iter(d).for_each(|row| all.extend_from_slice(row));
    }
    all
}

/// Sums of gradients for keys and values that a backward takes up and adds to: fp32 rows, one a
/// token, of the keys of all groups and then the values, `[tokens, 2·groups·d]` of each slice.
#[derive(Default)]
pub struct EarlierSums<'a> {
    /// What later slices left for this one; none for a sample's last slice.
    pub own: Option<&'a [f32]>,
    /// Of each earlier slice, to be added to.
    pub earlier: Vec<&'a mut [f32]>,
}

/// The columns of one group in them: keys and values.
pub(crate) struct GroupSums<'a> {
    own: Option<[MatrixRows<'a>; 2]>,
    earlier: Vec<[MatMut<'a>; 2]>,
}

impl<'a> EarlierSums<'a> {
    /// The sums of every group of every sample.
    ///
    /// # Panics
    /// Panics if there are several samples, or the sums are of other sizes than the slices.
    pub(crate) fn by_group<T>(
        self,
        d: Dims,
        slices: &[EarlierRows<'_, T>],
    ) -> impl Iterator<Item = GroupSums<'a>> + use<'a, T> {
        let is_any = self.own.is_some() || !self.earlier.is_empty();
        assert!(!is_any || d.b == 1, "slices of one sample, not of {}", d.b);
        let columns = d.groups * d.d;
        let is_right = |(sums, slice): (&&mut [f32], &EarlierRows<T>)| {
            sums.len() == slice.tokens() * 2 * columns
        };
        let all_right = self.earlier.iter().zip(slices).all(is_right);
        assert!(self.earlier.len() == slices.len() && all_right, "sums of earlier slices");
        let mut groups: Vec<GroupSums> = (0..d.b * d.groups)
            .map(|group| GroupSums {
                own: self.own.map(|own| own_of(own, d, group)),
                earlier: vec![],
            })
            .collect();
        for sums in self.earlier {
            let tokens = sums.len() / (2 * columns);
            let (keys, values) = MatMut::new(sums, tokens, 2 * columns).split_cols(columns);
            let both = keys.bands(d.d).zip(values.bands(d.d));
            for (group, ((_, keys), (_, values))) in groups.iter_mut().zip(both) {
                group.earlier.push([keys, values]);
            }
        }
        groups.into_iter()
    }
}

/// A group's keys and values in a slice's own sums.
fn own_of(own: &[f32], d: Dims, group: usize) -> [MatrixRows<'_>; 2] {
    let width = 2 * d.groups * d.d;
    assert_eq!(own.len(), d.s * width, "sums for the slice's own keys and values");
    let at = |column| MatrixRows { data: own, width, column, from: 0, to: d.s };
    [at(group * d.d), at((d.groups + group) * d.d)]
}

impl GroupSums<'_> {
    /// Sets the gradients of keys and of values of all slices, rows `stride` apart, of which the
    /// first is that of token `first`, to what later slices left.
    pub(crate) fn load(&mut self, to: [&mut [f32]; 2], stride: usize, d: usize, first: usize) {
        for (which, to) in to.into_iter().enumerate() {
            to.fill(0.0);
            let mut to = to.chunks_exact_mut(stride);
            let mut skipped = first;
            for part in self.earlier.iter_mut().map(|slice| &mut slice[which]) {
                for row in skipped.min(part.rows)..part.rows {
                    let to = to.next().expect("a row for each token");
                    to[..d].copy_from_slice(part.row(row));
                }
                skipped = skipped.saturating_sub(part.rows);
            }
            let own = self.own.iter().flat_map(|own| own[which].iter(d));
            own.zip(to).for_each(|(own, to)| to[..d].copy_from_slice(own));
        }
    }

    /// Sets the sums of earlier slices to those of `from`, which are as [`load`](Self::load) has
    /// them.
    pub(crate) fn store(&mut self, from: [&[f32]; 2], stride: usize, first: usize) {
        for (which, from) in from.into_iter().enumerate() {
            let mut from = from.chunks_exact(stride);
            let mut skipped = first;
            for part in self.earlier.iter_mut().map(|slice| &mut slice[which]) {
                for row in skipped.min(part.rows)..part.rows {
                    let row = part.row(row);
                    row.copy_from_slice(&from.next().expect("as loaded")[..row.len()]);
                }
                skipped = skipped.saturating_sub(part.rows);
            }
        }
    }
}
