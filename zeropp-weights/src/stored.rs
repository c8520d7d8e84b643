//! A tensor where it lies.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use zeropp_data::files::{Mapped, open_regular};

use crate::encoding::Encoding;
use crate::error::{Checked, unreadable};

/// A file that is mapped.
#[derive(Debug)]
pub(crate) struct MappedFile {
    pub(crate) path: PathBuf,
    pub(crate) bytes: Mapped,
}

impl MappedFile {
    pub(crate) fn open(path: &Path) -> Checked<Arc<MappedFile>> {
        let file = open_regular(path).map_err(unreadable(path))?;
        let bytes = Mapped::new(&file).map_err(unreadable(path))?;
        Ok(Arc::new(MappedFile { path: path.into(), bytes }))
    }
}

/// In which order the rows of a matrix are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// As they are named.
    AsNamed,
    /// Those of each of this many heads interleaved: row i of the first half of a head stands
    /// before row i of the second half, as GGUF has llama's queries and keys.
    Interleaved { heads: usize },
}

impl RowOrder {
    /// Where row `row` of `rows` is stored.
    pub(crate) fn stored(self, row: usize, rows: usize) -> usize {
        match self {
            RowOrder::AsNamed => row,
            RowOrder::Interleaved { heads } => {
                let head = rows / heads;
                let (first, within) = (row / head * head, row % head);
                let half = head / 2;
                first + within % half * 2 + within / half
            }
        }
    }
}

/// A tensor of a file: its name, as Hugging Face has it, and where its elements are.
#[derive(Clone, Debug)]
pub struct StoredTensor {
    /// The name.
    pub name: String,
    /// Dimensions, the last one contiguous.
    pub shape: Vec<usize>,
    /// How its elements are stored.
    pub encoding: Encoding,
    pub(crate) rows: RowOrder,
    pub(crate) file: Arc<MappedFile>,
    /// First byte in the file.
    pub(crate) start: usize,
    /// Number of bytes.
    pub(crate) bytes: usize,
}

impl StoredTensor {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Number of bytes in the file.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The file that has it.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    pub(crate) fn raw(&self) -> &[u8] {
        &self.file.bytes[self.start..self.start + self.bytes]
    }

    /// Elements from number `start` on, in row-major order of [`shape`](Self::shape).
    ///
    /// # Panics
    /// Panics beyond the end, and where the encoding is not read.
    pub(crate) fn decode(&self, start: usize, out: &mut [f32]) {
        if self.rows == RowOrder::AsNamed {
            return self.encoding.decode(self.raw(), start, out);
        }
        let (rows, columns) = (self.shape[0], self.elements() / self.shape[0]);
        let mut done = 0;
        while done < out.len() {
            let (row, column) = ((start + done) / columns, (start + done) % columns);
            let n = (columns - column).min(out.len() - done);
            let at = self.rows.stored(row, rows) * columns + column;
            self.encoding.decode(self.raw(), at, &mut out[done..done + n]);
            done += n;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_rows_are_a_permutation_inside_each_head() {
        let stored: Vec<usize> =
            (0..8).map(|row| RowOrder::Interleaved { heads: 2 }.stored(row, 8)).collect();
        assert_eq!(stored, [0, 2, 1, 3, 4, 6, 5, 7]);
        let wide: Vec<usize> =
            (0..8).map(|row| RowOrder::Interleaved { heads: 1 }.stored(row, 8)).collect();
        assert_eq!(wide, [0, 2, 4, 6, 1, 3, 5, 7]);
    }
}
