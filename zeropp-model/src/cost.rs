//! What the parts of a decoder cost a micro-batch: FLOP, and bytes as the meter will count them.

use crate::decoder::{Decoder, Norm};
use crate::head::{head_chunk, logit_bytes};
use crate::layer::{BatchShape, LayerCost};

/// Bytes of the hidden states of a micro-batch.
fn hidden_bytes(d: &Decoder, batch: BatchShape) -> u64 {
    bytes(d.hidden, batch)
}

/// Bytes of `width` elements a token.
fn bytes(width: usize, batch: BatchShape) -> u64 {
    (batch.tokens() * width * batch.element_bytes) as u64
}

/// What a norm keeps besides its input: one or two numbers of each row for B, one or two gradients
/// of h for W, all fp32.
fn norm(d: &Decoder, batch: BatchShape) -> LayerCost {
    let numbers = match d.norm {
        Norm::Layer { .. } => 2,
        Norm::Rms { .. } => 1,
    };
    let statistics = 4 * numbers * batch.tokens() as u64;
    LayerCost {
        activation_bytes: statistics,
        activation_bytes_selective: statistics,
        stash_bytes: 4 * numbers * d.hidden as u64,
        ..LayerCost::default()
    }
}

/// Elements of a matrix that is packed: both sizes in whole tiles of bf16 products.
fn packed(shape: &[usize]) -> u64 {
    shape.iter().map(|n| n.next_multiple_of(32) as u64).product()
}

/// The embedding: W adds rows of dY.
pub(crate) fn embedding(d: &Decoder, batch: BatchShape) -> LayerCost {
    LayerCost { stash_bytes: hidden_bytes(d, batch), ..LayerCost::default() }
}

/// Learned positions: W adds dY summed over the samples, fp32.
pub(crate) fn positions(d: &Decoder, batch: BatchShape) -> LayerCost {
    LayerCost { stash_bytes: (4 * batch.seq * d.hidden) as u64, ..LayerCost::default() }
}

/// One block.
pub(crate) fn block(d: &Decoder, batch: BatchShape) -> LayerCost {
    let norm = norm(d, batch);
    let (q, qkv) = (d.query_width(), d.qkv_width());
    let (hidden, inner) = (hidden_bytes(d, batch), bytes(d.intermediate, batch));
    let maps = d.mlp_maps() as u64;
    // Of q and k before their norms, and one number of each of their heads.
    let normed_heads = 4 * (batch.tokens() * (d.heads + d.kv_heads)) as u64;
    let before_norms = if d.qk_norm { bytes(qkv, batch) + normed_heads } else { 0 };
    // Kept from F to B: x, norm 1 of it, q k v, attention's output, x after attention, norm 2 of
    // it, the MLP's products before and after the activation; and what norms and attention keep.
    let kept = 4 * hidden
        + bytes(qkv + q, batch)
        + maps * inner
        + 2 * norm.activation_bytes
        + before_norms;
    let queries = (batch.samples * d.heads * batch.seq) as u64;
    let [probabilities, sums] = if batch.keeps_probabilities {
        [queries * (batch.seq * batch.element_bytes) as u64, 0]
    } else {
        [0, 4 * queries]
    };
    let matrices = d.block_tensors(0).into_iter().filter(|tensor| tensor.shape.len() == 2);
    let norm_weights = if d.qk_norm { 8 * d.head_dim as u64 } else { 0 };
    LayerCost {
        forward_flops: d.block_flops(batch.samples, batch.seq),
        activation_bytes: kept + probabilities + sums,
        activation_bytes_selective: kept + sums,
        // Input and dY of each product: h + qkv, q + h, h + f or h + 2f, f + h.
        stash_bytes: 4 * hidden
            + bytes(qkv + q, batch)
            + maps * inner
            + 2 * norm.stash_bytes
            + norm_weights,
        packed_elements: matrices.map(|tensor| packed(&tensor.shape)).sum(),
        ..LayerCost::default()
    }
}

/// The norm before the head.
pub(crate) fn final_norm(d: &Decoder, batch: BatchShape) -> LayerCost {
    let (norm, x) = (norm(d, batch), hidden_bytes(d, batch));
    LayerCost {
        activation_bytes: norm.activation_bytes + x,
        activation_bytes_selective: norm.activation_bytes_selective + x,
        ..norm
    }
}

/// The head and its loss.
pub(crate) fn head(d: &Decoder, batch: BatchShape) -> LayerCost {
    let (rows, n) = (d.rows(), batch.tokens());
    let chunk = head_chunk(n, rows, batch.element_bytes, batch.on_kernels());
    let logit = logit_bytes(batch.element_bytes, batch.on_kernels());
    // The kernels leave out the rows that are no token ids.
    let columns = if batch.on_kernels() { d.vocabulary } else { rows };
    // The gradient of its input.
    let kept = hidden_bytes(d, batch);
    LayerCost {
        forward_flops: d.head_flops(n),
        activation_bytes: kept,
        activation_bytes_selective: kept,
        workspace_bytes: (chunk * columns * logit) as u64,
        packed_elements: packed(&[d.hidden, d.vocabulary]),
        gradients_in_forward: true,
        ..LayerCost::default()
    }
}
