//! A head and the chunks of tokens that it takes.

use std::cell::Cell;
use std::ops::Range;

use burn::tensor::{Int, Tensor};
use zeropp_model::head::head_chunk;

use super::super::{halves, is_fast, loss};
use crate::split::{OpCx, Weight};

thread_local! {
    static CHUNK: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Makes the heads of this thread take this many tokens at a time. For tests of chunks.
#[doc(hidden)]
pub fn force_head_chunk(tokens: Option<usize>) {
    CHUNK.set(tokens);
}

/// The map, and how it is cut.
pub(super) struct ChunkedHead<'a> {
    pub(super) w: &'a Weight<2>,
    pub(super) ids: usize,
    pub(super) chunk: usize,
    pub(super) cx: &'a OpCx,
}

impl<'a> ChunkedHead<'a> {
    pub(super) fn new(x: &Tensor<3>, w: &'a Weight<2>, ids: usize, cx: &'a OpCx) -> Self {
        let [b, s, _] = x.dims();
        let shape = w.shape();
        assert!(ids <= shape[0], "{ids} token ids, but the head has {} rows", shape[0]);
        let on_kernels = is_fast(x) || halves(x).is_some();
        let chunk = head_chunk(b * s, shape, x.dtype().size(), on_kernels);
        let chunk = CHUNK.get().unwrap_or(chunk);
        Self { w, ids, chunk, cx }
    }

    /// The divisor of the loss of `n` tokens.
    pub(super) fn divisor(&self, n: usize) -> f64 {
        self.cx.masks.scored.unwrap_or(n as f64)
    }

    pub(super) fn known(&self, targets: Tensor<2, Int>) -> Vec<usize> {
        loss::known_targets(targets, self.ids, self.cx.masks.scored.is_some())
    }

    /// The chunks of `n` tokens, first tokens first.
    pub(super) fn chunks(&self, n: usize) -> impl Iterator<Item = Range<usize>> {
        let chunk = self.chunk.max(1);
        (0..n.div_ceil(chunk)).map(move |i| i * chunk..n.min((i + 1) * chunk))
    }
}
