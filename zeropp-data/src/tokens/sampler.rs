//! Which tokens sample `index` of a step is: a function of seed, step and index, and of where the
//! run began to count.

use std::ops::Range;
use std::sync::Arc;

use super::epochs::Epochs;
use super::position::{Position, Stretch};
use super::sample::{Hidden, Sample};
use super::source::TokenStore;
use crate::choices::Order;
use crate::rng::Rng;
use crate::tokens::{DataError, Dataset};

/// Finds samples in a [`Dataset`]. Any rank may ask for any sample; the answer depends on no other
/// request and on no mesh.
#[derive(Clone, Debug)]
pub struct Sampler {
    rng: Rng,
    epochs: Rng,
    order: Order,
    seq: usize,
    samples_per_step: usize,
    hidden: Hidden,
    began: Arc<Began>,
}

/// Where a run goes on.
#[derive(Debug, Default)]
struct Began {
    /// Steps behind it.
    step: u64,
    /// The place after them.
    position: Position,
}

impl Sampler {
    /// A sampler of `seq` tokens a sample; `samples_per_step` counts those of all ranks.
    pub fn new(seed: u64, order: Order, seq: usize, samples_per_step: usize) -> Sampler {
        let (rng, epochs) = (Rng::keyed(seed, "data"), Rng::keyed(seed, "epochs"));
        let (hidden, began) = (Hidden::default(), Arc::default());
        Sampler { rng, epochs, order, seq, samples_per_step, hidden, began }
    }

    /// The same, of a run that goes on after `step` steps, in which it has come to `position`.
    pub fn going_on(self, step: u64, position: Position) -> Sampler {
        Sampler { began: Arc::new(Began { step, position }), ..self }
    }

    /// The place of a run after `step` steps, which are no fewer than those it went on from.
    pub fn position(&self, step: u64) -> Position {
        let steps = step.saturating_sub(self.began.step);
        let samples = steps.saturating_mul(self.samples_per_step as u64);
        self.began.position.clone().and(samples, self.seq)
    }

    /// The number, among all samples of the run, of sample `index` of `step`, counted from 0.
    ///
    /// # Panics
    /// Panics for a step before those that the run goes on from.
    pub fn number(&self, step: u64, index: usize) -> u128 {
        let Began { step: first, position } = &*self.began;
        let steps = step.checked_sub(*first).expect("a run does not go back before its beginning");
        let before = u128::from(position.samples());
        before + u128::from(steps) * self.samples_per_step as u128 + index as u128
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
        let (source, parts) = self.place(data, step, index);
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for part in parts {
            let ids = source.tokens(part.start, part.len() + 1)?;
            targets.extend_from_slice(&ids[1..]);
            inputs.extend_from_slice(&ids[..part.len()]);
        }
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
        let (source, parts) = self.place(data, step, index);
        let hidden = self.hidden;
        let by_index = hidden.documents && hidden.end.is_none();
        let mut sample = Sample::default();
        for Range { start, end } in parts {
            let ids = source.tokens(start, end - start + 1)?;
            let starts = if by_index { starts(source, start, ids.len()) } else { Vec::new() };
            let marked = if hidden.by_loss_mask { source.scored(start, ids.len()) } else { None };
            sample.append(Sample::new(ids, hidden, starts, marked), hidden);
        }
        Ok(sample)
    }

    /// Whether a sample may have targets that are not scored.
    pub fn masks(&self, data: &Dataset) -> bool {
        self.hidden.documents || self.hidden.by_loss_mask && data.has_loss_mask()
    }

    /// Which of the inputs of that sample are the first of a document, in their order; none where
    /// the data does not say where documents begin.
    pub fn document_starts(&self, data: &Dataset, step: u64, index: usize) -> Vec<usize> {
        let (source, parts) = self.place(data, step, index);
        let (mut all, mut before) = (Vec::new(), 0);
        for part in parts {
            let starts = starts(source, part.start, part.len());
            all.extend(starts.into_iter().map(|at| before + at));
            before += part.len();
        }
        all
    }

    /// The source of the sample, and where its tokens are there: in one part, but where an epoch
    /// was cut anew.
    fn place<'a>(
        &self,
        data: &'a Dataset,
        step: u64,
        index: usize,
    ) -> (&'a TokenStore, Vec<Range<usize>>) {
        let (at, i) = data.turn(self.number(step, index));
        let source = &data.sources()[at];
        let len = source.len();
        assert!(len > self.seq, "{} is checked before a run", source.origin());
        let start = match self.order {
            Order::Random => self.drawn(len, step, index),
            Order::Epochs => {
                let (mut epochs, before) = self.epochs_so_far(data, at);
                if i > before {
                    epochs.take(i - before, self.seq);
                }
                return (source, epochs.next(self.seq));
            }
            Order::Sequential => {
                let taken = self.stretches_of(data, at);
                let (tokens, before) = taken.fold((0, 0), |(tokens, before), (samples, seq)| {
                    (tokens + samples * seq as u128, before + samples)
                });
                ((tokens + (i - before) * self.seq as u128) % len as u128) as usize
            }
        };
        (source, vec![start..start + self.seq])
    }

    /// Where a sample begins that is drawn, below `len`.
    fn drawn(&self, len: usize, step: u64, index: usize) -> usize {
        let block = self.rng.block(index as u64, step);
        let bits = u64::from(block[0]) | u64::from(block[1]) << 32;
        // 64 random bits times the number of places: the upper half is a place. The last place is
        // the one whose last target is the last token.
        let places = (len - self.seq) as u128;
        ((u128::from(bits) * places) >> 64) as usize
    }

    /// The samples of a source that the run went on from, each stretch of one length.
    fn stretches_of<'a>(
        &'a self,
        data: &'a Dataset,
        source: usize,
    ) -> impl Iterator<Item = (u128, usize)> + 'a {
        let mut all = 0u128;
        self.began.position.stretches().iter().map(move |Stretch { samples, seq }| {
            let before = data.before(all, source);
            all += u128::from(*samples);
            (data.before(all, source) - before, *seq)
        })
    }

    /// Where a source was in its epochs when the run went on, and how many of its samples were
    /// taken then.
    fn epochs_so_far(&self, data: &Dataset, source: usize) -> (Epochs<'_>, u128) {
        let mut epochs = Epochs::new(&self.epochs, data.sources()[source].len());
        let mut before = 0;
        for (samples, seq) in self.stretches_of(data, source).filter(|(samples, _)| *samples > 0) {
            epochs.take(samples, seq);
            before += samples;
        }
        (epochs, before)
    }
}

/// Which of the `len` tokens from `start` on are the first of a document; after the last comes the
/// first.
fn starts(source: &TokenStore, start: usize, len: usize) -> Vec<usize> {
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

    /// Before, the place was worked out as steps times today's batch: of 48 samples 24 came twice
    /// and 24 never.
    #[test]
    fn a_run_that_goes_on_with_another_batch_takes_each_sample_of_an_epoch_once() {
        let data = counting(4 * 48 + 1);
        let mixed = Dataset::mixed(vec![(counting(4 * 48 + 1), 3.0), (counting(4 * 16 + 1), 1.0)]);
        for order in [Order::Epochs, Order::Sequential] {
            for (data, all) in [(&data, 48), (&mixed, 64)] {
                let mut starts = Vec::new();
                let (mut sampler, mut step) = (Sampler::new(3, order, 4, 4), 0);
                for (batch, steps) in [(4, 5), (2, 4), (9, 2), (1, all - 20 - 8 - 18)] {
                    let position = sampler.position(step);
                    sampler = Sampler::new(3, order, 4, batch).going_on(step, position);
                    for _ in 0..steps {
                        starts.extend((0..batch).map(|i| {
                            let (source, _) = data.turn(sampler.number(step, i));
                            (source, sampler.sample(data, step, i).unwrap().0[0])
                        }));
                        step += 1;
                    }
                }
                assert_eq!(sampler.position(step), Position::after(all as u64, 4));
                assert_eq!(starts.len(), all);
                starts.sort_unstable();
                starts.dedup();
                assert_eq!(starts.len(), all, "{order:?}");
            }
        }
    }

    #[test]
    fn samples_of_another_length_take_what_an_epoch_has_left() {
        let data = counting(8 * 6 + 1);
        for (order, seq) in [Order::Epochs, Order::Sequential]
            .into_iter()
            .flat_map(|order| [1, 3, 4, 16, 32].map(|seq| (order, seq)))
        {
            let before = Sampler::new(1, order, 8, 2);
            let after = Sampler::new(1, order, seq, 32 / seq).going_on(1, before.position(1));
            let taken = |sampler: &Sampler, step: u64, index| {
                let hidden = Hidden { documents: true, end: Some(99), by_loss_mask: false };
                let (inputs, targets) = sampler.sample(&data, step, index).unwrap();
                assert!(inputs.iter().zip(&targets).all(|(input, target)| input + 1 == *target));
                let sample = sampler.clone().hiding(hidden).masked(&data, step, index).unwrap();
                assert_eq!((&sample.inputs, &sample.targets), (&inputs, &targets));
                assert_eq!(sample.scored(), sample.targets.len());
                let breaks = (1..inputs.len()).filter(|i| inputs[i - 1] + 1 != inputs[*i]);
                assert_eq!(sample.documents, breaks.collect::<Vec<_>>(), "parts are kept apart");
                inputs
            };
            let mut seen: Vec<u32> = (0..2).flat_map(|i| taken(&before, 0, i)).collect();
            seen.extend((0..32 / seq).flat_map(|i| taken(&after, 1, i)));
            seen.sort_unstable();
            let all = seen.len();
            seen.dedup();
            assert_eq!(seen.len(), all, "{order:?} {seq}: no token twice");
            assert!(all > 48 - seq, "{order:?} {seq}: {all} of 48");
        }
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
