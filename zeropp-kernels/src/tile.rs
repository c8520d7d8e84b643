//! The inner tile of the products that attention makes: some rows of a left factor times a panel of
//! columns of a right one, both packed by the caller, so that a matrix which takes part in many
//! products is copied once.
//!
//! Sums have one order: up to [`RUN`] terms are added one after another from zero, by fused
//! multiply-adds where the CPU has them, and the sums of such runs in their order. Neither the
//! sizes of a tile nor the vector width show in the bits.

use std::sync::OnceLock;

/// Terms of a sum that are added up in registers. Packed factors are cut into runs of so many.
pub(crate) const RUN: usize = 256;
/// Elements between the rows of a packed left factor, of one run each: not a multiple of 4096
/// bytes, which would map all rows to one set of the first-level cache.
pub(crate) const ROW: usize = RUN + 16;
/// Columns of a panel, and of a tile.
pub(crate) const PANEL: usize = 32;

/// How the rows of a packed left factor lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// Row i starts at i·[`ROW`], its terms follow each other.
    Plain,
    /// Term t starts at t·[`ROW`], the rows follow each other: the transpose of a plain one.
    Transposed,
}

/// A tile to be computed: rows of [`PANEL`] elements of `c`, `stride` apart.
#[derive(Debug)]
pub(crate) struct Tile<'a> {
    pub(crate) c: &'a mut [f32],
    pub(crate) stride: usize,
    pub(crate) rows: usize,
    /// Whether the product is added to what is there.
    pub(crate) add: bool,
    /// Factor on the product.
    pub(crate) scale: f32,
}

/// `t = scale·a·b` or `t += scale·a·b` with `terms` terms a sum. `b: [terms, PANEL]`.
///
/// # Panics
/// Panics if a factor or the tile reaches out of its slice, or there are more terms than [`RUN`].
#[inline]
pub(crate) fn multiply(t: Tile<'_>, terms: usize, a: &[f32], left: Left, b: &[f32]) {
    // SAFETY: these kernels were chosen for this CPU.
    unsafe { multiply_by(kernels(), t, terms, a, left, b) }
}

/// # Safety
/// The CPU must have the instructions of `kernels`.
#[inline]
unsafe fn multiply_by(
    kernels: &Kernels,
    t: Tile<'_>,
    terms: usize,
    a: &[f32],
    left: Left,
    b: &[f32],
) {
    if t.rows == 0 {
        return;
    }
    assert!(terms <= RUN && PANEL <= t.stride, "a tile's sizes");
    assert!((t.rows - 1) * t.stride + PANEL <= t.c.len(), "a tile within its matrix");
    assert!(terms * PANEL <= b.len(), "a panel of {terms} terms");
    let reach = match left {
        Left::Plain => (t.rows - 1) * ROW + terms,
        Left::Transposed => terms.saturating_sub(1) * ROW + t.rows,
    };
    assert!(reach <= a.len(), "{} rows of {terms} terms", t.rows);
    let (mut c, mut a) = (t.c.as_mut_ptr(), a.as_ptr());
    let mut rows = t.rows;
    while rows > 0 {
        // As many rows to each as there are, so that none has hardly any.
        let now = rows.div_ceil(rows.div_ceil(kernels.rows));
        let f = match left {
            Left::Plain => kernels.plain[now - 1],
            Left::Transposed => kernels.transposed[now - 1],
        };
        let out = TileOutput { c, stride: t.stride, add: t.add, scale: t.scale };
        // SAFETY: the assertions above hold for all rows, and so for `now` of them; the CPU has the
        // instructions, as the caller promises.
        unsafe { f(terms, a, b.as_ptr(), out) };
        rows -= now;
        // What the next rows need lies within the slices as asserted; behind the last row the
        // pointers are not used.
        c = c.wrapping_add(now * t.stride);
        a = a.wrapping_add(if left == Left::Plain { now * ROW } else { now });
    }
}

/// Rows and columns of a square that is transposed at once.
pub(crate) const SQUARE: usize = 16;

/// Writes the transpose of the square at the beginning of `from`, rows `stride` apart, to that of
/// `to`, rows [`PANEL`] apart.
///
/// # Panics
/// Panics if a square reaches out of its slice.
#[inline]
pub(crate) fn transpose(to: &mut [f32], from: &[f32], stride: usize) {
    assert!((SQUARE - 1) * stride + SQUARE <= from.len(), "a square within its matrix");
    assert!((SQUARE - 1) * PANEL + SQUARE <= to.len(), "a square within its panel");
    // SAFETY: both squares lie in their slices, and the table has only functions for instructions
    // that this CPU has.
    unsafe { (kernels().transpose)(to.as_mut_ptr(), from.as_ptr(), stride) }
}

/// Most rows that one pass over a panel takes on this CPU.
pub(crate) fn rows() -> usize {
    kernels().rows
}

#[derive(Clone, Copy)]
struct TileOutput {
    c: *mut f32,
    stride: usize,
    add: bool,
    scale: f32,
}

/// A kernel: terms, left factor, panel, destination.
type Kernel = unsafe fn(usize, *const f32, *const f32, TileOutput);

/// The kernels of an instruction set, by their rows.
struct Kernels {
    rows: usize,
    plain: &'static [Kernel],
    transposed: &'static [Kernel],
    transpose: unsafe fn(*mut f32, *const f32, usize),
}

/// Those for this CPU.
fn kernels() -> &'static Kernels {
    static CHOSEN: OnceLock<&Kernels> = OnceLock::new();
    CHOSEN.get_or_init(best)
}

#[cfg(target_arch = "x86_64")]
fn best() -> &'static Kernels {
    if is_x86_feature_detected!("avx512f") {
        &x86::WIDE
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        &x86::NARROW
    } else {
        &PORTABLE
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn best() -> &'static Kernels {
    &PORTABLE
}

/// A vector register.
trait Vector: Copy {
    const LANES: usize;
    /// # Safety
    /// The CPU must have the instructions, here and below.
    unsafe fn splat(x: f32) -> Self;
    /// # Safety
    /// `p` must point to `LANES` elements.
    unsafe fn load(p: *const f32) -> Self;
    /// # Safety
    /// `p` must point to `LANES` writable elements.
    unsafe fn store(self, p: *mut f32);
    /// self + a·b, rounded once where the CPU can.
    ///
    /// # Safety
    /// As `splat`.
    unsafe fn fma(self, a: Self, b: Self) -> Self;
    /// self·a, and self·a + c where there is a c to be added to.
    ///
    /// # Safety
    /// As `splat`.
    unsafe fn scaled(self, a: Self, c: Option<Self>) -> Self;
}

/// `M` rows of a tile, two vectors of its columns at a time. Element t of row i of the
/// left factor is at `a + i·AI + t·AT`.
///
/// # Safety
/// The asserts of [`multiply`] must hold for `M` rows, and the CPU have the vector instructions.
#[inline(always)]
unsafe fn tile<V: Vector, const M: usize, const AI: usize, const AT: usize>(
    terms: usize,
    a: *const f32,
    b: *const f32,
    out: TileOutput,
) {
    for from in (0..PANEL).step_by(2 * V::LANES) {
        // SAFETY: as the caller promises; rows of a panel and of the tile have `PANEL` elements, a
        // multiple of two vectors.
        unsafe {
            let mut sums = [[V::splat(0.0); 2]; M];
            for t in 0..terms {
                let b = b.add(t * PANEL + from);
                let (b0, b1) = (V::load(b), V::load(b.add(V::LANES)));
                for (i, sums) in sums.iter_mut().enumerate() {
                    let x = V::splat(*a.add(i * AI + t * AT));
                    *sums = [sums[0].fma(x, b0), sums[1].fma(x, b1)];
                }
            }
            let scale = V::splat(out.scale);
            for (i, sums) in sums.iter().enumerate() {
                for (half, sum) in sums.iter().enumerate() {
                    let c = out.c.add(i * out.stride + from + half * V::LANES);
                    let old = if out.add { Some(V::load(c)) } else { None };
                    sum.scaled(scale, old).store(c);
                }
            }
        }
    }
}

/// Plain arithmetic on eight numbers, which the compiler makes vectors of.
#[derive(Clone, Copy)]
struct Plain([f32; 8]);

impl Vector for Plain {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; 8])
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: as the caller promises.
        Self(unsafe { p.cast::<[f32; 8]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: as the caller promises.
        unsafe { p.cast::<[f32; 8]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn fma(mut self, a: Self, b: Self) -> Self {
        for i in 0..8 {
            // Without the instruction a fused one is a slow function.
            self.0[i] = if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
                a.0[i].mul_add(b.0[i], self.0[i])
            } else {
                self.0[i] + a.0[i] * b.0[i]
            };
        }
        self
    }

    #[inline(always)]
    unsafe fn scaled(mut self, a: Self, c: Option<Self>) -> Self {
        for i in 0..8 {
            self.0[i] *= a.0[i];
            if let Some(c) = c {
                self.0[i] += c.0[i];
            }
        }
        self
    }
}

unsafe fn portable<const M: usize, const AI: usize, const AT: usize>(
    terms: usize,
    a: *const f32,
    b: *const f32,
    out: TileOutput,
) {
    // SAFETY: as the caller promises; these vectors need no instructions of their own.
    unsafe { tile::<Plain, M, AI, AT>(terms, a, b, out) }
}

/// # Safety
/// [`transpose`]'s assertions must hold.
unsafe fn square(to: *mut f32, from: *const f32, stride: usize) {
    for (i, j) in (0..SQUARE).flat_map(|i| (0..SQUARE).map(move |j| (i, j))) {
        // SAFETY: as the caller promises.
        unsafe { *to.add(j * PANEL + i) = *from.add(i * stride + j) }
    }
}

macro_rules! rows {
    ($f:ident, $ai:expr, $at:expr, $($m:literal)*) => { &[$($f::<$m, $ai, $at>),*] };
}

static PORTABLE: Kernels = Kernels {
    rows: 4,
    plain: rows!(portable, ROW, 1, 1 2 3 4),
    transposed: rows!(portable, 1, ROW, 1 2 3 4),
    transpose: square,
};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use core::arch::x86_64::*;

    use super::{Kernels, PANEL, ROW, SQUARE, TileOutput, Vector, tile};

    macro_rules! vector {
        ($type:ty, $lanes:literal, $set:ident, $load:ident, $store:ident, $fma:ident, $mul:ident,
         $add:ident) => {
            impl Vector for $type {
                const LANES: usize = $lanes;

                #[inline(always)]
                unsafe fn splat(x: f32) -> Self {
                    // SAFETY: the caller has the instructions.
                    unsafe { $set(x) }
                }

                #[inline(always)]
                unsafe fn load(p: *const f32) -> Self {
                    // SAFETY: as the caller promises.
                    unsafe { $load(p) }
                }

                #[inline(always)]
                unsafe fn store(self, p: *mut f32) {
                    // SAFETY: as the caller promises.
                    unsafe { $store(p, self) }
                }

                #[inline(always)]
                unsafe fn fma(self, a: Self, b: Self) -> Self {
                    // SAFETY: the caller has the instructions.
                    unsafe { $fma(a, b, self) }
                }

                #[inline(always)]
                unsafe fn scaled(self, a: Self, c: Option<Self>) -> Self {
                    // SAFETY: the caller has the instructions.
                    unsafe {
                        let x = $mul(self, a);
                        c.map_or(x, |c| $add(c, x))
                    }
                }
            }
        };
    }

    vector!(
        __m512,
        16,
        _mm512_set1_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_fmadd_ps,
        _mm512_mul_ps,
        _mm512_add_ps
    );
    vector!(
        __m256,
        8,
        _mm256_set1_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_fmadd_ps,
        _mm256_mul_ps,
        _mm256_add_ps
    );

    #[target_feature(enable = "avx512f")]
    unsafe fn wide<const M: usize, const AI: usize, const AT: usize>(
        terms: usize,
        a: *const f32,
        b: *const f32,
        out: TileOutput,
    ) {
        // SAFETY: as the caller promises.
        unsafe { tile::<__m512, M, AI, AT>(terms, a, b, out) }
    }

    #[target_feature(enable = "avx2,fma")]
    unsafe fn narrow<const M: usize, const AI: usize, const AT: usize>(
        terms: usize,
        a: *const f32,
        b: *const f32,
        out: TileOutput,
    ) {
        // SAFETY: as the caller promises.
        unsafe { tile::<__m256, M, AI, AT>(terms, a, b, out) }
    }

    /// # Safety
    /// [`transpose`](super::transpose)'s assertions must hold.
    #[target_feature(enable = "avx512f")]
    unsafe fn square(to: *mut f32, from: *const f32, stride: usize) {
        let (pd, ps) = (|x| _mm512_castps_pd(x), |x| _mm512_castpd_ps(x));
        // SAFETY: as the caller promises, for all loads.
        let r: [_; SQUARE] =
            core::array::from_fn(|i| unsafe { _mm512_loadu_ps(from.add(i * stride)) });
        let mut t = r;
        for i in 0..4 {
            let low = |i: usize| pd(_mm512_unpacklo_ps(r[i], r[i + 1]));
            let high = |i: usize| pd(_mm512_unpackhi_ps(r[i], r[i + 1]));
            let (a, b) = ((low(4 * i), low(4 * i + 2)), (high(4 * i), high(4 * i + 2)));
            t[4 * i] = ps(_mm512_unpacklo_pd(a.0, a.1));
            t[4 * i + 1] = ps(_mm512_unpackhi_pd(a.0, a.1));
            t[4 * i + 2] = ps(_mm512_unpacklo_pd(b.0, b.1));
            t[4 * i + 3] = ps(_mm512_unpackhi_pd(b.0, b.1));
        }
        // Quarter q of t[4i + j] now has column 4q + j of the rows 4i to 4i + 3.
        for j in 0..4 {
            let even = |i: usize| _mm512_shuffle_f32x4::<0x88>(t[4 * i + j], t[4 * i + 4 + j]);
            let odd = |i: usize| _mm512_shuffle_f32x4::<0xdd>(t[4 * i + j], t[4 * i + 4 + j]);
            let columns = [
                (j, _mm512_shuffle_f32x4::<0x88>(even(0), even(2))),
                (4 + j, _mm512_shuffle_f32x4::<0x88>(odd(0), odd(2))),
                (8 + j, _mm512_shuffle_f32x4::<0xdd>(even(0), even(2))),
                (12 + j, _mm512_shuffle_f32x4::<0xdd>(odd(0), odd(2))),
            ];
            for (column, x) in columns {
                // SAFETY: as the caller promises.
                unsafe { _mm512_storeu_ps(to.add(column * PANEL), x) }
            }
        }
    }

    /// 14 rows of two vectors: 28 sums, two vectors of the panel, one element of the left factor.
    pub(super) static WIDE: Kernels = Kernels {
        rows: 14,
        plain: rows!(wide, ROW, 1, 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
        transposed: rows!(wide, 1, ROW, 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
        transpose: square,
    };

    /// 6 rows of two vectors: 12 sums of 16 registers.
    pub(super) static NARROW: Kernels = Kernels {
        rows: 6,
        plain: rows!(narrow, ROW, 1, 1 2 3 4 5 6),
        transposed: rows!(narrow, 1, ROW, 1 2 3 4 5 6),
        transpose: super::square,
    };
}

#[cfg(test)]
mod tests;
