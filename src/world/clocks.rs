//! How far the clocks of two hosts are apart.

use std::ops::RangeInclusive;

use zeropp_comm::flight::now_ns;
use zeropp_comm::{CommResult, Communicator};

/// Rounds in which the ranks exchange times: a chance each that little time passes between sending
/// and receiving.
const ROUNDS: usize = 8;

/// When a rank began to send its time, and when it had received that of all others.
#[derive(Clone, Copy, Debug)]
struct Round {
    sent_ns: u64,
    received_ns: u64,
}

/// The rounds of every rank, each by its own clock.
pub(super) struct ClockRounds(Vec<Vec<Round>>);

/// This process's clock beside rank 0's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ClockOffset {
    /// This process's clock less rank 0's, in ns.
    pub(crate) ahead_ns: i64,
    /// How wrong that may be.
    pub(crate) error_ns: u64,
    /// The number to add to a time since the start of this process's ranks to have it since the
    /// start of rank 0's process, in ns.
    offset_ns: i64,
}

impl ClockOffset {
    /// That of a process whose ranks started at `epoch_ns` by its own clock, which is `ahead_ns`
    /// before rank 0's, where they started at `first_epoch_ns`.
    pub(super) fn new(
        ahead_ns: RangeInclusive<i64>,
        epoch_ns: u64,
        first_epoch_ns: u64,
    ) -> ClockOffset {
        let likely = likely(&ahead_ns);
        let error_ns = likely.abs_diff(*ahead_ns.start()).max(likely.abs_diff(*ahead_ns.end()));
        let apart = epoch_ns.wrapping_sub(first_epoch_ns) as i64;
        ClockOffset { ahead_ns: likely, error_ns, offset_ns: apart - likely }
    }

    /// A time since this process's start as rank 0's clock shows it; times before its start count
    /// as that.
    pub(crate) fn shift(&self, ns: u64) -> u64 {
        ns.saturating_add_signed(self.offset_ns)
    }
}

/// The identity of this process's clock: processes under one kernel share it.
pub(super) fn own(host: &str) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let boot = boot.trim();
    if boot.is_empty() { host.to_string() } else { boot.to_string() }
}

/// All ranks exchange times, in several rounds. All call it.
///
/// # Errors
/// The world's first error, or a timeout.
pub(super) fn tell(world: &dyn Communicator) -> CommResult<ClockRounds> {
    let mut rounds: Vec<Vec<Round>> = vec![Vec::new(); world.size()];
    let mut received_ns = 0;
    let mut reported: Vec<u64> = Vec::new();
    // The last round only shows when the one before it was over.
    for _ in 0..=ROUNDS {
        let begin = now_ns();
        let message = [begin.to_le_bytes(), u64::to_le_bytes(received_ns)].concat();
        let all = world.exchange(message).wait()?;
        received_ns = now_ns();
        let time = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).unwrap_or(begin);
        let now: Vec<[u64; 2]> =
            all.iter().map(|m| [0, 8].map(|at| time(m.get(at..at + 8).unwrap_or(&[])))).collect();
        for (rounds, (sent_ns, [_, received_ns])) in
            rounds.iter_mut().zip(reported.iter().zip(&now))
        {
            rounds.push(Round { sent_ns: *sent_ns, received_ns: *received_ns });
        }
        reported = now.iter().map(|[begun, _]| *begun).collect();
    }
    Ok(ClockRounds(rounds))
}

impl ClockRounds {
    /// The range in which the clock of the ranks `mine` less that of the ranks `theirs` lies, in
    /// ns.
    pub(super) fn bounds(&self, mine: &[usize], theirs: &[usize]) -> RangeInclusive<i64> {
        let of = |ranks: &[usize]| ranks.iter().map(|rank| &self.0[*rank][..]).collect::<Vec<_>>();
        bounds(&of(mine), &of(theirs))
    }
}

/// The range of `mine` less `theirs`: no time is received before it was sent.
fn bounds(mine: &[&[Round]], theirs: &[&[Round]]) -> RangeInclusive<i64> {
    let (mut least, mut most) = (i64::MIN, i64::MAX);
    for (my, their) in mine.iter().flat_map(|my| theirs.iter().map(move |their| (my, their))) {
        for (my, their) in my.iter().zip(*their) {
            least = least.max(my.sent_ns.wrapping_sub(their.received_ns) as i64);
            most = most.min(my.received_ns.wrapping_sub(their.sent_ns) as i64);
        }
    }
    least..=most
}

/// Hosts of a cluster are mostly set by one clock; where they are not, the middle is closest.
fn likely(bounds: &RangeInclusive<i64>) -> i64 {
    if bounds.contains(&0) { 0 } else { bounds.start().midpoint(*bounds.end()) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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
                let (received, received_too) = (second + way, second + way + back);
                theirs.push(Round { sent_ns: first, received_ns: received });
                let mine_of = |time: u64| time.wrapping_add_signed(offset);
                mine.push(Round { sent_ns: mine_of(second), received_ns: mine_of(received_too) });
                quickest = quickest.min(received_too - first + received - second);
                now = received_too + 1000;
            }
            let bounds = bounds(&[&mine], &[&theirs]);
            prop_assert!(bounds.contains(&offset), "{bounds:?} {offset}");
            prop_assert!((bounds.end() - bounds.start()) as u64 <= quickest);
            let clock = ClockOffset::new(bounds, 0, 0);
            prop_assert!(clock.ahead_ns.abs_diff(offset) <= clock.error_ns, "{clock:?}");
            prop_assert!(clock.error_ns <= quickest, "{clock:?}");
        }
    }
}
