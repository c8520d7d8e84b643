//! Matrix products over strided views of slices: a checked face of the crate `gemm`.
//!
//! Views prove when made that every element
//! they can reach lies within their slice.

use gemm::Parallelism;

/// A matrix of `rows × cols` elements of a slice, with any strides.
#[derive(Clone, Copy, Debug)]
pub struct MatRef<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

/// A matrix of `rows × cols` elements of a slice to write: rows do not overlap.
#[derive(Debug)]
pub struct MatMut<'a> {
    data: &'a mut [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
}

/// Elements that a slice must have for the last element of a matrix to be in it.
fn reach(rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> usize {
    if rows == 0 || cols == 0 {
        return 0;
    }
    let last = (rows - 1).checked_mul(row_stride).zip((cols - 1).checked_mul(col_stride));
    let reach = last.and_then(|(r, c)| r.checked_add(c)?.checked_add(1));
    reach.expect("matrix sizes fit into usize")
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
}

impl<'a> MatMut<'a> {
    /// Rows one after another in `data`.
    ///
    /// # Panics
    /// Panics if `data` is too short, as [`strided`](Self::strided) does.
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// Rows that start `row_stride` elements apart.
    ///
    /// # Panics
    /// Panics if the last element lies outside of `data` or rows overlap.
    pub fn strided(data: &'a mut [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        let need = reach(rows, cols, row_stride, 1);
        assert!(need <= data.len(), "a matrix of {need} elements in a slice of {}", data.len());
        assert!(cols <= row_stride || rows <= 1, "rows of {cols} elements {row_stride} apart");
        Self { data, rows, cols, row_stride }
    }
}

/// Elements between rows that map to one set of the first-level cache (64 sets of 64 bytes).
const ALIAS: usize = 1024;
/// Uses of a factor's elements from which a copy pays.
const MIN_USES: usize = 16;

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
        let (stride, len) = (m.col_stride, m.rows);
        if m.row_stride != 1 || !stride.is_multiple_of(ALIAS) || uses < MIN_USES || len == 0 {
            return None;
        }
        let padded = len.next_multiple_of(16) + 16;
        let mut copy = Vec::with_capacity(m.cols * padded);
        for row in m.data.chunks(stride).take(m.cols) {
            copy.extend_from_slice(&row[..len]);
            copy.resize(copy.len() + padded - len, 0.0);
        }
        Some(Self { copy, stride: padded })
    }

    /// The matrix `m` again, in the copy.
    fn view(&self, m: MatRef<'_>) -> MatRef<'_> {
        MatRef::strided(&self.copy, m.cols, m.rows, self.stride).t()
    }
}

/// What a product does with the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// Overwrites it.
    Set,
    /// Is added to it.
    Add,
}

/// `c = scale·a·b` or `c += scale·a·b`, on the calling thread.
///
/// # Panics
/// Panics if the sizes do not match.
pub fn gemm(c: MatMut<'_>, store: Store, scale: f32, a: MatRef<'_>, b: MatRef<'_>) {
    assert_eq!((a.rows, a.cols, b.cols), (c.rows, b.rows, c.cols), "sizes of a matrix product");
    let stride = |s: usize| isize::try_from(s).expect("strides were checked against a slice");
    // SAFETY: the constructors of `MatRef` and `MatMut` checked that every element of the three
    // matrices lies in its slice, the sizes match, `c` is borrowed mutably so that it overlaps
    // neither `a` nor `b`, and its own rows do not overlap.
    unsafe { raw(c.data.as_mut_ptr(), stride(c.row_stride), store, scale, a, b) }
}

/// The product `scale·a·b` in a fresh vector, row-major.
///
/// # Panics
/// Panics if the sizes do not match.
pub fn product(scale: f32, a: MatRef<'_>, b: MatRef<'_>) -> Vec<f32> {
    assert_eq!(a.cols, b.rows, "sizes of a matrix product");
    let len = a.rows * b.cols;
    let mut c = Vec::<f32>::with_capacity(len);
    let stride = isize::try_from(b.cols).expect("rows of a vector fit into isize");
    // SAFETY: `c` has room for a.rows × b.cols elements; the product writes every one of them and,
    // told to set them, reads none. All of them are initialised when the length is set.
    unsafe {
        raw(c.as_mut_ptr(), stride, Store::Set, scale, a, b);
        c.set_len(len);
    }
    c
}

/// The call itself.
///
/// # Safety
/// `c` must point to a.rows rows of b.cols writable elements, `c_stride` apart and not overlapping
/// each other nor `a` nor `b`; initialised if `store` is `Add`. `a.cols` must be `b.rows`.
unsafe fn raw(
    c: *mut f32,
    c_stride: isize,
    store: Store,
    scale: f32,
    a: MatRef<'_>,
    b: MatRef<'_>,
) {
    let stride = |s: usize| s as isize;
    let copies = (Unaliased::new(a, b.cols), Unaliased::new(b, a.rows));
    let a = copies.0.as_ref().map_or(a, |copy| copy.view(a));
    let b = copies.1.as_ref().map_or(b, |copy| copy.view(b));
    // SAFETY: the views checked their bounds; `c` is the caller's promise.
    unsafe {
        gemm::gemm(
            a.rows,
            b.cols,
            a.cols,
            c,
            1,
            c_stride,
            store == Store::Add,
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
            let store = if add { Store::Add } else { Store::Set };
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

    /// Rows 4096 bytes apart are copied; that changes no bit.
    #[test]
    fn padded_copies_change_nothing() {
        let value = |i: usize| (i as u32).wrapping_mul(2_654_435_761) as f32 / 4e9 - 0.5;
        let (m, n, k) = (40, 70, 1000);
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

    #[test]
    #[should_panic(expected = "a matrix of 6 elements in a slice of 5")]
    fn short_slices_are_refused() {
        MatRef::new(&[0.0; 5], 2, 3);
    }
}
