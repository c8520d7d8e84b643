//! Where the samples of a validation loss come from: files, or a program.

use zeropp_core::data::{DataError, Dataset, OnePass, Sample};

use crate::own::samples::FirstSamples;

/// Samples that are measured on, one after another.
pub(crate) enum EvaluationSamples {
    /// Of the files that the settings name.
    Files(OnePass),
    /// Of a program's own.
    Own(FirstSamples),
}

impl EvaluationSamples {
    /// The files, or what stands for a program's samples.
    pub(crate) fn data(&self) -> &Dataset {
        match self {
            EvaluationSamples::Files(pass) => pass.data(),
            EvaluationSamples::Own(first) => &first.stand_in,
        }
    }

    /// How many there are.
    pub(crate) fn samples(&self) -> usize {
        match self {
            EvaluationSamples::Files(pass) => pass.samples(),
            EvaluationSamples::Own(first) => first.number,
        }
    }

    /// Tokens that are predicted, scored or not.
    pub(crate) fn targets(&self) -> usize {
        match self {
            EvaluationSamples::Files(pass) => pass.targets(),
            EvaluationSamples::Own(first) => first.number * first.seq,
        }
    }

    /// Whether groups of `size` samples have targets that are not scored.
    pub(crate) fn masks(&self, size: usize) -> bool {
        match self {
            EvaluationSamples::Files(pass) => pass.masks(size),
            EvaluationSamples::Own(first) => first.hidden.documents,
        }
    }

    /// Tokens that are scored.
    ///
    /// # Errors
    /// A token id beyond the vocabulary; a sample that cannot be had.
    pub(crate) fn scored(&self) -> Result<usize, DataError> {
        match self {
            EvaluationSamples::Files(pass) => pass.scored(),
            EvaluationSamples::Own(first) => first.scored(),
        }
    }

    /// Sample `n`.
    ///
    /// # Errors
    /// As [`scored`](Self::scored).
    pub(crate) fn sample(&self, n: usize) -> Result<Sample, DataError> {
        match self {
            EvaluationSamples::Files(pass) => pass.sample(n),
            EvaluationSamples::Own(first) => first.sample(n),
        }
    }
}
