//! How a head is cut: into blocks of the vocabulary, over which its sums are made, and into chunks
//! of tokens, so that nothing of size tokens × vocabulary outlives a chunk.

use std::ops::Range;

use crate::layer::{BatchShape, LayerCost};

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
    let waiting = waiting_sums(count);
    let narrow = if element_bytes < fp32 { block_rows(ids).min(ids) * element_bytes } else { 0 };
    tokens * (ids * fp32 + waiting * hidden * fp32 + narrow)
}

/// Some blocks of a head's rows, which one of several ranks has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceShape {
    /// Token ids of the whole head.
    pub ids: usize,
    /// Rows of its weight, `ids` or more.
    pub rows: usize,
    /// Columns of its weight.
    pub hidden: usize,
    /// Which blocks, of those of all ids.
    pub blocks: Range<usize>,
    /// The blocks of each sum of gradients that is made of them.
    pub sums: Vec<Range<usize>>,
}

impl SliceShape {
    /// The token ids of the slice.
    pub fn own_ids(&self) -> Range<usize> {
        let rows = block_rows(self.ids);
        self.ids.min(self.blocks.start * rows)..self.ids.min(self.blocks.end * rows)
    }

    /// The rows of the weight that the slice has: those that are no ids go with the last block.
    pub fn own_rows(&self) -> Range<usize> {
        let ids = self.own_ids();
        let is_last = !self.blocks.is_empty() && self.blocks.end == blocks(self.ids).len();
        ids.start..if is_last { self.rows } else { ids.end }
    }

    /// Tokens that are computed at once, of `n`: as of the whole head.
    pub fn chunk(&self, n: usize, element_bytes: usize, on_kernels: bool) -> usize {
        head_chunk(n, [self.rows, self.hidden], element_bytes, on_kernels)
    }

    /// Bytes that F keeps for `n` tokens beside its input: all logits in fp32 on the CPU, the sums
    /// of its blocks and the logits of targets.
    pub fn logits_bytes(&self, n: usize, element_bytes: usize, on_kernels: bool) -> usize {
        let logit = if on_kernels { size_of::<f32>() } else { element_bytes };
        n * (logit * self.own_ids().len() + (2 * self.blocks.len() + 1) * size_of::<f32>())
    }

    /// Bytes that B takes beside: the sums of gradients that it makes, and those that wait for
    /// others while it does.
    pub fn backward_bytes(&self, n: usize, element_bytes: usize, on_kernels: bool) -> usize {
        let chunk = self.chunk(n, element_bytes, on_kernels);
        let waiting = self.sums.iter().map(|sum| waiting_sums(sum.len())).max().unwrap_or(0);
        let of_chunk = waiting + usize::from(chunk < n);
        (n * self.sums.len() + chunk * of_chunk) * self.hidden * size_of::<f32>()
    }

    /// The cost of a micro-batch: F, B and W are a product each. Rows that do not train have no W,
    /// which nothing is kept for.
    pub fn cost(&self, batch: BatchShape, trains: bool) -> LayerCost {
        let (n, element) = (batch.tokens(), batch.element_bytes);
        let (ids, on_kernels) = (self.own_ids().len(), batch.on_kernels());
        let input = n * self.hidden * element;
        let kept = (input + self.logits_bytes(n, element, on_kernels)) as u64;
        let packed = self.hidden.next_multiple_of(32) * ids.next_multiple_of(32);
        let forward_flops = 2.0 * (n * ids * self.hidden) as f64;
        LayerCost {
            forward_flops,
            frozen_flops: if trains { 0.0 } else { forward_flops },
            activation_bytes: kept,
            activation_bytes_selective: kept,
            stash_bytes: if trains { (input + n * ids * element) as u64 } else { 0 },
            workspace_bytes: self.backward_bytes(n, element, on_kernels) as u64,
            packed_elements: packed as u64,
            ..LayerCost::default()
        }
    }
}

/// The most sums of branches of a tree over so many blocks that wait for others.
fn waiting_sums(blocks: usize) -> usize {
    (0..blocks).map(usize::count_ones).max().unwrap_or(0) as usize
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

    #[test]
    fn slices_of_a_head_have_all_its_rows_once() {
        for (ids, rows) in [(1000, 1024), (50_257, 50_304), (128, 128), (300, 300)] {
            let count = blocks(ids).len();
            for cut in 0..=count {
                let slice = |blocks: Range<usize>| SliceShape {
                    ids,
                    rows,
                    hidden: 4,
                    blocks,
                    sums: Vec::new(),
                };
                let (left, right) = (slice(0..cut), slice(cut..count));
                assert_eq!(left.own_ids().end, right.own_ids().start);
                let all = [left.own_rows(), right.own_rows()];
                let used = all.iter().filter(|rows| !rows.is_empty()).cloned();
                let used: Vec<_> = used.collect();
                assert!(used[0].start == 0 && used[used.len() - 1].end == rows);
                assert_eq!(used.iter().map(ExactSizeIterator::len).sum::<usize>(), rows);
                assert!(used.iter().all(|rows| rows.start.is_multiple_of(ROWS_MULTIPLE)));
            }
        }
    }
}
