//! Blocks of 32 × 16 bf16 numbers into lines of pairs and back, by 512-bit vectors. Only tiles and
//! the instruction for pairs want these, and who has either has such vectors.

use std::arch::x86_64::*;

use half::bf16;

use super::matrix::{CacheLine, PairLines};

/// Pairs of rows: lane c of line i is (row 2i, row 2i + 1) of column c, for 32 rows of 16 elements
/// `stride` apart, of which those from `count` on are zeros; or pairs of `chains`, as
/// [`super::matrix::chain_place`] has them.
pub(super) fn pair(
    lines: &mut PairLines,
    rows: &[bf16],
    stride: usize,
    count: usize,
    chains: bool,
) {
    // SAFETY: there are 16 lines of 32 elements.
    unsafe { of_rows(rows, stride, count, lines.as_mut_ptr().cast(), 32, chains, false) }
}

/// Pairs of columns: lane c of line i is (column 2i, column 2i + 1) of row c, for 16 rows of 32
/// elements `stride` apart; or pairs of `chains`.
pub(super) fn turn(lines: &mut PairLines, rows: &[bf16], stride: usize, chains: bool) {
    assert!(rows.len() >= 15 * stride + 32);
    // SAFETY: as in `of_rows`; the 16 rows lie in the slice.
    unsafe { columns_of_16_rows(rows.as_ptr(), stride, lines.as_mut_ptr().cast(), chains) }
}

/// The pairs of the chains of each of 16 rows of 32 elements, `stride` apart: a line a row.
pub(super) fn chain_rows(lines: &mut [CacheLine; 16], rows: &[bf16], stride: usize) {
    assert!(rows.len() >= 15 * stride + 32);
    // SAFETY: as in `of_rows`; the 16 rows lie in the slice.
    unsafe { chains_of_16_rows(rows.as_ptr(), stride, lines.as_mut_ptr().cast()) }
}

/// The same of the columns of 32 rows of 16 elements, of which those from `count` on are zeros.
pub(super) fn chain_columns(
    lines: &mut [CacheLine; 16],
    rows: &[bf16],
    stride: usize,
    count: usize,
) {
    // SAFETY: there are 16 lines of 32 elements.
    unsafe { of_rows(rows, stride, count, lines.as_mut_ptr().cast(), 32, true, true) }
}

/// The transpose of 32 rows of 16 elements, `stride` apart, of which those from `count` on are
/// zeros: 16 rows of 32, `to_stride` apart.
pub(super) fn rows_to_columns(
    to: &mut [bf16],
    to_stride: usize,
    rows: &[bf16],
    stride: usize,
    count: usize,
) {
    assert!(to.len() >= 15 * to_stride + 32);
    // SAFETY: the room was just checked.
    unsafe { of_rows(rows, stride, count, to.as_mut_ptr(), to_stride, false, true) }
}

/// What stands for a row that is not there.
static ZEROS: [bf16; 16] = [bf16::ZERO; 16];

/// [`of_32_rows`] of `count` rows, or all 32, `stride` apart, and zeros.
///
/// # Safety
/// Needs room for 16 rows of 32 elements, `to_stride` apart, at `to`.
#[inline(always)]
unsafe fn of_rows(
    rows: &[bf16],
    stride: usize,
    count: usize,
    to: *mut bf16,
    to_stride: usize,
    chains: bool,
    turned: bool,
) {
    if count >= 32 {
        assert!(rows.len() >= 31 * stride + 16);
        let start_of = |i| rows.as_ptr().wrapping_add(i * stride);
        // SAFETY: pairs are made for `Isa::Amx` and `Isa::Avx512Bf16` alone, which are there only
        // beside AVX-512. The 32 rows lie in the slice, as just checked; the caller has the room.
        return unsafe { of_32_rows(start_of, to, to_stride, chains, turned) };
    }
    let mut starts = [ZEROS.as_ptr(); 32];
    for (i, start) in starts.iter_mut().enumerate().take(count) {
        *start = rows[i * stride..][..ZEROS.len()].as_ptr();
    }
    // SAFETY: the same; each start is that of 16 elements.
    unsafe { of_32_rows(|i| starts[i], to, to_stride, chains, turned) }
}

/// Pairs of rows, or of the chains of rows, a line each; with `turned` those of each column in a
/// row.
///
/// # Safety
/// Needs AVX-512, 16 elements where each of 32 rows starts, and room for 16 rows of 32, `to_stride`
/// apart, at `to`.
#[target_feature(enable = "avx512f")]
unsafe fn of_32_rows(
    start_of: impl Fn(usize) -> *const bf16,
    to: *mut bf16,
    to_stride: usize,
    chains: bool,
    turned: bool,
) {
    // Loops, here and below: `array::from_fn` and its like lack these features, so that a closure
    // that has them is not inlined into them, and is called for every vector.
    let mut pairs = [_mm512_setzero_si512(); 16];
    for (i, pair) in pairs.iter_mut().enumerate() {
        let [first, second] = [start_of(2 * i), start_of(2 * i + 1)];
        // SAFETY: rows 2i and 2i + 1 are below 32, and the caller has 16 elements of each.
        let [first, second] =
            unsafe { [_mm256_loadu_si256(first.cast()), _mm256_loadu_si256(second.cast())] };
        let second = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(second));
        *pair = _mm512_or_si512(_mm512_cvtepu16_epi32(first), second);
    }
    if chains {
        chain(&mut pairs);
    }
    if turned {
        transpose(&mut pairs);
    }
    // SAFETY: the caller has the room.
    unsafe { store(to, to_stride, &pairs) };
}

/// Pairs of columns in lines.
///
/// # Safety
/// Needs AVX-512, 16 rows of 32 elements, `stride` apart, at `rows`, and room for 16 lines at `to`.
#[target_feature(enable = "avx512f")]
unsafe fn columns_of_16_rows(rows: *const bf16, stride: usize, to: *mut bf16, chains: bool) {
    // SAFETY: the caller's rows.
    let mut vectors = unsafe { load(rows, stride) };
    transpose(&mut vectors);
    if chains {
        chain(&mut vectors);
    }
    // SAFETY: the caller has the room.
    unsafe { store(to, 32, &vectors) };
}

/// A row in a line, as pairs of the chains.
///
/// # Safety
/// Needs AVX-512, 16 rows of 32 elements, `stride` apart, at `rows`, and room for 16 lines at `to`.
#[target_feature(enable = "avx512f")]
unsafe fn chains_of_16_rows(rows: *const bf16, stride: usize, to: *mut bf16) {
    // SAFETY: the caller's rows.
    let mut vectors = unsafe { load(rows, stride) };
    chain_each(&mut vectors);
    // SAFETY: the caller has the room.
    unsafe { store(to, 32, &vectors) };
}

/// # Safety
/// Needs AVX-512, and 16 rows of 32 elements, `stride` apart, at `rows`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load(rows: *const bf16, stride: usize) -> [__m512i; 16] {
    let mut vectors = [_mm512_setzero_si512(); 16];
    for (i, vector) in vectors.iter_mut().enumerate() {
        // SAFETY: row i < 16, as the caller promises.
        *vector = unsafe { _mm512_loadu_si512(rows.add(i * stride).cast()) };
    }
    vectors
}

/// # Safety
/// Needs AVX-512, and room for 16 rows of 32 elements, `stride` apart, at `to`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store(to: *mut bf16, stride: usize, vectors: &[__m512i; 16]) {
    for (i, vector) in vectors.iter().enumerate() {
        // SAFETY: row i < 16, as the caller promises.
        unsafe { _mm512_storeu_si512(to.add(i * stride).cast(), *vector) }
    }
}

/// Pairs of neighbours in K, the first of them in the lower half, to pairs of neighbours in a
/// chain, the first of them in the upper half: k = 0 and 2, and 1 and 3, of each four.
#[inline]
#[target_feature(enable = "avx512f")]
fn chain(pairs: &mut [__m512i; 16]) {
    let lower = _mm512_set1_epi32(0xffff);
    for two in pairs.chunks_exact_mut(2) {
        let [first, second] = [two[0], two[1]];
        // Bit by bit, where `lower` is set the second operand, else the third.
        two[0] = _mm512_ternarylogic_epi32::<0xca>(lower, second, _mm512_slli_epi32::<16>(first));
        two[1] = _mm512_ternarylogic_epi32::<0xca>(lower, _mm512_srli_epi32::<16>(second), first);
    }
}

/// The same for rows of 16 pairs each: even lanes get the first of the two, odd ones the second.
#[inline]
#[target_feature(enable = "avx512f")]
fn chain_each(rows: &mut [__m512i; 16]) {
    let lower = _mm512_set1_epi32(0xffff);
    for row in rows {
        let swapped = _mm512_shuffle_epi32::<0xb1>(*row);
        let first = _mm512_slli_epi32::<16>(*row);
        let first = _mm512_ternarylogic_epi32::<0xca>(lower, swapped, first);
        let second = _mm512_srli_epi32::<16>(*row);
        let second = _mm512_ternarylogic_epi32::<0xca>(lower, second, swapped);
        *row = _mm512_mask_blend_epi32(0xaaaa, first, second);
    }
}

/// Transposes 16 × 16 lanes of 32 bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(v: &mut [__m512i; 16]) {
    let mut w = *v;
    for i in 0..8 {
        w[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
        w[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
    for i in (0..16).step_by(4) {
        v[i] = _mm512_unpacklo_epi64(w[i], w[i + 2]);
        v[i + 1] = _mm512_unpackhi_epi64(w[i], w[i + 2]);
        v[i + 2] = _mm512_unpacklo_epi64(w[i + 1], w[i + 3]);
        v[i + 3] = _mm512_unpackhi_epi64(w[i + 1], w[i + 3]);
    }
    for i in 0..4 {
        w[i] = _mm512_shuffle_i32x4::<0x88>(v[i], v[i + 4]);
        w[i + 4] = _mm512_shuffle_i32x4::<0xdd>(v[i], v[i + 4]);
        w[i + 8] = _mm512_shuffle_i32x4::<0x88>(v[i + 8], v[i + 12]);
        w[i + 12] = _mm512_shuffle_i32x4::<0xdd>(v[i + 8], v[i + 12]);
    }
    for i in 0..8 {
        v[i] = _mm512_shuffle_i32x4::<0x88>(w[i], w[i + 8]);
        v[i + 8] = _mm512_shuffle_i32x4::<0xdd>(w[i], w[i + 8]);
    }
}
