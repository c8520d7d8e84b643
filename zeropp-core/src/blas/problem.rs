//! A product as cuBLASLt is asked for it.
//!
//! Tensors lie row after row, and the library's matrices column after column: what it sees is the
//! transpose of a tensor. D = X·Y for rows is Dᵀ = Yᵀ·Xᵀ for columns, so that Y is its first
//! factor, A, and X its second, B.

use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

/// The most that algorithms ask of an address, in bytes.
const ALIGNMENT_MAX: u64 = 256;

/// How a tensor's matrices lie in memory, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Placement {
    /// Whether the elements of a column follow each other, and not those of a row.
    pub(crate) by_columns: bool,
    /// From one row to the next, or from one column.
    pub(crate) pitch: usize,
    /// From one matrix to the next.
    pub(crate) batch_stride: usize,
    /// What the first element's address is a multiple of, in bytes.
    pub(crate) alignment: u32,
}

impl Placement {
    /// How the matrices `[.., rows, columns]` of these strides lie; none where that is not rows or
    /// columns at one distance.
    pub(crate) fn of(shape: &[usize], strides: &[usize], first_byte: u64) -> Option<Placement> {
        let (outer, [rows, columns]) = shape.split_last_chunk::<2>()?;
        let (outer_strides, [down, right]) = strides.split_last_chunk::<2>()?;
        let pitch_of = |lines: usize, length: usize, pitch: usize, step: usize| {
            let pitch = if lines == 1 { length.max(1) } else { pitch };
            ((length == 1 || step == 1) && pitch >= length).then_some(pitch)
        };
        let by_rows = pitch_of(*rows, *columns, *down, *right);
        let pitch = by_rows.or_else(|| pitch_of(*columns, *rows, *right, *down))?;
        let batch_stride = stride_of_all(outer, outer_strides)?;
        let alignment = alignment(first_byte);
        Some(Placement { by_columns: by_rows.is_none(), pitch, batch_stride, alignment })
    }

    /// The tensor and how it lies, or a copy of it that lies row after row.
    pub(crate) fn or_copy(tensor: CubeTensor) -> Option<(CubeTensor, Placement)> {
        let of = |t: &CubeTensor| {
            let first = t.handle.offset_start.unwrap_or(0);
            Placement::of(t.meta.shape(), t.meta.strides(), first)
        };
        if !tensor.meta.is_tiled()
            && let Some(placement) = of(&tensor)
        {
            return Some((tensor, placement));
        }
        let tensor = into_contiguous(tensor);
        let placement = of(&tensor)?;
        Some((tensor, placement))
    }
}

/// What an address is a multiple of so far into a block of CubeCL's, in bytes.
pub(crate) fn alignment(first_byte: u64) -> u32 {
    ALIGNMENT_MAX.min(1 << first_byte.trailing_zeros().min(63)) as u32
}

/// The stride between matrices, if all outer dimensions are one.
fn stride_of_all(shape: &[usize], strides: &[usize]) -> Option<usize> {
    let mut all: Option<(usize, usize)> = None;
    for (n, stride) in shape.iter().zip(strides).rev().filter(|(n, _)| **n != 1) {
        all = match all {
            None => Some((*n, *stride)),
            Some((inner, first)) if *stride == inner * first => Some((inner * n, first)),
            Some(_) => return None,
        };
    }
    Some(all.map_or(0, |(_, first)| first))
}

/// Products of one kind: D = X·Y (+ D) for `batch` pairs `[m, k]` and `[k, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Problem {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) batch: usize,
    /// The type of both factors.
    pub(crate) factors: DType,
    /// fp32 factors are rounded to TF32.
    pub(crate) tf32: bool,
    /// The type of D.
    pub(crate) result: DType,
    pub(crate) x: Placement,
    pub(crate) y: Placement,
    /// D lies row after row.
    pub(crate) d: Placement,
    /// What is done with a vector in the type of D, and its alignment, where there is one.
    pub(crate) vector: Option<(Beside, u32)>,
}

/// What a product does with a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Beside {
    /// It is added to each row of D.
    Bias,
    /// The sums of Y's columns are written there.
    ColumnSums,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(shape: &[usize], strides: &[usize], first: u64) -> Option<(bool, usize, usize, u32)> {
        let p = Placement::of(shape, strides, first)?;
        Some((p.by_columns, p.pitch, p.batch_stride, p.alignment))
    }

    #[test]
    fn rows_and_columns_at_one_distance_are_read_as_they_lie() {
        assert_eq!(place(&[3, 5], &[5, 1], 0), Some((false, 5, 0, 256)));
        // A transposed tensor, and columns of a wider one.
        assert_eq!(place(&[5, 3], &[1, 5], 512), Some((true, 5, 0, 256)));
        assert_eq!(place(&[3, 4], &[12, 1], 24), Some((false, 12, 0, 8)));
        // One row or column, whatever its own stride is.
        assert_eq!(place(&[1, 5], &[77, 1], 0), Some((false, 5, 0, 256)));
        assert_eq!(place(&[5, 1], &[9, 77], 2), Some((false, 9, 0, 2)));
        assert_eq!(place(&[1, 5], &[1, 9], 0), Some((true, 9, 0, 256)));
        assert_eq!(place(&[1, 1], &[0, 0], 0), Some((false, 1, 0, 256)));
        // Every second column, and rows that are one.
        assert_eq!(place(&[3, 4], &[12, 2], 0), None);
        assert_eq!(place(&[3, 4], &[0, 1], 0), None);
    }

    #[test]
    fn outer_dimensions_are_one_batch_where_one_stride_leads_through_them() {
        assert_eq!(place(&[2, 7, 3, 5], &[105, 15, 5, 1], 0), Some((false, 5, 15, 256)));
        assert_eq!(place(&[2, 1, 3, 5], &[15, 99, 5, 1], 0), Some((false, 5, 15, 256)));
        assert_eq!(place(&[2, 7, 3, 5], &[0, 0, 5, 1], 0), Some((false, 5, 0, 256)));
        assert_eq!(place(&[2, 7, 3, 5], &[15, 30, 5, 1], 0), None);
        // Heads of a tensor whose tokens have all of them.
        assert_eq!(place(&[4, 3, 8], &[8, 32, 1], 0), Some((false, 32, 8, 256)));
    }
}
