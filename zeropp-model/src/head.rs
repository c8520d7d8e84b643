//! How a head is cut: into blocks of the vocabulary, over which its sums are made, and into chunks
//! of tokens, so that nothing of size tokens × vocabulary outlives a chunk.

use std::ops::Range;

/// Most blocks of the vocabulary.
const BLOCKS_MAX: usize = 64;
/// Rows of a block are whole multiples of this, as products and shards like it.
const ROWS_MULTIPLE: usize = 128;

/// Bytes of a chunk's logits for the CPU's kernels: each chunk reads the weight twice and its
/// gradient once, which from about a hundred tokens on is little beside its products as long as the
/// weight is small.
const CPU_BYTES_MAX: usize = 64 << 20;
/// The same as a part of the fp32 weight, where that is more: then a chunk has an eighth as many
/// tokens as the model is wide, and reading the weight is little however large it is.
const CPU_SHARE: usize = 8;
/// The same at most, and for tensor operations, where a chunk's gradient of the weight is a tensor
/// of its own.
pub const BYTES_MAX: usize = 512 << 20;
/// Chunks are whole multiples of this, as products like it.
const CHUNK_MULTIPLE: usize = 64;
/// Tokens of the grid on which the CPU's kernels sum over tokens (`zeropp_kernels::tokens::GRID`):
/// their chunks are multiples of it, or half of it, however many tokens there are, so that those of
/// a slice of a sample are those of the sample.
const GRID: usize = 256;

/// Tokens whose logits are there at once, of `n` in the micro-batch, for a weight of `[V, hidden]`.
/// It follows from sizes, type and the path of the operations alone, as the order of sums follows
/// from it.
pub fn head_chunk(
    n: usize,
    [vocabulary, hidden]: [usize; 2],
    element_bytes: usize,
    on_kernels: bool,
) -> usize {
    let weight_bytes = vocabulary.saturating_mul(hidden * size_of::<f32>());
    let bytes_max = match on_kernels {
        true => (weight_bytes / CPU_SHARE).clamp(CPU_BYTES_MAX, BYTES_MAX),
        false => BYTES_MAX,
    };
    let most = bytes_max / (vocabulary * logit_bytes(element_bytes, on_kernels)).max(1);
    let least = 2 * CHUNK_MULTIPLE;
    let multiple = match on_kernels {
        true if most >= GRID => GRID,
        true => least,
        false => CHUNK_MULTIPLE,
    };
    let most = (most / multiple * multiple).max(least);
    // Even chunks: a short last one would pay as much for the weight as a whole one.
    let chunks = n.div_ceil(most).max(1);
    n.div_ceil(chunks).next_multiple_of(multiple).min(n)
}

/// Bytes that a logit takes while its chunk is there: the kernels make it in fp32, and turn its
/// gradient into the type of the products.
fn logit_bytes(element_bytes: usize, on_kernels: bool) -> usize {
    let fp32 = size_of::<f32>();
    if on_kernels && element_bytes < fp32 { fp32 + element_bytes } else { element_bytes }
}

/// Rows of a block of a head of so many token ids; the last block may have fewer.
pub fn block_rows(ids: usize) -> usize {
    ids.div_ceil(BLOCKS_MAX).next_multiple_of(ROWS_MULTIPLE)
}

/// The blocks of a head of so many token ids, in order. They follow from the ids alone: sums over
/// the vocabulary are made of those of its blocks, wherever these are computed.
pub fn blocks(ids: usize) -> impl ExactSizeIterator<Item = Range<usize>> + Clone {
    let rows = block_rows(ids).max(1);
    (0..ids.div_ceil(rows)).map(move |i| i * rows..ids.min((i + 1) * rows))
}

/// Bytes that the CPU's kernels hold for a chunk of `tokens`: all its logits, the sums of x's
/// gradient that wait for those of other blocks, and in bf16 a block's gradient.
pub fn workspace_bytes(tokens: usize, ids: usize, hidden: usize, element_bytes: usize) -> usize {
    let (fp32, count) = (size_of::<f32>(), blocks(ids).len());
    // Sums of 2ⁿ blocks, each of another n.
    let waiting = (0..count).map(usize::count_ones).max().unwrap_or(0) as usize;
    let narrow = if element_bytes < fp32 { block_rows(ids).min(ids) * element_bytes } else { 0 };
    tokens * (ids * fp32 + waiting * hidden * fp32 + narrow)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_of_no_ids_has_no_blocks() {
        assert_eq!(blocks(0).len(), 0);
        assert_eq!(workspace_bytes(64, 0, 32, 2), 0);
    }

    #[test]
    fn at_most_64_blocks_cover_every_id_once() {
        for ids in (1..3000).chain([8191, 8192, 8193, 32_000, 50_257, 128_256, 256_000]) {
            let all: Vec<_> = blocks(ids).collect();
            assert!(all.len() <= BLOCKS_MAX && all[0].start == 0 && all[all.len() - 1].end == ids);
            assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start));
            let (_, whole) = all.split_last().expect("a block");
            assert!(whole.iter().all(|block| block.len() == block_rows(ids)));
            assert!(block_rows(ids).is_multiple_of(ROWS_MULTIPLE));
        }
        assert_eq!((blocks(128).len(), blocks(129).len(), blocks(128_256).len()), (1, 2, 63));
    }

    #[test]
    fn few_sums_of_blocks_wait_for_others() {
        let waiting = |ids| workspace_bytes(1, ids, 1, 4) - ids * 4;
        assert_eq!([128, 129, 513, 8192].map(waiting), [0, 4, 8, 24]);
        assert_eq!(workspace_bytes(3, 100, 8, 2), 3 * 100 * (4 + 2));
        assert_eq!(workspace_bytes(3, 300, 8, 2), 3 * (300 * 4 + 8 * 4 + 128 * 2));
    }

    #[test]
    fn chunks_of_a_slice_end_where_those_of_the_sample_may() {
        for shape in [[50_257, 768], [128_000, 4096], [256, 1 << 20], [128_000, 256], [90_000, 8]] {
            let blocks = if head_chunk(1 << 20, shape, 4, true) < GRID { GRID / 2 } else { GRID };
            for n in (1..40).map(|blocks| blocks * GRID) {
                let chunk = head_chunk(n, shape, 4, true);
                assert!(chunk.is_multiple_of(blocks), "{chunk} of {n}, {shape:?}");
                assert!(blocks == GRID || chunk == blocks, "{chunk} of {n}, {shape:?}");
            }
        }
    }

    #[test]
    fn chunks_follow_from_shapes_and_hold_little() {
        let cases = [
            (8192, [131_072, 4096], 2),
            (1000, [50_257, 768], 4),
            (5, [300, 64], 4),
            (4096, [256, 1 << 20], 4),
        ];
        for (n, shape, bytes) in cases {
            let [ids, hidden] = shape;
            for on_kernels in [true, false] {
                let chunk = head_chunk(n, shape, bytes, on_kernels);
                assert!(chunk == n || chunk.is_multiple_of(CHUNK_MULTIPLE), "{chunk} of {n}");
                let most = match on_kernels {
                    true => (ids * hidden).clamp(CPU_BYTES_MAX, BYTES_MAX),
                    false => BYTES_MAX,
                };
                let least = 2 * CHUNK_MULTIPLE;
                assert!(chunk <= least || chunk * ids * bytes <= most, "{chunk} of {n}");
                let chunks = n.div_ceil(chunk);
                assert!((chunks - 1) * chunk < n && n <= chunks * chunk);
            }
        }
        // Half a gibibyte, where all logits are two.
        assert_eq!(head_chunk(8192, [131_072, 4096], 2, false), 2048);
        // An eighth of a large weight, and 64 MiB beside a small one.
        assert_eq!(head_chunk(8192, [128_000, 4096], 4, true), 512);
        assert_eq!(head_chunk(8192, [128_000, 2048], 4, true), 256);
        assert_eq!(head_chunk(8192, [128_000, 256], 4, true), 128);
    }
}
