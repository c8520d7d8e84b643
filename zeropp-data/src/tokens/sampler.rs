//! Which tokens sample `index` of a step is: a function of seed, step and index alone.

use super::permutation::permuted;
use super::sample::{Hidden, Sample};
use super::source::Source;
use crate::choices::Order;
use crate::rng::Rng;
use crate::tokens::{DataError, Dataset};

/// Finds samples in a [`Dataset`]. Any rank may ask for any sample; the answer depends on no other
/// request and on no mesh.
#[derive(Clone, Copy, Debug)]
pub struct Sampler {
    rng: Rng,
    epochs: Rng,
    order: Order,
    seq: usize,
    samples_per_step: usize,
    hidden: Hidden,
}

impl Sampler {
    /// A sampler of `seq` tokens a sample; `samples_per_step` counts those of all ranks.
    pub fn new(seed: u64, order: Order, seq: usize, samples_per_step: usize) -> Sampler {
        let (rng, epochs) = (Rng::keyed(seed, "data"), Rng::keyed(seed, "epochs"));
        Sampler { rng, epochs, order, seq, samples_per_step, hidden: Hidden::default() }
    }

    /// The same, of whose samples something is hidden.
    pub fn hiding(self, hidden: Hidden) -> Sampler {
        Sampler { hidden, ..self }
    }

    /// Inputs and targets, `seq` ids each, of sample `index` (0 up to the samples of a step over
    /// all ranks) in `step`, counted from 0. A target is the token after its input.
    ///
    /// # Errors
    /// A token id beyond the vocabulary.
    ///
    /// # Panics
    /// Panics if the data is too short for a sample ([`Dataset::require`]).
    pub fn sample(
        &self,
        data: &Dataset,
        step: u64,
        index: usize,
    ) -> Result<(Vec<u32>, Vec<u32>), DataError> {
        let (source, start) = self.place(data, step, index);
        let mut inputs = source.tokens(start, self.seq + 1)?;
        let targets = inputs[1..].to_vec();
        inputs.pop();
        Ok((inputs, targets))
    }

    /// The same sample with what is [hidden](Self::hiding) of it.
    ///
    /// # Errors
    /// As [`sample`](Self::sample).
    ///
    /// # Panics
    /// As [`sample`](Self::sample).
    pub fn masked(&self, data: &Dataset, step: u64, index: usize) -> Result<Sample, DataError> {
        let (source, start) = self.place(data, step, index);
        let ids = source.tokens(start, self.seq + 1)?;
        let hidden = self.hidden;
        let by_index = hidden.documents && hidden.end.is_none();
        let starts = if by_index { starts(source, start, ids.len()) } else { Vec::new() };
        let marked = if hidden.by_loss_mask { source.scored(start, ids.len()) } else { None };
        Ok(Sample::new(ids, hidden, starts, marked))
    }

    /// Whether a sample may have targets that are not scored.
    pub fn masks(&self, data: &Dataset) -> bool {
        self.hidden.documents || self.hidden.by_loss_mask && data.has_loss_mask()
    }

    /// Which of the inputs of that sample are the first of a document, in their order; none where
    /// the data does not say where documents begin.
    pub fn document_starts(&self, data: &Dataset, step: u64, index: usize) -> Vec<usize> {
        let (source, start) = self.place(data, step, index);
        starts(source, start, self.seq)
    }

    /// The source of the sample, and its first token.
    fn place<'a>(&self, data: &'a Dataset, step: u64, index: usize) -> (&'a Source, usize) {
        let n = u128::from(step) * self.samples_per_step as u128 + index as u128;
        let (source, i) = data.turn(n);
        assert!(source.len() > self.seq, "{} is checked before a run", source.origin());
        (source, self.start(source.len(), (step, index), i))
    }

    /// First token of the sample, below `len`: the `i`-th of its source.
    fn start(&self, len: usize, (step, index): (u64, usize), i: u128) -> usize {
        match self.order {
            Order::Random => {
                let block = self.rng.block(index as u64, step);
                let bits = u64::from(block[0]) | u64::from(block[1]) << 32;
                // 64 random bits times the number of places: the upper half is a place. The
                // last place is the one whose last target is the last token.
                let places = (len - self.seq) as u128;
                ((u128::from(bits) * places) >> 64) as usize
            }
            Order::Sequential => (i * self.seq as u128 % len as u128) as usize,
            Order::Epochs => self.in_epochs(len, i),
        }
    }

    /// Every place at a multiple of `seq` once, in an order of its own for each epoch. What is left
    /// over at the end is cut off at a place that moves, so that no token is always left out.
    fn in_epochs(&self, len: usize, i: u128) -> usize {
        let places = (len - 1) / self.seq;
        let (epoch, i) = ((i / places as u128) as u64, (i % places as u128) as u64);
        let left_over = len - 1 - places * self.seq;
        let drawn = self.epochs.block(u64::MAX, epoch)[0] as usize;
        let first = drawn % (left_over + 1);
        first + permuted(&self.epochs, epoch, i, places as u64) as usize * self.seq
    }
}

/// Which of the `len` tokens from `start` on are the first of a document; after the last comes the
/// first.
fn starts(source: &Source, start: usize, len: usize) -> Vec<usize> {
    let before_the_end = len.min(source.len() - start);
    let mut starts = source.document_starts(start, before_the_end);
    let again = source.document_starts(0, len - before_the_end);
    starts.extend(again.iter().map(|at| at + before_the_end));
    // Documents without a token begin where the next one does.
    starts.dedup();
    starts
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::tokens::SplitPart;

    /// Ids that tell their position, up to 65,536 of them.
    fn counting(len: usize) -> Dataset {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ids.bin");
        let bytes: Vec<u8> = (0..len).flat_map(|i| (i as u16).to_le_bytes()).collect();
        std::fs::write(&path, bytes).unwrap();
        Dataset::open(&path, crate::choices::Tokenizer::U16).unwrap()
    }

    #[test]
    fn sequential_samples_follow_each_other_and_begin_again() {
        let data = counting(10);
        let sampler = Sampler::new(0, Order::Sequential, 4, 3);
        let first = |step, index| sampler.sample(&data, step, index).unwrap();
        assert_eq!(first(0, 0), (vec![0, 1, 2, 3], vec![1, 2, 3, 4]));
        assert_eq!(first(0, 1), (vec![4, 5, 6, 7], vec![5, 6, 7, 8]));
        assert_eq!(first(0, 2), (vec![8, 9, 0, 1], vec![9, 0, 1, 2]));
        assert_eq!(first(1, 0), (vec![2, 3, 4, 5], vec![3, 4, 5, 6]), "sample 3, at token 12");
        // Far along, nothing overflows: token (2⁶⁴−1)·3·4 mod 10.
        assert_eq!(first(u64::MAX, 0).0[0], ((u128::from(u64::MAX) * 12) % 10) as u32);
    }

    #[test]
    fn random_places_cover_the_data_evenly() {
        let data = counting(105);
        let sampler = Sampler::new(5, Order::Random, 5, 100);
        let mut hits = vec![0; 100];
        for step in 0..100 {
            for index in 0..100 {
                hits[sampler.sample(&data, step, index).unwrap().0[0] as usize] += 1;
            }
        }
        // 100 expected in each of the 100 places, with a deviation of 10.
        assert!(hits.iter().all(|h| (50..150).contains(h)), "{hits:?}");
        let chi_square: f64 = hits.iter().map(|h| f64::from(h - 100).powi(2) / 100.0).sum();
        assert!(chi_square < 180.0, "{chi_square} on 99 degrees of freedom");
    }

    #[test]
    fn samples_differ_by_seed_step_and_index() {
        let data = counting(60_000);
        let mut starts = HashSet::new();
        for seed in 0..4 {
            for step in 0..4 {
                for index in 0..4 {
                    let sampler = Sampler::new(seed, Order::Random, 8, 4);
                    starts.insert(sampler.sample(&data, step, index).unwrap().0[0]);
                }
            }
        }
        assert!(starts.len() >= 63, "{} of 64 places", starts.len());
    }

    #[test]
    fn an_epoch_has_every_place_once_and_the_next_another_order() {
        let (len, seq) = (1003, 10);
        let data = counting(len);
        let sampler = Sampler::new(9, Order::Epochs, seq, 8);
        let first = |i: usize| sampler.sample(&data, (i / 8) as u64, i % 8).unwrap().0[0] as usize;
        let epochs: Vec<Vec<usize>> =
            (0..3).map(|e| (e * 100..(e + 1) * 100).map(first).collect()).collect();
        for epoch in &epochs {
            let mut sorted = epoch.clone();
            sorted.sort_unstable();
            let left = sorted[0];
            assert!(left <= 2, "two tokens are left over");
            let all: Vec<usize> = (0..100).map(|place| left + place * seq).collect();
            assert_eq!(sorted, all);
            assert_ne!(&sorted, epoch);
        }
        let offsets = |e: &Vec<usize>| e.iter().map(|at| at / seq).collect::<Vec<_>>();
        assert_ne!(offsets(&epochs[0]), offsets(&epochs[1]));
    }

    #[test]
    fn sources_take_turns_in_their_own_orders() {
        let of = |base: usize, len: usize| {
            Dataset::from_bytes((base..base + len).map(|i| i as u8).collect())
        };
        let data = Dataset::mixed(vec![(of(0, 100), 3.0), (of(100, 50), 1.0)]);
        let sampler = Sampler::new(0, Order::Sequential, 5, 4);
        let first = |i: usize| sampler.sample(&data, (i / 4) as u64, i % 4).unwrap().0[0];
        let firsts: Vec<u32> = (0..8).map(first).collect();
        assert_eq!(firsts, [0, 5, 100, 10, 15, 20, 105, 25]);
        assert_eq!((data.len(), data.vocabulary()), (150, 256));
        assert!(data.require(49).is_ok() && data.require(50).is_err());
        let again = Dataset::mixed(vec![(of(0, 100), 1.0), (of(100, 50), 1.0)]);
        assert!(again.fingerprint().change_since(data.fingerprint()).is_some());
        // Random and epochs stay inside their source.
        for order in [Order::Random, Order::Epochs] {
            let sampler = Sampler::new(0, order, 5, 4);
            for i in 0..40 {
                let (inputs, targets) = sampler.sample(&data, i / 4, i as usize % 4).unwrap();
                let is_second = i % 4 == 2;
                assert!(inputs.iter().chain(&targets).all(|t| (*t >= 100) == is_second));
            }
        }
    }

    #[test]
    fn samples_are_counted_until_a_token_comes_again() {
        for (len, seq, samples) in [(9, 4, 2), (8, 4, 1), (4, 4, 0), (101, 10, 10)] {
            let data = Dataset::from_bytes((0..len as u8).collect());
            assert_eq!(data.samples(seq), samples, "{len} {seq}");
            let sampler = Sampler::new(0, Order::Sequential, seq, 1);
            for i in 0..samples {
                let (inputs, targets) = sampler.sample(&data, i as u64, 0).unwrap();
                assert_eq!(inputs[0] as usize, i * seq);
                assert_eq!(targets[seq - 1] as usize, (i + 1) * seq);
            }
        }
        let of = |len: usize| Dataset::from_bytes(vec![0; len]);
        let data = Dataset::mixed(vec![(of(101), 3.0), (of(101), 1.0)]);
        let n = data.samples(10);
        assert_eq!(n, 13, "of four three are the first source's, which has ten");
        assert!((0..n).all(|i| data.turn(i as u128).1 < 10));
    }

    #[test]
    fn splits_share_no_token() {
        let data = || Dataset::from_bytes((0..200).collect());
        let training = data().split(98, 2, SplitPart::Training);
        let validation = data().split(98, 2, SplitPart::Validation);
        assert_eq!((training.len(), validation.len()), (196, 4));
        let sampler = Sampler::new(0, Order::Sequential, 3, 1);
        assert_eq!(sampler.sample(&validation, 0, 0).unwrap().0, [196, 197, 198]);
        for step in 0..500 {
            let random = Sampler::new(1, Order::Random, 9, 1);
            let (inputs, targets) = random.sample(&training, step, 0).unwrap();
            assert!(inputs.iter().chain(&targets).all(|t| *t < 196));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn a_target_is_the_token_after_its_input(
            seed: u64, step: u64, index in 0usize..1000, seq in 1usize..50, extra in 1usize..50,
            sequential: bool,
        ) {
            let order = if sequential { Order::Sequential } else { Order::Random };
            let data = Dataset::from_bytes((0..seq + extra).map(|i| i as u8).collect());
            let sampler = Sampler::new(seed, order, seq, 1000);
            let (inputs, targets) = sampler.sample(&data, step, index).unwrap();
            prop_assert_eq!((inputs.len(), targets.len()), (seq, seq));
            for (input, target) in inputs.iter().zip(&targets) {
                prop_assert_eq!((*input as usize + 1) % data.len(), *target as usize);
            }
            // A random sample never runs over the end.
            prop_assert!(sequential || inputs[0] as usize + seq < data.len());
            prop_assert_eq!(sampler.sample(&data, step, index).unwrap(), (inputs, targets));
        }
    }
}
