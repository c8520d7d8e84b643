//! Data that is read once from its start: each token that has one before it is a target once.

use super::{DataError, Dataset, Hidden, Sample, Sampler};
use crate::choices::Order;

/// Samples that follow each other to the end of the data. The last one may be shorter than `seq`:
/// what is beyond the data's end is not scored.
#[derive(Clone, Debug)]
pub struct OnePass {
    data: Dataset,
    sampler: Sampler,
    seq: usize,
    /// Targets of all samples together.
    targets: usize,
    samples: usize,
}

impl OnePass {
    /// All of `data` by samples of `seq` tokens, or the first `most` samples of it. Of several
    /// sources as many samples, in their turns, as come before one of them is at its end.
    ///
    /// # Panics
    /// Panics if the data is too short for a sample ([`Dataset::require`]).
    pub fn new(data: Dataset, seq: usize, most: usize, hidden: Hidden) -> OnePass {
        let whole = data.samples(seq);
        let all = match data.sources() {
            [one] => one.len() - 1,
            _ => whole * seq,
        };
        let samples = all.div_ceil(seq).min(most);
        let targets = all.min(samples.saturating_mul(seq));
        let sampler = Sampler::new(0, Order::Sequential, seq, 1).hiding(hidden);
        OnePass { data, sampler, seq, targets, samples }
    }

    /// The same without a last sample that is shorter, and by whole groups of `size` samples.
    #[must_use]
    pub fn in_whole(self, size: usize) -> OnePass {
        let samples = self.targets / self.seq / size * size;
        OnePass { samples, targets: samples * self.seq, ..self }
    }

    /// The data that is read.
    pub fn data(&self) -> &Dataset {
        &self.data
    }

    /// Samples, the last of which may be shorter.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// Tokens that are predicted, scored or not.
    pub fn targets(&self) -> usize {
        self.targets
    }

    /// Whether groups of `size` samples have targets that are not scored.
    pub fn masks(&self, size: usize) -> bool {
        self.sampler.masks(&self.data) || !self.targets.is_multiple_of(self.seq * size)
    }

    /// Tokens that are scored.
    ///
    /// # Errors
    /// A token id beyond the vocabulary.
    pub fn scored(&self) -> Result<usize, DataError> {
        if !self.sampler.masks(&self.data) {
            return Ok(self.targets);
        }
        let scored = |n| self.sample(n).map(|sample| sample.scored());
        (0..self.samples).map(scored).sum()
    }

    /// Sample `n`, of `seq` tokens; nothing of one behind the last is scored.
    ///
    /// # Errors
    /// A token id beyond the vocabulary.
    pub fn sample(&self, n: usize) -> Result<Sample, DataError> {
        let left = self.targets.saturating_sub(n.saturating_mul(self.seq));
        // What pads a group looks like the first.
        let sample = self.sampler.masked(&self.data, if left == 0 { 0 } else { n as u64 }, 0)?;
        Ok(sample.scoring_first(left))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_token_of_the_data_is_scored_once_whatever_the_size_of_groups() {
        for (len, seq, samples) in [(9, 4, 2), (10, 4, 3), (12, 4, 3), (5, 4, 1), (101, 7, 15)] {
            let data = Dataset::from_bytes((0..len as u8).collect());
            let pass = OnePass::new(data, seq, usize::MAX, Hidden::default());
            assert_eq!((pass.samples(), pass.targets()), (samples, len - 1), "{len} {seq}");
            assert_eq!(pass.scored().unwrap(), len - 1);
            let mut seen = Vec::new();
            for n in 0..samples + 3 {
                let sample = pass.sample(n).unwrap();
                assert_eq!(sample.targets.len(), seq);
                let scored = sample.scored.clone().unwrap_or(vec![true; seq]);
                let of = sample.targets.iter().zip(&scored).filter(|(_, scored)| **scored);
                seen.extend(of.map(|(id, _)| *id as usize));
            }
            assert_eq!(seen, (1..len).collect::<Vec<_>>(), "{len} {seq}");
            assert_eq!(pass.masks(1), (len - 1) % seq > 0);
            assert_eq!(pass.masks(2), (len - 1) % (2 * seq) > 0);
        }
    }

    #[test]
    fn fewer_samples_and_whole_groups_are_the_first_ones() {
        let data = || Dataset::from_bytes((0..100).collect());
        let first = OnePass::new(data(), 8, 5, Hidden::default());
        assert_eq!((first.samples(), first.targets(), first.masks(5)), (5, 40, false));
        let whole = OnePass::new(data(), 8, usize::MAX, Hidden::default()).in_whole(5);
        assert_eq!((whole.samples(), whole.targets(), whole.masks(5)), (10, 80, false));
        assert_eq!(whole.sample(10).unwrap().scored(), 0);
        let mixed = Dataset::mixed(vec![(data(), 3.0), (data(), 1.0)]);
        let mixed = OnePass::new(mixed, 10, usize::MAX, Hidden::default());
        assert_eq!((mixed.samples(), mixed.targets()), (12, 120), "the first source has nine");
    }
}
