//! How far the clocks of two hosts are apart.

use std::ops::RangeInclusive;

use zeropp_comm::flight::now_ns;
use zeropp_comm::{CommResult, Communicator};

/// Rounds in which the ranks tell each other the time: a chance each that little time passes
/// between one's telling and another's hearing.
const ROUNDS: usize = 8;

/// When a rank began to tell the time, and when it had heard that of all others.
type Round = (u64, u64);

/// What tells the clock of this process from others: processes under one kernel share it.
pub(super) fn own(host: &str) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let boot = boot.trim();
    if boot.is_empty() { host.to_string() } else { boot.to_string() }
}

/// This rank's clock less that of rank 0's, in nanoseconds. `clocks` has the clock of each rank of
/// `world`; all ranks call it.
///
/// # Errors
/// The world's first error, or a timeout.
pub(super) fn ahead_ns(world: &dyn Communicator, clocks: &[String]) -> CommResult<i64> {
    let shared = |with: usize| (0..clocks.len()).filter(move |r| clocks[*r] == clocks[with]);
    if shared(0).count() == clocks.len() {
        return Ok(0);
    }
    let mut rounds: Vec<Vec<Round>> = vec![Vec::new(); clocks.len()];
    let mut heard = 0;
    let mut told: Vec<u64> = Vec::new();
    // The last round only tells when that before it was over.
    for _ in 0..=ROUNDS {
        let begin = now_ns();
        let message = [begin.to_le_bytes(), u64::to_le_bytes(heard)].concat();
        let all = world.exchange(message).wait()?;
        heard = now_ns();
        let time = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).unwrap_or(begin);
        let now: Vec<[u64; 2]> =
            all.iter().map(|m| [0, 8].map(|at| time(m.get(at..at + 8).unwrap_or(&[])))).collect();
        for (rounds, (begun, [_, over])) in rounds.iter_mut().zip(told.iter().zip(&now)) {
            rounds.push((*begun, *over));
        }
        told = now.iter().map(|[begun, _]| *begun).collect();
    }
    if clocks[world.rank()] == clocks[0] {
        return Ok(0);
    }
    let of = |with: usize| shared(with).map(|rank| rounds[rank].as_slice()).collect::<Vec<_>>();
    Ok(likely(bounds(&of(world.rank()), &of(0))))
}

/// What `mine` less `theirs` can be: nobody hears of a time before it was told.
fn bounds(mine: &[&[Round]], theirs: &[&[Round]]) -> RangeInclusive<i64> {
    let (mut least, mut most) = (i64::MIN, i64::MAX);
    for (my, their) in mine.iter().flat_map(|my| theirs.iter().map(move |their| (my, their))) {
        for (my, their) in my.iter().zip(*their) {
            least = least.max(my.0.wrapping_sub(their.1) as i64);
            most = most.min(my.1.wrapping_sub(their.0) as i64);
        }
    }
    least..=most
}

/// Hosts of a cluster are mostly set by one clock; where they are not, the middle is closest.
fn likely(bounds: RangeInclusive<i64>) -> i64 {
    if bounds.contains(&0) { 0 } else { bounds.start().midpoint(*bounds.end()) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};

    use super::*;

    proptest! {
        /// Whatever the delays, the truth is within the bounds, and they are no wider than the
        /// quickest round.
        #[test]
        fn the_truth_is_within_the_bounds(
            offset in -1_000_000_000i64..1_000_000_000,
            delays in prop::collection::vec(
                (0u64..50_000_000, 0u64..50_000_000, 0u64..50_000_000),
                1..9,
            ),
        ) {
            let (mut mine, mut theirs) = (Vec::new(), Vec::new());
            let mut now = 5_000_000_000u64;
            let mut quickest = u64::MAX;
            for (late, way, back) in delays {
                let (first, second) = (now, now + late);
                let (heard, heard_too) = (second + way, second + way + back);
                theirs.push((first, heard));
                let mine_of = |time: u64| time.wrapping_add_signed(offset);
                mine.push((mine_of(second), mine_of(heard_too)));
                quickest = quickest.min(heard_too - first + heard - second);
                now = heard_too + 1000;
            }
            let bounds = bounds(&[&mine], &[&theirs]);
            prop_assert!(bounds.contains(&offset), "{bounds:?} {offset}");
            prop_assert!((bounds.end() - bounds.start()) as u64 <= quickest);
            let error = likely(bounds.clone()).abs_diff(offset);
            prop_assert!(error <= (bounds.end() - bounds.start()) as u64, "{error}");
        }
    }

    /// Ranks of this process, with clocks as given.
    fn measured(clocks: &[&str]) -> Vec<i64> {
        let clocks: Vec<String> = clocks.iter().map(|c| c.to_string()).collect();
        let world = ThreadsWorld::new(clocks.len(), ThreadsOptions::default());
        std::thread::scope(|scope| {
            let measure = |world: std::sync::Arc<dyn Communicator>| ahead_ns(&*world, &clocks);
            let ranks = world.communicators().into_iter().map(|w| scope.spawn(move || measure(w)));
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
        })
    }

    #[test]
    fn ranks_that_share_a_clock_are_never_apart() {
        assert_eq!(measured(&["a", "a", "a"]), [0, 0, 0]);
        let apart = measured(&["a", "b", "a", "b"]);
        // The clocks are one in truth, which the bounds must allow for.
        assert_eq!(apart, [0, 0, 0, 0]);
    }
}
