//! A head and the chunks of tokens that it takes.

use std::cell::Cell;
use std::ops::Range;

use burn::tensor::{Int, Tensor};
use zeropp_model::head::{blocks, head_chunk};

use super::super::{halves, is_fast, loss};
use crate::split::{OpCx, SliceCx, Weight};

thread_local! {
    static CHUNK: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Makes the heads of this thread take this many tokens at a time. For tests of chunks.
#[doc(hidden)]
pub fn force_head_chunk(tokens: Option<usize>) {
    CHUNK.set(tokens);
}

/// The map, or some blocks of its rows, and how it is cut.
pub(crate) struct ChunkedHead<'a> {
    /// The weight, of these rows alone.
    pub(crate) w: &'a Weight<2>,
    /// Token ids of the whole map.
    pub(crate) ids: usize,
    /// Which of the blocks of all ids.
    pub(crate) own: Range<usize>,
    pub(crate) chunk: usize,
    pub(crate) cx: &'a OpCx,
}

impl<'a> ChunkedHead<'a> {
    pub(crate) fn new(x: &Tensor<3>, w: &'a Weight<2>, ids: usize, cx: &'a OpCx) -> Self {
        let [b, s, _] = x.dims();
        let shape = w.shape();
        assert!(ids <= shape[0], "{ids} token ids, but the head has {} rows", shape[0]);
        let on_kernels = is_fast(x) || halves(x).is_some();
        let chunk = head_chunk(b * s, shape, x.dtype().size(), on_kernels);
        Self { w, ids, own: 0..blocks(ids).len(), chunk: forced_chunk(chunk), cx }
    }

    /// Its own blocks, by their ids.
    pub(crate) fn id_blocks(&self) -> impl ExactSizeIterator<Item = Range<usize>> + Clone {
        blocks(self.ids).skip(self.own.start).take(self.own.len())
    }

    /// The same by the rows of the weight.
    pub(crate) fn row_blocks(&self) -> impl ExactSizeIterator<Item = Range<usize>> + Clone {
        let first = self.id_blocks().next().map_or(0, |block| block.start);
        self.id_blocks().map(move |ids| ids.start - first..ids.end - first)
    }

    /// The divisor of the loss of `n` tokens, those of a whole sample where they are a slice of it.
    pub(crate) fn divisor(&self, n: usize) -> f64 {
        let n = self.cx.slice.as_ref().map_or(n, SliceCx::sample_tokens);
        self.cx.masks.scored.unwrap_or(n as f64)
    }

    /// The loss of `n` tokens, of which `sum` has the sum over those of the slice, if it is one,
    /// and its sample's slices before: they add to that.
    pub(crate) fn loss(&self, sum: f64, n: usize) -> Tensor<1> {
        if let Some(slice) = &self.cx.slice {
            slice.with_loss(|of_sample| *of_sample = sum);
        }
        loss::mean(sum, self.divisor(n))
    }

    /// What the sum of the loss begins with: that of the sample's slices before.
    pub(crate) fn begun(&self) -> f64 {
        self.cx.slice.as_ref().map_or(0.0, |slice| slice.with_loss(|of_sample| *of_sample))
    }

    pub(crate) fn known(&self, targets: Tensor<2, Int>) -> Vec<usize> {
        loss::known_targets(targets, self.ids, self.cx.masks.scored.is_some())
    }

    /// The chunks of `n` tokens, first tokens first.
    pub(crate) fn chunks(&self, n: usize) -> impl Iterator<Item = Range<usize>> {
        chunks(n, self.chunk)
    }
}

/// `n` tokens, so many at a time.
pub(crate) fn chunks(n: usize, chunk: usize) -> impl Iterator<Item = Range<usize>> {
    let chunk = chunk.max(1);
    (0..n.div_ceil(chunk)).map(move |i| i * chunk..n.min((i + 1) * chunk))
}

/// `chunk`, or as many tokens as this thread is made to take.
pub(crate) fn forced_chunk(chunk: usize) -> usize {
    CHUNK.get().unwrap_or(chunk)
}
