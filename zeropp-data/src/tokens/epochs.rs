//! An epoch of one source: every place at a multiple of the samples' length once, in an order of
//! its own. Where samples become shorter in the middle of an epoch, what is left of it is cut into
//! shorter ones, so that no token comes twice and none is left out.

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
    cuts: Vec<Cut>,
}

/// Samples of one length that an epoch, or what was left of it, was cut into.
#[derive(Clone, Copy, Debug)]
struct Cut {
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

    /// The length of the samples that the epoch is in the middle of, and how many are left.
    pub(super) fn middle(&self) -> Option<(usize, u128)> {
        let last = self.cuts.last()?;
        let begun = self.cuts.len() > 1 || last.taken > 0;
        begun.then_some((last.seq, last.samples - last.taken))
    }

    /// Takes `n` samples of `seq` tokens. Where what is left of the epoch cannot be cut into such,
    /// the next one begins.
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
        self.cuts = vec![Cut { seq, samples: places, taken: n % places }];
    }

    fn cut(&mut self, seq: usize) {
        match self.middle() {
            Some((now, _)) if now == seq => {}
            Some((now, left)) if now.is_multiple_of(seq) => {
                let samples = left * (now / seq) as u128;
                self.cuts.push(Cut { seq, samples, taken: 0 });
            }
            in_middle => {
                self.epoch += u64::from(in_middle.is_some());
                self.cuts = vec![Cut { seq, samples: self.places(seq), taken: 0 }];
            }
        }
    }

    /// First token of the next sample, which has `seq` tokens. What is left over at the end of an
    /// epoch is cut off at a place that moves, so that no token is always left out.
    pub(super) fn next(mut self, seq: usize) -> usize {
        self.cut(seq);
        let drawn = self.key.block(u64::MAX, self.epoch)[0] as usize;
        let (mut within, mut at) = (0, self.cuts.last().expect("just cut").taken);
        for finer in (1..self.cuts.len()).rev() {
            let (coarse, fine) = (self.cuts[finer - 1], self.cuts[finer]);
            let at_random = permuted(self.key, self.epoch, at as u64, fine.samples as u64);
            let pieces = (coarse.seq / fine.seq) as u64;
            within += (at_random % pieces) as usize * fine.seq;
            at = coarse.taken + u128::from(at_random / pieces);
        }
        let Cut { seq, samples, .. } = self.cuts[0];
        let left_over = self.len - 1 - samples as usize * seq;
        let first = drawn % (left_over + 1);
        first + permuted(self.key, self.epoch, at as u64, samples as u64) as usize * seq + within
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Epochs;
    use crate::rng::Rng;

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// However an epoch is cut on its way, each of its tokens comes once.
        #[test]
        fn an_epoch_has_every_token_once_whatever_the_lengths_of_its_samples(
            seed: u64, places in 1usize..40, over in 0usize..24, epochs in 0u128..3,
            shares in prop::collection::vec(0u8..255, 3),
        ) {
            let (key, len) = (Rng::keyed(seed, "epochs"), places * 24 + over % 24 + 1);
            let mut now = Epochs::new(&key, len);
            now.take(epochs * places as u128, 24);
            let mut seen = vec![0u8; len];
            for (seq, share) in [24, 12, 4, 1].into_iter().zip(shares.into_iter().chain([255])) {
                now.cut(seq);
                let last = *now.cuts.last().unwrap();
                let n = (last.samples - last.taken) * u128::from(share) / 255;
                for i in 0..n {
                    let mut there = now.clone();
                    if i > 0 {
                        there.take(i, seq);
                    }
                    let start = there.next(seq);
                    seen[start..start + seq].iter_mut().for_each(|n| *n += 1);
                }
                if seq > 1 && n > 0 {
                    now.take(n, seq);
                }
            }
            prop_assert!(seen.iter().all(|n| *n <= 1), "no token twice");
            let taken = seen.iter().filter(|n| **n == 1).count();
            let whole = now.cuts[0];
            prop_assert_eq!(taken, whole.samples as usize * whole.seq, "none is left out");
        }
    }
}
