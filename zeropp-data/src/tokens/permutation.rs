//! An order of 0..n that is drawn by a key and looked up at any place: a Feistel network over the
//! next power of four, walked until it falls below n (Black and Rogaway, "Ciphers with arbitrary
//! finite domains", 2002).

use crate::rng::Rng;

/// Enough for every bit to depend on every other, even of few.
const ROUNDS: u64 = 8;

/// The `i`-th of the numbers below `n` in the order of `key` and `epoch`.
///
/// # Panics
/// Panics unless `i` is below `n`.
pub(super) fn permuted(key: &Rng, epoch: u64, i: u64, n: u64) -> u64 {
    assert!(i < n, "place {i} of {n}");
    let bits = (u64::BITS - (n - 1).leading_zeros()).max(1);
    let half = bits.div_ceil(2);
    let mask = (1u64 << half) - 1;
    let mut at = i;
    loop {
        let (mut left, mut right) = (at >> half, at & mask);
        for round in 0..ROUNDS {
            // Halves have at most 32 bits.
            let drawn = u64::from(key.block(round << 32 | right, epoch)[0]);
            (left, right) = (right, (left ^ drawn) & mask);
        }
        at = left << half | right;
        if at < n {
            return at;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Rng, permuted};

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            cases: 64,
            ..ProptestConfig::default()
        })]

        #[test]
        fn every_number_comes_once(seed: u64, epoch: u64, n in 1u64..3000) {
            let key = Rng::keyed(seed, "epochs");
            let mut seen = vec![false; n as usize];
            for i in 0..n {
                let at = permuted(&key, epoch, i, n) as usize;
                prop_assert!(!std::mem::replace(&mut seen[at], true));
            }
        }

        #[test]
        fn the_largest_numbers_are_permuted_too(seed: u64, i in 0..u64::MAX) {
            let key = Rng::keyed(seed, "epochs");
            prop_assert!(permuted(&key, 0, i, u64::MAX) < u64::MAX);
        }
    }

    #[test]
    fn places_and_epochs_are_spread_evenly() {
        let (n, epochs) = (16u64, 4000u64);
        let key = Rng::keyed(3, "epochs");
        let mut hits = vec![0u32; (n * n) as usize];
        for epoch in 0..epochs {
            for i in 0..n {
                hits[(i * n + permuted(&key, epoch, i, n)) as usize] += 1;
            }
        }
        // 250 expected in each of 256, 225 of them free.
        let chi: f64 = hits.iter().map(|h| (f64::from(*h) - 250.0).powi(2) / 250.0).sum();
        assert!((130.0..350.0).contains(&chi), "{chi} on 225 degrees of freedom");
    }
}
