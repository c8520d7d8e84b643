//! Which elements of a micro-batch are dropped: a function of seed, step, sample, layer, place and
//! element, so that nothing is kept of it and no layout of a run shows in it.

use zeropp_data::rng::Rng;

use crate::kernels::dropout as kernels;

/// Where in a model elements are dropped: a layer's name, and the place in it.
pub type DropoutPlace<'a> = [&'a str; 2];

/// Dropout of a micro-batch's samples, whose numbers in the batch of the step follow each other.
///
/// Each place has a key, which is that of [`Rng::keyed`] for the run's seed and the name
/// `dropout.LAYER.PLACE`. An element is in a row of its sample: of `[s, h]` in that of its token,
/// of attention's probabilities in row query·heads + head, whose columns are the keys. The element
/// of column 64·g + 16·w + l is decided by word w of [`Rng::block`] at (16·g + l) + 2³²·row and
/// sample + 2³²·step: below p·2³² it is dropped, else divided by 1 − p.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// The share of elements that are dropped: 0 or more, less than 1.
    pub p: f64,
    /// Seed of the run.
    pub seed: u64,
    /// The step, counted from 1.
    pub step: u64,
    /// Number of the first sample in the batch of the step.
    pub sample: usize,
}

impl Dropout {
    /// The mask generator of the kernels for a place.
    pub(super) fn at(&self, [layer, place]: DropoutPlace<'_>) -> kernels::DropoutRule {
        let rng = Rng::keyed(self.seed, &format!("dropout.{layer}.{place}"));
        kernels::DropoutRule::new(rng.key(), self.step, self.p)
    }
}
