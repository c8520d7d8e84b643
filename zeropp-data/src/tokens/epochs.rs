//! An epoch of one source: every place at a multiple of the samples' length once, in an order of
//! its own. Where samples become shorter or longer in the middle of an epoch, the samples that are
//! left are put one behind the other, in their order, and cut anew: no token comes twice, and fewer
//! are left out than one new sample has. A new sample may so have parts from several places.

use std::ops::Range;

use super::permutation::permuted;
use crate::rng::Rng;

/// Where a source is in its epochs.
#[derive(Clone, Debug)]
pub(super) struct Epochs<'a> {
    key: &'a Rng,
    /// Tokens of the source.
    len: usize,
    epoch: u64,
    /// How the epoch was cut so far, the coarsest first; not empty once samples were taken.
    cuts: Vec<EpochSamples>,
}

/// Samples of one length that an epoch, or what was left of it, was cut into.
#[derive(Clone, Copy, Debug)]
struct EpochSamples {
    /// Tokens of a sample.
    seq: usize,
    /// How many samples there are.
    samples: u128,
    /// How many were taken.
    taken: u128,
}

impl<'a> Epochs<'a> {
    /// At the beginning of the first epoch of a source of `len` tokens.
    pub(super) fn new(key: &'a Rng, len: usize) -> Epochs<'a> {
        Epochs { key, len, epoch: 0, cuts: Vec::new() }
    }

    /// Places of an epoch that begins with samples of `seq` tokens.
    fn places(&self, seq: usize) -> u128 {
        ((self.len - 1) / seq).max(1) as u128
    }

    /// Takes `n` samples of `seq` tokens. Where what is left of the epoch is less than one, the
    /// next one begins.
    pub(super) fn take(&mut self, n: u128, seq: usize) {
        self.cut(seq);
        let last = self.cuts.last_mut().expect("just cut");
        let left = last.samples - last.taken;
        if n < left {
            last.taken += n;
            return;
        }
        let (n, places) = (n - left, self.places(seq));
        self.epoch += 1 + (n / places) as u64;
        self.cuts = vec![EpochSamples { seq, samples: places, taken: n % places }];
    }

    fn cut(&mut self, seq: usize) {
        let begun = self.cuts.last().filter(|last| self.cuts.len() > 1 || last.taken > 0);
        if begun.is_some_and(|last| last.seq == seq) {
            return;
        }
        let samples =
            begun.map_or(0, |last| (last.samples - last.taken) * last.seq as u128 / seq as u128);
        if samples > 0 {
            self.cuts.push(EpochSamples { seq, samples, taken: 0 });
        } else {
            self.epoch += u64::from(begun.is_some());
            self.cuts = vec![EpochSamples { seq, samples: self.places(seq), taken: 0 }];
        }
    }

    /// Where the tokens of the next sample are, of which there are `seq`, in their order.
    pub(super) fn next(mut self, seq: usize) -> Vec<Range<usize>> {
        self.cut(seq);
        let mut parts = Vec::new();
        let taken = self.cuts.last().expect("just cut").taken;
        self.find(self.cuts.len() - 1, taken, 0..seq, &mut parts);
        parts
    }

    /// Adds where `tokens` of sample `at` of a cut are. What is left over at the end of an epoch is
    /// cut off at a place that moves, so that no token is always left out.
    fn find(&self, cut: usize, at: u128, tokens: Range<usize>, parts: &mut Vec<Range<usize>>) {
        let EpochSamples { seq, samples, .. } = self.cuts[cut];
        let at_random = permuted(self.key, self.epoch, at as u64, samples as u64);
        let Some(coarse) = cut.checked_sub(1) else {
            let left_over = self.len - 1 - samples as usize * seq;
            let drawn = self.key.block(u64::MAX, self.epoch)[0] as usize;
            let first = drawn % (left_over + 1) + at_random as usize * seq;
            let part = first + tokens.start..first + tokens.end;
            match parts.last_mut().filter(|last| last.end == part.start) {
                Some(last) => last.end = part.end,
                None => parts.push(part),
            }
            return;
        };
        // In tokens of what was left before this cut.
        let EpochSamples { seq: size, taken, .. } = self.cuts[coarse];
        let first = u128::from(at_random) * seq as u128;
        let (mut now, end) = (first + tokens.start as u128, first + tokens.end as u128);
        while now < end {
            let (sample, within) = (now / size as u128, (now % size as u128) as usize);
            let n = (end - now).min((size - within) as u128) as usize;
            self.find(coarse, taken + sample, within..within + n, parts);
            now += n as u128;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Epochs, Range};
    use crate::rng::Rng;

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// However an epoch is cut on its way, no token comes twice, and at each new length fewer
        /// are left out than a sample has; none where the lengths divide those before.
        #[test]
        fn an_epoch_has_every_token_once_whatever_the_lengths_of_its_samples(
            seed: u64, places in 1usize..40, over in 0usize..24, epochs in 0u128..3,
            lengths in prop::collection::vec(1usize..60, 1..5), divide: bool,
            shares in prop::collection::vec(0u8..255, 5),
        ) {
            let (key, len) = (Rng::keyed(seed, "epochs"), places * 24 + over % 24 + 1);
            let lengths = if divide { vec![12, 4, 4, 1] } else { lengths };
            let mut now = Epochs::new(&key, len);
            now.take(epochs * places as u128, 24);
            let (epoch, mut seen, mut may_miss) = (now.epoch, vec![0u8; len], 0);
            let last = lengths.len();
            for (i, seq) in std::iter::once(24).chain(lengths).enumerate() {
                let seq = seq.min(len - 1);
                now.cut(seq);
                may_miss += if divide { 0 } else { seq - 1 };
                if now.epoch > epoch {
                    break;
                }
                let cut = *now.cuts.last().unwrap();
                let left = cut.samples - cut.taken;
                let n = if i == last { left } else { left * u128::from(shares[i]) / 255 };
                for i in 0..n {
                    let mut there = now.clone();
                    if i > 0 {
                        there.take(i, seq);
                    }
                    let parts = there.next(seq);
                    prop_assert_eq!(parts.iter().map(Range::len).sum::<usize>(), seq);
                    parts.into_iter().flatten().for_each(|token| seen[token] += 1);
                }
                if n > 0 {
                    now.take(n, seq);
                }
            }
            prop_assert!(seen.iter().all(|n| *n <= 1), "no token twice");
            if now.epoch > epoch {
                let taken = seen.iter().filter(|n| **n == 1).count();
                prop_assert!(taken + may_miss >= places * 24, "{taken} of {}", places * 24);
            }
        }
    }
}
