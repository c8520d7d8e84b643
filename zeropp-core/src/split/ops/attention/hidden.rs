//! Attention of which documents or a window hide keys, or dropout drops probabilities.

use std::ops::Range;
use std::sync::Arc;

use super::row_kernel::RowKernel;
use crate::kernels::attention::{Dims, Dropped, windowed};
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

    /// As the CPU's kernels compute it.
    pub(super) fn kernel(&self, d: Dims) -> RowKernel {
        RowKernel::new(d, 0, self.documents.as_deref(), self.window, self.dropped)
    }
}
