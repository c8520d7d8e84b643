//! Which tokens sample `index` of a step is: a function of seed, step and index alone.

use crate::choices::Order;
use crate::rng::Rng;
use crate::tokens::{DataError, Dataset};

/// Finds samples in a [`Dataset`]. Any rank may ask for any sample; the answer depends on no other
/// request and on no mesh.
#[derive(Clone, Copy, Debug)]
pub struct Sampler {
    rng: Rng,
    order: Order,
    seq: usize,
    samples_per_step: usize,
}

impl Sampler {
    /// A sampler of `seq` tokens a sample; `samples_per_step` counts those of all ranks.
    pub fn new(seed: u64, order: Order, seq: usize, samples_per_step: usize) -> Sampler {
        Sampler { rng: Rng::keyed(seed, "data"), order, seq, samples_per_step }
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
        assert!(data.len() > self.seq, "{} is checked before a run", data.origin());
        let mut inputs = data.tokens(self.start(data.len(), step, index), self.seq + 1)?;
        let targets = inputs[1..].to_vec();
        inputs.pop();
        Ok((inputs, targets))
    }

    /// First token of the sample, below `len`.
    fn start(&self, len: usize, step: u64, index: usize) -> usize {
        match self.order {
            Order::Random => {
                let block = self.rng.block(index as u64, step);
                let bits = u64::from(block[0]) | u64::from(block[1]) << 32;
                // 64 random bits times the number of places: the upper half is a place. The
                // last place is the one whose last target is the last token.
                let places = (len - self.seq) as u128;
                ((u128::from(bits) * places) >> 64) as usize
            }
            Order::Sequential => {
                let n = u128::from(step) * self.samples_per_step as u128 + index as u128;
                (n * self.seq as u128 % len as u128) as usize
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

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
