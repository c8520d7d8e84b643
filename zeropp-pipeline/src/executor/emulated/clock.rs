//! The time of an emulated rank.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use zeropp_comm::{CommResult, Pending};

/// Waits end with a spin of at most this long, because a sleeping thread wakes up late: the kernel
/// rounds timers by 50 µs. Short enough that many ranks on few cores do not get in each other's
/// way.
const SPIN_NS: u64 = 100_000;

/// Where one rank's time went since its clock was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// Waiting for given times: computation, transfers, and other ranks. What is left of the
    /// rank's time is the runtime's own.
    pub waited_ns: u64,
    /// Sum of how late the rank was after each wait.
    pub late_ns: u64,
    /// Waits.
    pub waits: u64,
}

/// The time of one emulated rank.
///
/// It runs like the real one, except in waits: a wait ends at the very moment it is for, though the
/// thread wakes up later. The rank is then behind the real time by that much, and catches up in its
/// next wait, as a device with work in its queue does not care when its host wakes up. So what the
/// runtime does costs its real time, and what other programs on the machine do costs none, as long
/// as waits are longer than ranks are late. The clock is never ahead of the real time.
pub struct EmulatedClock {
    epoch: Instant,
    state: Mutex<ClockState>,
}

#[derive(Default)]
struct ClockState {
    /// How far the rank is behind the real time.
    behind_ns: u64,
    /// Whether the rank looks for messages, and does nothing else until one is there.
    looks: bool,
    spent: Spent,
}

impl EmulatedClock {
    /// A clock whose times count from `epoch`.
    pub fn new(epoch: Instant) -> Arc<EmulatedClock> {
        Arc::new(EmulatedClock { epoch, state: Mutex::default() })
    }

    fn real(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    /// The rank's time in nanoseconds since the epoch.
    pub fn now(&self) -> u64 {
        self.real() - self.state.lock().behind_ns
    }

    /// Where the rank's time went so far.
    pub fn spent(&self) -> Spent {
        self.state.lock().spent
    }

    /// Returns once it is `until`; at once if that is past.
    pub fn wait_until(&self, until: u64) {
        let begin = self.now();
        if until <= begin {
            return;
        }
        let mut real = self.real();
        while real < until {
            match (until - real).checked_sub(SPIN_NS) {
                Some(rest) if rest > 0 => std::thread::sleep(Duration::from_nanos(rest)),
                _ => std::hint::spin_loop(),
            }
            real = self.real();
        }
        let mut state = self.state.lock();
        state.behind_ns = real - until;
        state.spent.waited_ns += until - begin;
        state.spent.late_ns += real - until;
        state.spent.waits += 1;
    }

    /// Lets real time pass in which the rank has nothing to do but to look for what others send.
    /// It takes none of the rank's time, as in [`blocked`](Self::blocked).
    pub(super) fn look_again_after(&self, pause: Duration) {
        let begin = self.now();
        std::thread::sleep(pause);
        let mut state = self.state.lock();
        (state.behind_ns, state.looks) = (self.real() - begin, true);
    }

    /// The rank has found what it looked for.
    pub(super) fn found(&self) {
        self.state.lock().looks = false;
    }

    /// Whether what is there at `time` is there for this rank: by its own time, or by the real one
    /// where it would let time pass until then.
    pub(super) fn has_come(&self, time: u64) -> bool {
        let looks = self.state.lock().looks;
        time <= if looks { self.real() } else { self.now() }
    }

    /// Waits for what another rank has to do first. It takes none of the rank's time: what comes
    /// says when it is there, and that is waited for next.
    pub(super) fn blocked<T>(&self, operation: Pending<T>) -> CommResult<T> {
        let begin = self.now();
        let result = operation.wait();
        self.state.lock().behind_ns = self.real() - begin;
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_over_at_its_time_and_accounted_for() {
        let clock = EmulatedClock::new(Instant::now());
        clock.wait_until(0);
        assert_eq!(clock.spent(), Spent::default(), "what is past is not waited for");
        let until = clock.now() + 300_000;
        clock.wait_until(until);
        assert!(clock.now() >= until);
        let spent = clock.spent();
        assert_eq!(spent.waits, 1);
        assert!((1..=300_000).contains(&spent.waited_ns));
    }

    /// The rank's time stands still while it waits for others, and never runs ahead.
    #[test]
    fn a_late_rank_catches_up_in_its_next_wait() {
        let clock = EmulatedClock::new(Instant::now());
        clock.wait_until(100_000);
        let late = clock.now();
        std::thread::sleep(Duration::from_millis(2));
        clock.state.lock().behind_ns = clock.real() - late;
        assert!(clock.real() >= late + 2_000_000);
        clock.wait_until(late + 1_000_000);
        assert!(clock.now() < late + 2_000_000, "1 ms of its own time is over at once");
        let until = clock.now() + 4_000_000;
        clock.wait_until(until);
        assert!(clock.real() >= until);
    }
}
