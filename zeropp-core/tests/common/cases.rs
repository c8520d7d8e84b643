//! Random cases, others in every run.

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
