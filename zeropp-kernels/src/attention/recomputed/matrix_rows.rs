//! Rows of a matrix that lies within another one.

/// Rows `from..to` of a matrix with rows of `width` elements, the columns from `column` on.
#[derive(Clone, Copy)]
pub(super) struct MatrixRows<'a> {
    pub(super) data: &'a [f32],
    pub(super) width: usize,
    pub(super) column: usize,
    pub(super) from: usize,
    pub(super) to: usize,
}

impl<'a> MatrixRows<'a> {
    /// The first `d` columns of every row.
    pub(super) fn iter(self, d: usize) -> impl Iterator<Item = &'a [f32]> {
        (self.from..self.to).map(move |row| &self.data[row * self.width + self.column..][..d])
    }
}
