//! Matrices to be written, and parts of them for several threads.

use std::marker::PhantomData;
use std::ops::Range;

/// A matrix of `rows × cols` elements of a slice to write: rows do not overlap. Of what lies
/// between its rows, others may write.
#[derive(Debug)]
pub struct MatMut<'a, T = f32> {
    start: *mut T,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    row_stride: usize,
    data: PhantomData<&'a mut [T]>,
}

// SAFETY: as a mutable slice; only this matrix reaches its elements.
unsafe impl<T: Send> Send for MatMut<'_, T> {}

/// Elements that a slice must have for the last element of a matrix to be in it.
pub(crate) fn reach(rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> usize {
    if rows == 0 || cols == 0 {
        return 0;
    }
    let last = (rows - 1).checked_mul(row_stride).zip((cols - 1).checked_mul(col_stride));
    let reach = last.and_then(|(r, c)| r.checked_add(c)?.checked_add(1));
    reach.expect("matrix sizes fit into usize")
}

impl<'a, T> MatMut<'a, T> {
    /// Rows one after another in `data`.
    ///
    /// # Panics
    /// Panics if `data` is too short, as [`strided`](Self::strided) does.
    pub fn new(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// Rows that start `row_stride` elements apart.
    ///
    /// # Panics
    /// Panics if the last element lies outside of `data` or rows overlap.
    pub fn strided(data: &'a mut [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        let need = reach(rows, cols, row_stride, 1);
        assert!(need <= data.len(), "a matrix of {need} elements in a slice of {}", data.len());
        assert!(cols <= row_stride || rows <= 1, "rows of {cols} elements {row_stride} apart");
        Self { start: data.as_mut_ptr(), rows, cols, row_stride, data: PhantomData }
    }

    /// Elements from the start of a row to that of the next.
    pub(crate) fn row_stride(&self) -> usize {
        self.row_stride
    }

    /// The first element. Only the elements of the rows may be reached from it.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut T {
        self.start
    }

    /// The elements of a row.
    pub(crate) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: the row lies in the slice, as the constructor checked, and is borrowed with the
        // matrix, which alone reaches it.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.row_stride), self.cols) }
    }

    /// Some of its rows and columns.
    pub(crate) fn part(&mut self, rows: Range<usize>, cols: Range<usize>) -> MatMut<'_, T> {
        let (_, rest) = self.whole().split_cols(cols.start);
        let (cols, _) = rest.split_cols(cols.len());
        let (_, rest) = cols.split_rows(rows.start);
        rest.split_rows(rows.len()).0
    }

    fn whole(&mut self) -> MatMut<'_, T> {
        MatMut { data: PhantomData, ..*self }
    }

    /// The first `cols` columns and the others.
    pub(crate) fn split_cols(self, cols: usize) -> (Self, Self) {
        assert!(cols <= self.cols, "{cols} of {} columns", self.cols);
        let rest = Self { start: self.start.wrapping_add(cols), cols: self.cols - cols, ..self };
        (Self { cols, ..self }, rest)
    }

    /// The first `rows` rows and the others.
    pub(crate) fn split_rows(self, rows: usize) -> (Self, Self) {
        assert!(rows <= self.rows, "{rows} of {} rows", self.rows);
        let start = self.start.wrapping_add(rows * self.row_stride);
        (Self { rows, ..self }, Self { start, rows: self.rows - rows, ..self })
    }

    /// Its bands of `cols` columns each, the last one narrower, with their first column.
    pub(crate) fn bands(self, cols: usize) -> impl Iterator<Item = (usize, Self)> {
        let all = self.cols;
        let mut rest = Some(self);
        (0..all).step_by(cols.max(1)).map(move |from| {
            let (band, others) = rest.take().expect("put back").split_cols(cols.min(all - from));
            rest = Some(others);
            (from, band)
        })
    }

    /// Its blocks of `rows` rows each, the last one lower, with their first row.
    pub(crate) fn blocks(self, rows: usize) -> impl Iterator<Item = (usize, Self)> {
        let all = self.rows;
        let mut rest = Some(self);
        (0..all).step_by(rows.max(1)).map(move |from| {
            let (block, others) = rest.take().expect("put back").split_rows(rows.min(all - from));
            rest = Some(others);
            (from, block)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_a_matrix_and_nothing_else() {
        let mut data = vec![0; 4 * 7 + 5];
        let m = MatMut::strided(&mut data, 5, 5, 7);
        let bands: Vec<_> = m.bands(2).collect();
        assert_eq!(
            bands.iter().map(|(from, band)| (*from, band.cols)).collect::<Vec<_>>(),
            [(0, 2), (2, 2), (4, 1)]
        );
        for (from, band) in bands.into_iter().rev() {
            for (first, mut block) in band.blocks(3) {
                for i in 0..block.rows {
                    block.row(i).iter_mut().enumerate().for_each(|(j, x)| {
                        *x = 1 + (first + i) * 10 + from + j;
                    });
                }
            }
        }
        for (i, row) in data.chunks(7).enumerate() {
            for (j, x) in row.iter().enumerate() {
                assert_eq!(*x, if j < 5 { 1 + i * 10 + j } else { 0 });
            }
        }
        let mut m = MatMut::strided(&mut data, 5, 5, 7);
        let mut part = m.part(1..3, 2..4);
        assert_eq!((part.rows, part.row(1)), (2, [23, 24].as_mut_slice()));
    }

    #[test]
    #[should_panic(expected = "6 of 5 columns")]
    fn parts_end_at_the_matrix() {
        MatMut::new(&mut [0; 10], 2, 5).part(0..1, 6..6);
    }
}
