//! Rows of a matrix that lies within another one.

/// Rows `from..to` of a matrix with rows of `width` elements, the columns from `column` on.
#[derive(Clone, Copy)]
pub(crate) struct MatrixRows<'a, T = f32> {
    pub(crate) data: &'a [T],
    pub(crate) width: usize,
    pub(crate) column: usize,
    pub(crate) from: usize,
    pub(crate) to: usize,
}

impl<'a, T> MatrixRows<'a, T> {
    /// The first `d` columns of every row.
    pub(crate) fn iter(self, d: usize) -> impl Iterator<Item = &'a [T]> {
        (self.from..self.to).map(move |row| &self.data[row * self.width + self.column..][..d])
    }
}
