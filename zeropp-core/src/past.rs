//! The state that a layer keeps of the tokens it has seen, so that those that follow need not
//! compute them again (a KV cache).

use crate::kernels::attention::{Dims, cached};

/// Tokens that a layer has seen, with their keys and values where it has any. On the CPU, in fp32.
#[derive(Clone, Debug, Default)]
pub struct Past {
    tokens: usize,
    /// `[T, G·d]`.
    keys: Vec<f32>,
    /// `[T, G·d]`.
    values: Vec<f32>,
}

impl Past {
    /// Tokens seen so far; the next has this position.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Sees `n` more tokens of which nothing is kept.
    pub(crate) fn pass(&mut self, n: usize) {
        self.tokens += n;
    }

    /// Keeps keys and values of `qkv: [n, (H + 2G)·d]`; `sizes` are H, G and d.
    pub(crate) fn take_up(&mut self, qkv: &[f32], [heads, groups, d]: [usize; 3]) {
        for row in qkv.chunks_exact((heads + 2 * groups) * d) {
            let (keys, values) = row[heads * d..].split_at(groups * d);
            self.keys.extend_from_slice(keys);
            self.values.extend_from_slice(values);
            self.tokens += 1;
        }
    }

    /// Attention `[n, H·d]` of the queries in `qkv`, whose keys and values were taken up last.
    /// They see the last `window` of all, themselves included, if there is one.
    pub(crate) fn attention(
        &self,
        qkv: &[f32],
        [heads, groups, d]: [usize; 3],
        window: Option<usize>,
    ) -> Vec<f32> {
        let s = qkv.len() / ((heads + 2 * groups) * d);
        let dims = Dims { b: 1, s, heads, groups, d, place: 0 };
        cached::attention(qkv, &self.keys, &self.values, dims, window)
    }
}
