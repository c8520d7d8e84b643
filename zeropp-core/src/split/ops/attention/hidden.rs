//! Attention of which documents or a window hide keys, or dropout drops probabilities, by the CPU's
//! kernels.
//!
//! A document is rows that follow each other, so each is a sample of its own to the kernels, and
//! what it hides is never computed; a window has a kernel of its own. All of them keep one number a
//! query, however long documents are: what is kept from F to B depends on sizes alone.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;

use super::super::{fast, halves};
use crate::cpu_tensor;
use crate::kernels::attention::{Dims, Dropped, recomputed, windowed};
use crate::kernels::bf16::attention as half_kernels;
use crate::split::{Documents, DropoutPlace, OpCx};

/// The keys that queries do not see beside the later ones: those of other documents, and those
/// before a window; and which probabilities are dropped of the keys that they do see.
pub(super) struct MaskedKeys {
    documents: Option<Arc<Documents>>,
    window: Option<usize>,
    dropped: Option<Dropped>,
}

impl MaskedKeys {
    /// None where nothing is hidden and the micro-batch has no dropout. Where it has, attention
    /// keeps as much whether this one drops probabilities or not, as is predicted.
    pub(super) fn new(
        window: Option<usize>,
        place: Option<DropoutPlace<'_>>,
        cx: &OpCx,
    ) -> Option<MaskedKeys> {
        let documents = cx.masks.documents.clone();
        let at = |place| cx.masks.dropout.as_ref().map(|dropout| (dropout, place));
        let dropped = place.and_then(at).map(|(dropout, place)| Dropped {
            dropout: dropout.at(place),
            sample: dropout.sample,
            token: 0,
        });
        let is_any = documents.is_some() || window.is_some() || cx.masks.dropout.is_some();
        is_any.then_some(MaskedKeys { documents, window, dropped })
    }

    /// The rows that are a sample of their own each: documents, or samples.
    fn ranges(&self, d: Dims) -> Vec<Range<usize>> {
        match &self.documents {
            Some(documents) => {
                assert_eq!(documents.rows(), d.b * d.s, "documents of another micro-batch");
                documents.ranges().collect()
            }
            None => (0..d.b).map(|b| b * d.s..(b + 1) * d.s).collect(),
        }
    }

    /// The window, where it is shorter than so many rows.
    fn window_in(&self, rows: usize) -> Option<usize> {
        self.window.filter(|window| *window < rows)
    }

    /// The mask of dropped probabilities of these rows of samples of `s` tokens.
    fn dropped_in(&self, rows: &Range<usize>, s: usize) -> Option<Dropped> {
        let of = |all: Dropped| Dropped {
            sample: all.sample + rows.start / s,
            token: rows.start % s,
            ..all
        };
        self.dropped.map(of)
    }

    /// The documents that queries see no other keys of, where samples are packed.
    #[cfg(feature = "cube")]
    pub(super) fn documents(&self) -> Option<&Documents> {
        self.documents.as_deref()
    }

    /// Keys that a query sees, itself included, where there is a window.
    #[cfg(feature = "cube")]
    pub(super) fn window(&self) -> Option<usize> {
        self.window
    }

    /// Which probabilities are dropped of whole samples.
    pub(super) fn dropped(&self) -> Option<Dropped> {
        self.dropped
    }

    /// Whether keys are hidden beside those that come later.
    pub(super) fn hides_keys(&self) -> bool {
        self.documents.is_some() || self.window.is_some()
    }

    /// The first key that each row's query sees, counted from the beginning of its sample.
    pub(super) fn firsts(&self, d: Dims) -> Vec<usize> {
        let of = |rows: Range<usize>| {
            let window = self.window.unwrap_or(usize::MAX);
            let first = move |row| (rows.start + windowed::first_key(row, window)) % d.s;
            (0..rows.end - rows.start).map(first)
        };
        self.ranges(d).into_iter().flat_map(of).collect()
    }

    /// The output `[b, s, heads·d]` and one fp32 number a query, `[b, heads, s]`, document after
    /// document; none where the kernels cannot work on `qkv`.
    pub(super) fn forward(&self, qkv: &Tensor<3>, d: Dims) -> Option<(Tensor<3>, Tensor<3>)> {
        let (dims, width) = ([d.b, d.s, d.out_width()], d.width());
        let mut sums = Vec::with_capacity(d.b * d.heads * d.s);
        let elements = dims.iter().product();
        let out = if let Some(qkv) = halves(qkv) {
            let mut out = Vec::with_capacity(elements);
            for rows in self.ranges(d) {
                let of = &qkv.as_slice()[rows.start * width..rows.end * width];
                let (window, dropped) =
                    (self.window.unwrap_or(usize::MAX), self.dropped_in(&rows, d.s));
                let (y, logs) = half_kernels::attention_in(of, one(d, rows.len()), window, dropped);
                out.extend(y);
                sums.extend(logs);
            }
            cpu_tensor::from_halves(out, dims)
        } else {
            let qkv = fast(qkv)?;
            let mut out = Vec::with_capacity(elements);
            for rows in self.ranges(d) {
                let of = &qkv.as_slice()[rows.start * width..rows.end * width];
                let (one, window) = (one(d, rows.len()), self.window_in(rows.len()));
                let dropped = self.dropped_in(&rows, d.s);
                let (y, logs) = match window {
                    Some(window) => windowed::attention(of, one, window, dropped),
                    None => recomputed::attention(of, one, dropped),
                };
                out.extend(y);
                sums.extend(logs);
            }
            cpu_tensor::from_vec(out, dims)
        };
        Some((out, cpu_tensor::from_vec(sums, [d.b, d.heads, d.s])))
    }

    /// The gradient of qkv for `dy: [b, s, heads·d]`; `sums` as from [`forward`](Self::forward).
    pub(super) fn backward(
        &self,
        dy: &Tensor<3>,
        qkv: &Tensor<3>,
        sums: &Tensor<3>,
        d: Dims,
    ) -> Tensor<3> {
        let (dims, width, out_width) = ([d.b, d.s, d.width()], d.width(), d.out_width());
        let sums = cpu_tensor::on_cpu(sums).expect("made by the forward");
        let sums = |rows: &Range<usize>| &sums.as_slice()[rows.start * d.heads..rows.end * d.heads];
        let elements = dims.iter().product();
        if let Some(qkv) = halves(qkv) {
            let dy = halves(dy).expect("as qkv");
            let mut dqkv = Vec::with_capacity(elements);
            for rows in self.ranges(d) {
                let qkv = &qkv.as_slice()[rows.start * width..rows.end * width];
                let dy = &dy.as_slice()[rows.start * out_width..rows.end * out_width];
                let (one, window) = (one(d, rows.len()), self.window.unwrap_or(usize::MAX));
                let (sums, dropped) = (sums(&rows), self.dropped_in(&rows, d.s));
                dqkv.extend(half_kernels::attention_backward_in(
                    dy, qkv, sums, one, window, dropped,
                ));
            }
            return cpu_tensor::from_halves(dqkv, dims);
        }
        let qkv = fast(qkv).expect("as in the forward");
        let dy = cpu_tensor::on_cpu(dy).expect("as qkv");
        let mut dqkv = Vec::with_capacity(elements);
        for rows in self.ranges(d) {
            let qkv = &qkv.as_slice()[rows.start * width..rows.end * width];
            let dy = &dy.as_slice()[rows.start * out_width..rows.end * out_width];
            let (one, sums) = (one(d, rows.len()), sums(&rows));
            let dropped = self.dropped_in(&rows, d.s);
            dqkv.extend(match self.window_in(rows.len()) {
                Some(window) => windowed::attention_backward(dy, qkv, sums, one, window, dropped),
                None => recomputed::attention_backward(dy, qkv, sums, one, dropped),
            });
        }
        cpu_tensor::from_vec(dqkv, dims)
    }
}

/// The sizes of one document.
fn one(d: Dims, s: usize) -> Dims {
    Dims { b: 1, s, ..d }
}
