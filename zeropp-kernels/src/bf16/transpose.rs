//! Blocks of 32 × 16 bf16 numbers into lines of pairs and back, by 512-bit vectors. Only tiles and
//! the instruction for pairs want these, and who has either has such vectors.

use std::arch::x86_64::*;

use half::bf16;

use super::packed::Line;

/// Pairs of rows: lane c of line i is (row 2i, row 2i + 1) of column c, for 32 rows of 16 elements
/// `stride` apart; or pairs of `chains`, as [`super::packed::chain_place`] has them.
pub(super) fn pair(lines: &mut [Line; 16], rows: &[bf16], stride: usize, chains: bool) {
    assert!(rows.len() >= 31 * stride + 16);
    // SAFETY: pairs are made for `Isa::Amx` and `Isa::Avx512Bf16` alone, which are there only beside
    // AVX-512. The 32 rows lie in the slice, as just checked.
    unsafe {
        let mut pairs = load_pairs(rows.as_ptr(), stride);
        if chains {
            chain(&mut pairs);
        }
        store(lines.as_mut_ptr().cast(), 32, pairs);
    }
}

/// Pairs of columns: lane c of line i is (column 2i, column 2i + 1) of row c, for 16 rows of 32
/// elements `stride` apart; or pairs of `chains`.
pub(super) fn turn(lines: &mut [Line; 16], rows: &[bf16], stride: usize, chains: bool) {
    assert!(rows.len() >= 15 * stride + 32);
    // SAFETY: as in `pair`; the 16 rows lie in the slice.
    unsafe {
        let mut vectors = load_rows(rows.as_ptr(), stride);
        transpose(&mut vectors);
        if chains {
            chain(&mut vectors);
        }
        store(lines.as_mut_ptr().cast(), 32, vectors);
    }
}

/// The pairs of the chains of each of 16 rows of 32 elements, `stride` apart: a line a row.
pub(super) fn chain_rows(lines: &mut [Line; 16], rows: &[bf16], stride: usize) {
    assert!(rows.len() >= 15 * stride + 32);
    // SAFETY: as in `pair`; the 16 rows lie in the slice.
    unsafe {
        let vectors = load_rows(rows.as_ptr(), stride).map(|row| chain_of_row(row));
        store(lines.as_mut_ptr().cast(), 32, vectors);
    }
}

/// The same of the columns of 32 rows of 16 elements.
pub(super) fn chain_columns(lines: &mut [Line; 16], rows: &[bf16], stride: usize) {
    assert!(rows.len() >= 31 * stride + 16);
    // SAFETY: as in `pair`; the 32 rows lie in the slice.
    unsafe {
        let mut pairs = load_pairs(rows.as_ptr(), stride);
        chain(&mut pairs);
        transpose(&mut pairs);
        store(lines.as_mut_ptr().cast(), 32, pairs);
    }
}

/// The transpose of 32 rows of 16 elements, `stride` apart: 16 rows of 32, `to_stride` apart.
pub(super) fn rows_to_columns(to: &mut [bf16], to_stride: usize, rows: &[bf16], stride: usize) {
    assert!(rows.len() >= 31 * stride + 16 && to.len() >= 15 * to_stride + 32);
    // SAFETY: as in `pair`; both matrices lie in their slices.
    unsafe {
        let mut vectors = load_pairs(rows.as_ptr(), stride);
        transpose(&mut vectors);
        store(to.as_mut_ptr(), to_stride, vectors);
    }
}

/// # Safety
/// Needs AVX-512, and 32 rows of 16 elements, `stride` apart, at `rows`.
#[target_feature(enable = "avx512f")]
unsafe fn load_pairs(rows: *const bf16, stride: usize) -> [__m512i; 16] {
    let row = |i: usize| {
        // SAFETY: row i < 32, as the caller promises.
        let half = unsafe { _mm256_loadu_si256(rows.add(i * stride).cast()) };
        _mm512_cvtepu16_epi32(half)
    };
    std::array::from_fn(|i| _mm512_or_si512(row(2 * i), _mm512_slli_epi32::<16>(row(2 * i + 1))))
}

/// # Safety
/// Needs AVX-512, and 16 rows of 32 elements, `stride` apart, at `rows`.
#[target_feature(enable = "avx512f")]
unsafe fn load_rows(rows: *const bf16, stride: usize) -> [__m512i; 16] {
    // SAFETY: row i < 16, as the caller promises.
    std::array::from_fn(|i| unsafe { _mm512_loadu_si512(rows.add(i * stride).cast()) })
}

/// # Safety
/// Needs AVX-512, and room for 16 rows of 32 elements, `stride` apart, at `to`.
#[target_feature(enable = "avx512f")]
unsafe fn store(to: *mut bf16, stride: usize, vectors: [__m512i; 16]) {
    for (i, vector) in vectors.into_iter().enumerate() {
        // SAFETY: row i < 16, as the caller promises.
        unsafe { _mm512_storeu_si512(to.add(i * stride).cast(), vector) }
    }
}

/// Pairs of neighbours in K to pairs of neighbours in a chain, the first of them in the upper half:
/// of (0, 1) and (2, 3) come (2, 0) and (3, 1), the lower half named first.
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

/// The same for the 16 pairs of one row.
#[target_feature(enable = "avx512f")]
fn chain_of_row(row: __m512i) -> __m512i {
    // Even lanes have first pairs of the above, odd ones second ones.
    let swapped = _mm512_shuffle_epi32::<0xb1>(row);
    let even = _mm512_ternarylogic_epi32::<0xca>(
        _mm512_set1_epi32(0xffff),
        swapped,
        _mm512_slli_epi32::<16>(row),
    );
    let odd = _mm512_ternarylogic_epi32::<0xca>(
        _mm512_set1_epi32(0xffff),
        _mm512_srli_epi32::<16>(row),
        swapped,
    );
    _mm512_mask_blend_epi32(0xaaaa, even, odd)
}

/// Transposes 16 × 16 lanes of 32 bits.
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
