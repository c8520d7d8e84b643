//! How far an operation's results may lie from exact ones, and the seeds of random cases.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use proptest::prelude::ProptestConfig;
use proptest::test_runner::RngSeed;

/// Replays the cases of an earlier run; see [`cases`].
const SEED: &str = "ZEROPP_TEST_SEED";

/// Other random cases in every run. A test that fails prints the seed; with it in the environment
/// as `ZEROPP_TEST_SEED` the same cases come again.
pub(crate) fn cases(cases: u32) -> ProptestConfig {
    static CHOSEN: LazyLock<u64> = LazyLock::new(|| match std::env::var(SEED) {
        Ok(seed) => seed.parse().unwrap_or_else(|_| panic!("{SEED} = {seed}: not a whole number")),
        Err(_) => RandomState::new().hash_one("seed"),
    });
    eprintln!("{SEED}={} brings these cases again", *CHOSEN);
    let rng_seed = RngSeed::Fixed(*CHOSEN);
    ProptestConfig { cases, rng_seed, failure_persistence: None, ..ProptestConfig::default() }
}

/// Largest error of one rounding in fp32, relative to its result.
const ROUNDING: f64 = f32::EPSILON as f64 / 2.0;
/// Roundings on the way to an element beside those of its sums: an elementary function of the
/// kernels has an error of up to 7 of them (the sigmoid's own test), an element passes two, and is
/// scaled, shifted and stored a dozen times.
const ELEMENTWISE: f64 = 2.0 * 7.0 + 12.0;
/// Standard deviations of a sum's error that no case reaches: one element in 10¹⁵.
const DEVIATIONS: f64 = 8.0;

/// The error of results that are sums of `lengths` elements, one after another, relative to the
/// largest of them. The errors of a sum of n are n roundings of partial sums that grow like √n; as
/// good as independent, they add up to √n of the result's own size (Higham & Mary, "A new approach
/// to probabilistic rounding error analysis", 2019).
///
/// It holds where a result has elements enough that the largest one is no accident: cases have
/// eight or more.
pub(crate) fn bound(lengths: &[usize]) -> f64 {
    let sums: f64 = lengths.iter().map(|n| DEVIATIONS * (*n as f64).sqrt()).sum();
    ROUNDING * (ELEMENTWISE * lengths.len().max(1) as f64 + sums)
}

#[test]
fn bounds_follow_from_lengths_alone() {
    assert_eq!(bound(&[]), bound(&[0]));
    assert!(bound(&[]) < 2e-6 && bound(&[100]) < 7e-6, "{} {}", bound(&[]), bound(&[100]));
    assert!(bound(&[100, 100]) > bound(&[100]) && bound(&[400]) > bound(&[100]));
}
