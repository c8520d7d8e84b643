//! Dropout of attention's probabilities: factors of a block of them, made again in the backward.
//!
//! With P the probabilities and M the factors, the output is (P∘M)·V. For dP' = dY·Vᵀ the gradient
//! of the probabilities is dP'∘M, from where all goes on as without dropout; that of V is
//! (P∘M)ᵀ·dY. A row of M belongs to a query and a head, a column to a key, counted in the sample.

use core::ops::Range;

use super::Dims;
use crate::dropout::DropoutRule;
use crate::simd;

/// Which probabilities are dropped.
#[derive(Clone, Copy, Debug)]
pub struct Dropped {
    /// Of the place in the model, in a step.
    pub dropout: DropoutRule,
    /// Number of the first sample; the others follow.
    pub sample: usize,
    /// Which token of its sample the first row is: that where a document begins, else 0.
    pub token: usize,
}

impl Dropped {
    pub(crate) fn head(self, d: Dims, b: usize, head: usize) -> DroppedHead {
        let Self { dropout, sample, token } = self;
        DroppedHead { dropout, sample: sample + b, token, heads: d.heads, head }
    }

    /// The factors of queries and the first `keys` keys, `[b, heads, queries, keys]`.
    pub fn factors(self, d: Dims, queries: Range<usize>, keys: usize) -> Vec<f32> {
        let rows = queries.len();
        let mut all = vec![0.0; d.b * d.heads * rows * keys];
        for (i, m) in all.chunks_mut((rows * keys).max(1)).enumerate() {
            let of = self.head(d, i / d.heads, i % d.heads);
            of.fill(m, keys, queries.clone(), 0, |_| 0..keys);
        }
        all
    }
}

/// Which probabilities of one head of a sample are dropped.
#[derive(Clone, Copy)]
pub(crate) struct DroppedHead {
    dropout: DropoutRule,
    sample: usize,
    token: usize,
    heads: usize,
    head: usize,
}

impl DroppedHead {
    /// Sets the factors in `m`, a row of `stride` for each query, whose first column is key
    /// `first`; of each row those columns that it sees.
    pub(crate) fn fill(
        &self,
        m: &mut [f32],
        stride: usize,
        queries: Range<usize>,
        first: usize,
        seen: impl Fn(usize) -> Range<usize>,
    ) {
        simd(
            #[inline(always)]
            || {
                for (i, m) in m.chunks_exact_mut(stride).take(queries.len()).enumerate() {
                    let row = (self.token + queries.start + i) * self.heads + self.head;
                    let seen = seen(i);
                    let key = self.token + first + seen.start;
                    self.dropout.factors(self.sample, row, key, &mut m[seen]);
                }
            },
        );
    }
}
