//! Matrix products over strided views of slices: a checked face of the crate `gemm`.
//!
//! Views prove when made that every element
//! they can reach lies within their slice.

use std::mem::MaybeUninit;
use std::ops::Range;

use gemm::Parallelism;

pub use crate::mat_mut::MatMut;
use crate::mat_mut::reach;
use crate::threads::{self, Fresh, each};

/// A matrix of `rows × cols` elements of a slice, with any strides.
#[derive(Clone, Copy, Debug)]
pub struct MatRef<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> MatRef<'a> {
    /// Rows one after another in `data`.
    ///
    /// # Panics
    /// Panics if `data` is too short, as [`strided`](Self::strided) does.
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// Rows that start `row_stride` elements apart.
    ///
    /// # Panics
    /// Panics if the last element lies outside of `data`.
    pub fn strided(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        let need = reach(rows, cols, row_stride, 1);
        assert!(need <= data.len(), "a matrix of {need} elements in a slice of {}", data.len());
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// The transposed view.
    pub fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    /// (rows, columns).
    pub(crate) fn sizes(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Some of its rows and columns.
    fn part(self, rows: Range<usize>, cols: Range<usize>) -> Self {
        let (r, c) = (rows.len(), cols.len());
        let start = match r * c {
            0 => 0,
            _ => rows.start * self.row_stride + cols.start * self.col_stride,
        };
        Self { data: &self.data[start..], rows: r, cols: c, ..self }
    }
}

/// Elements between rows that map to one set of the first-level cache (64 sets of 64 bytes).
const ALIAS: usize = 1024;
/// Uses of a factor's elements from which a copy pays.
const MIN_USES: usize = 16;

/// Elements of such a copy that are worth a thread.
const COPIED: usize = 1 << 15;

/// A copy with padded rows of a transposed factor whose own rows make packing slow. `uses`: how
/// often the product uses each element.
///
/// Packing a transposed matrix walks down many of its rows at a time. With rows a multiple of 4096
/// bytes apart they all fall into one set of the cache and push each other out: a product of
/// 256×1024×256 then takes up to 1.7 times as long.
struct Unaliased {
    copy: Vec<f32>,
    stride: usize,
}

impl Unaliased {
    fn new(m: MatRef<'_>, uses: usize) -> Option<Self> {
        let padded = Self::padded(m, uses)?;
        let (stride, len) = (m.col_stride, m.rows);
        let mut copy = Fresh::new(m.cols * padded);
        let rows = threads::piece(m.cols, 1, COPIED.div_ceil(padded));
        each(m.data.chunks(rows * stride).zip(copy.parts(rows * padded)), |(rows, mut copy)| {
            for row in rows.chunks(stride).take(copy.len() / padded) {
                copy.extend_from_slice(&row[..len]);
                copy.extend(std::iter::repeat_n(0.0, padded - len));
            }
        });
        Some(Self { copy: copy.done(), stride: padded })
    }

    /// Elements of a padded row, where a copy pays.
    fn padded(m: MatRef<'_>, uses: usize) -> Option<usize> {
        let is_aliased =
            m.row_stride == 1 && m.col_stride > 0 && m.col_stride.is_multiple_of(ALIAS);
        let pays = is_aliased && uses >= MIN_USES && m.rows > 0;
        pays.then(|| m.rows.next_multiple_of(16) + 16)
    }

    /// The matrix `m` again, in the copy.
    fn view(&self, m: MatRef<'_>) -> MatRef<'_> {
        MatRef::strided(&self.copy, m.cols, m.rows, self.stride).t()
    }
}

/// How a product treats the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreMode {
    /// Overwrites it.
    Set,
    /// Is added to it.
    Add,
}

/// `c = scale·a·b` or `c += scale·a·b`.
///
/// # Panics
/// Panics if the sizes do not match.
pub fn gemm(c: MatMut<'_>, store: StoreMode, scale: f32, a: MatRef<'_>, b: MatRef<'_>) {
    assert_eq!((a.rows, a.cols, b.cols), (c.rows, b.rows, c.cols), "sizes of a matrix product");
    by_parts(c, a, b, |mut c, a, b, _| {
        let stride = c.row_stride();
        // SAFETY: the constructors of `MatRef` and `MatMut` checked that every element of the three
        // matrices lies in its slice, the sizes match, and nothing else reaches the elements of `c`
        // while it is borrowed mutably, so that it overlaps neither `a` nor `b`, nor its own rows.
        unsafe { raw(c.as_mut_ptr(), stride, store, scale, a, b) }
    });
}

/// `c += aᵀ·b` for `a: [n, rows of c]` and `b: [n, columns of c]`: a product for each of `blocks`
/// of the n rows, in their order.
///
/// # Panics
/// Panics if the sizes do not match, or a block lies outside.
pub fn add_by_blocks(
    c: &mut [f32],
    a: MatRef<'_>,
    b: MatRef<'_>,
    blocks: impl Iterator<Item = Range<usize>>,
) {
    for block in blocks {
        assert!(block.end <= a.rows.min(b.rows), "rows {block:?} of {} and {}", a.rows, b.rows);
        let (a, b) = (a.part(block.clone(), 0..a.cols), b.part(block, 0..b.cols));
        gemm(MatMut::new(c, a.cols, b.cols), StoreMode::Add, 1.0, a.t(), b);
    }
}

/// The product `scale·a·b` in a fresh vector, row-major.
///
/// # Panics
/// Panics if the sizes do not match.
pub fn product(scale: f32, a: MatRef<'_>, b: MatRef<'_>) -> Vec<f32> {
    assert_eq!(a.cols, b.rows, "sizes of a matrix product");
    let len = a.rows * b.cols;
    let mut c = Vec::<f32>::with_capacity(len);
    let fresh = MatMut::new(&mut c.spare_capacity_mut()[..len], a.rows, b.cols);
    by_parts(fresh, a, b, |mut c, a, b, _| {
        let stride = c.row_stride();
        // SAFETY: `c` has room for the product, as above; with `Store::Set` none of it is read.
        unsafe { raw(c.as_mut_ptr().cast(), stride, StoreMode::Set, scale, a, b) }
    });
    // SAFETY: the parts are all of `c`, and each product wrote every element of its part.
    unsafe { c.set_len(len) };
    c
}

/// x·w + bias for one bias a column, in a fresh vector, row-major: the product is added to rows of
/// the bias, `block` rows at a time.
///
/// # Panics
/// Panics if the sizes do not match.
pub fn affine(x: MatRef<'_>, w: MatRef<'_>, bias: &[f32], block: usize) -> Vec<f32> {
    assert_eq!((x.cols, w.cols), (w.rows, bias.len()), "sizes of a linear map");
    let len = x.rows * w.cols;
    let mut y = Vec::<f32>::with_capacity(len);
    let fresh = MatMut::new(&mut y.spare_capacity_mut()[..len], x.rows, w.cols);
    for (from, y) in fresh.blocks(block) {
        let x = x.part(from..from + y.rows, 0..x.cols);
        by_parts(y, x, w, |y, x, w, columns| affine_part(y, x, w, &bias[columns]));
    }
    // SAFETY: the blocks and their parts are all of `y`; each was written with the bias.
    unsafe { y.set_len(len) };
    y
}

fn affine_part(mut y: MatMut<'_, MaybeUninit<f32>>, x: MatRef<'_>, w: MatRef<'_>, bias: &[f32]) {
    for i in 0..y.rows {
        y.row(i).write_copy_of_slice(bias);
    }
    let stride = y.row_stride();
    // SAFETY: as in `gemm`; every element was just written.
    unsafe { raw(y.as_mut_ptr().cast(), stride, StoreMode::Add, 1.0, x, w) }
}

/// Multiply-adds that are worth a thread.
const WORK: usize = 1 << 19;
/// Least rows or columns of a part, and least columns or rows on the other side of it. A product of
/// fewer may be computed in another order: of at most 64 × 64, of a single row or column, or of at
/// most 256 elements. So whatever is cut has the bits that it has whole.
const PART: usize = 96;
const SIDE: usize = 16;

/// Elements of a copy from which it is made in parts, so that a product reads each from the cache;
/// and the least rows or columns of a part that is cut for that, as each packs the other factor.
const COPIED_AT_ONCE: usize = 1 << 22;
const COPIED_SIDE: usize = 1024;

/// Calls `f` with parts of `c = a·b` that cover it, and the factors and columns of each: a part for
/// each thread, cut along the longer side, or more where the factor that is cut is copied.
fn by_parts<'c, T: Send>(
    c: MatMut<'c, T>,
    a: MatRef<'_>,
    b: MatRef<'_>,
    f: impl Fn(MatMut<'c, T>, MatRef<'_>, MatRef<'_>, Range<usize>) + Sync,
) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    let (long, side, by_columns) = (m.max(n), m.min(n), n >= m);
    // All parts read the one factor; each copies what it reads of the other.
    let all = if by_columns { Unaliased::new(a, n) } else { Unaliased::new(b, m) };
    let (a, b) = match &all {
        Some(copy) if by_columns => (copy.view(a), b),
        Some(copy) => (a, copy.view(b)),
        None => (a, b),
    };
    let f = |c: MatMut<'c, T>, a: MatRef<'_>, b: MatRef<'_>, columns: Range<usize>| {
        let own = if by_columns { Unaliased::new(b, m) } else { Unaliased::new(a, n) };
        match &own {
            Some(copy) if by_columns => f(c, a, copy.view(b), columns),
            Some(copy) => f(c, copy.view(a), b, columns),
            None => f(c, a, b, columns),
        }
    };
    let is_copied = Unaliased::padded(if by_columns { b } else { a }, side).is_some();
    let copied = if is_copied { long.saturating_mul(k) } else { 0 };
    let pieces = (copied / COPIED_AT_ONCE).min(long / COPIED_SIDE);
    let work = (m * n).saturating_mul(k);
    let parts = threads::count().min(work / WORK).max(pieces).min(long / PART).max(1);
    if parts == 1 || side < SIDE {
        return f(c, a, b, 0..n);
    }
    // The last part takes what is left over: a short one would have its own order.
    let end = |i: usize| if i == parts { long } else { long * i / parts / 16 * 16 };
    let ranges = (0..parts).map(|i| end(i)..end(i + 1));
    let mut rest = Some(c);
    let mut first = |len: usize| {
        let c = rest.take().expect("put back");
        let (part, others) = if n >= m { c.split_cols(len) } else { c.split_rows(len) };
        rest = Some(others);
        part
    };
    let cut: Vec<_> = ranges.map(|range| (first(range.len()), range)).collect();
    each(cut, |(c, range)| match n >= m {
        true => f(c, a, b.part(0..k, range.clone()), range),
        false => f(c, a.part(range, 0..k), b, 0..n),
    });
}

/// The call itself.
///
/// # Safety
/// `c` must point to a.rows rows of b.cols writable elements, `c_stride` apart and not overlapping
/// each other nor `a` nor `b`; initialised if `store` is `Add`. `a.cols` must be `b.rows`.
unsafe fn raw(
    c: *mut f32,
    c_stride: usize,
    store: StoreMode,
    scale: f32,
    a: MatRef<'_>,
    b: MatRef<'_>,
) {
    // Strides of slices fit into isize.
    let stride = |s: usize| s as isize;
    // SAFETY: the views checked their bounds; `c` is the caller's promise.
    unsafe {
        gemm::gemm(
            a.rows,
            b.cols,
            a.cols,
            c,
            1,
            stride(c_stride),
            store == StoreMode::Add,
            a.data.as_ptr(),
            stride(a.col_stride),
            stride(a.row_stride),
            b.data.as_ptr(),
            stride(b.col_stride),
            stride(b.row_stride),
            1.0,
            scale,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 300,
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn agrees_with_the_definition(
            m in 0..40_usize, n in 0..40_usize, k in 0..40_usize, pad in 0..3_usize,
            ta: bool, tb: bool, add: bool, seed: u32,
        ) {
            let bits = |i: usize| (i as u32).wrapping_mul(2_654_435_761) ^ seed;
            let value = |i: usize| bits(i) as f32 / 4e9 - 0.5;
            let (ar, ac) = if ta { (k, m) } else { (m, k) };
            let (br, bc) = if tb { (n, k) } else { (k, n) };
            let a: Vec<f32> = (0..ar * (ac + pad)).map(value).collect();
            let b: Vec<f32> = (0..br * (bc + pad)).map(|i| value(i + 7777)).collect();
            let (aw, bw) = (ac + pad, bc + pad);
            let at = |i: usize, l: usize| if ta { a[l * aw + i] } else { a[i * aw + l] };
            let bt = |l: usize, j: usize| if tb { b[j * bw + l] } else { b[l * bw + j] };
            let old: Vec<f32> = (0..m * (n + pad)).map(|i| value(i + 99)).collect();
            let av = MatRef::strided(&a, ar, ac, ac + pad);
            let bv = MatRef::strided(&b, br, bc, bc + pad);
            let (av, bv) = (if ta { av.t() } else { av }, if tb { bv.t() } else { bv });
            let mut c = old.clone();
            let store = if add { StoreMode::Add } else { StoreMode::Set };
            gemm(MatMut::strided(&mut c, m, n, n + pad), store, 0.5, av, bv);
            let fresh = product(0.5, av, bv);
            for i in 0..m {
                for j in 0..n + pad {
                    let at_c = i * (n + pad) + j;
                    if j >= n {
                        prop_assert_eq!(c[at_c], old[at_c]);
                        continue;
                    }
                    let term = |l: usize| f64::from(at(i, l)) * f64::from(bt(l, j));
                    let want: f64 = (0..k).map(term).sum::<f64>() * 0.5;
                    prop_assert!((f64::from(fresh[i * n + j]) - want).abs() < 1e-5);
                    let want = want + if add { f64::from(old[at_c]) } else { 0.0 };
                    prop_assert!((f64::from(c[at_c]) - want).abs() < 1e-5);
                }
            }
        }
    }

    /// Rows 4096 bytes apart are copied, at once or a part after the other; that changes no bit.
    #[test]
    fn padded_copies_change_nothing() {
        let value = |i: usize| (i as u32).wrapping_mul(2_654_435_761) as f32 / 4e9 - 0.5;
        for (m, n, k) in [(40, 70, 1000), (40, 9000, 1000)] {
            let wide: Vec<f32> = (0..n * ALIAS).map(value).collect();
            let narrow: Vec<f32> = wide.chunks(ALIAS).flat_map(|row| &row[..k]).copied().collect();
            let a: Vec<f32> = (0..m * k).map(|i| value(i + 5)).collect();
            let a = MatRef::new(&a, m, k);
            let aliased = MatRef::strided(&wide, n, k, ALIAS);
            let (plain, b) = (MatRef::new(&narrow, n, k), aliased.t());
            assert!(Unaliased::new(b, m).is_some() && Unaliased::new(plain.t(), m).is_none());
            assert_eq!(product(1.0, a, b), product(1.0, a, plain.t()));
            let c: Vec<f32> = (0..n * m).map(value).collect();
            let c = MatRef::new(&c, n, m);
            assert!(Unaliased::new(aliased.t(), m).is_some());
            assert_eq!(product(1.0, aliased.t(), c), product(1.0, plain.t(), c));
        }
    }

    /// One row as all rows, on either side, however often a product reads it.
    #[test]
    fn a_row_may_stand_for_many() {
        for uses in [2, 20, 200] {
            let row = [1.0, 2.0, 3.0, 4.0];
            let many = MatRef::strided(&row, 20, 4, 0);
            let ones = vec![1.0; uses * 20];
            let sums = product(1.0, MatRef::new(&ones, uses, 20), many);
            assert!(sums.chunks(4).all(|sums| sums == [20.0, 40.0, 60.0, 80.0]));
            let fours = vec![1.0; uses * 4];
            let sums = product(1.0, MatRef::new(&fours, uses, 4), many.t());
            assert!(sums.len() == uses * 20 && sums.iter().all(|sum| *sum == 10.0));
        }
    }

    #[test]
    #[should_panic(expected = "a matrix of 6 elements in a slice of 5")]
    fn short_slices_are_refused() {
        MatRef::new(&[0.0; 5], 2, 3);
    }
}
