//! Limits on waiting, counted while the process runs.
//!
//! A process may stand still for any time: stopped at its terminal, suspended by its batch system,
//! in a container that is paused. The system's clock goes on meanwhile, and by it all that was
//! waited for seems late when the process goes on. So every limit is counted by a clock of the
//! process, which goes on only while it is looked at: by `STEP_MAX` from one look to the next,
//! at most. Everyone who waits looks at it once in a `SLICE`.
//!
//! What another process waits for is counted by that one's clock: where only some processes of a
//! job are paused, the others cannot know, and end after their timeout.

use std::ops::{Add, Sub};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use parking_lot::{Condvar, Mutex, MutexGuard};

/// Longest time that who waits may sleep without looking at the clock.
pub(crate) const SLICE: Duration = Duration::from_millis(100);
/// Longest time that counts from one look to the next: a slice, and as long to come round.
const STEP_MAX: Duration = Duration::from_millis(200);

/// Time in which this process was running.
struct RunningClock {
    looked: Option<Instant>,
    counted: Duration,
}

impl RunningClock {
    fn look(&mut self, now: Instant) -> Duration {
        let since = self.looked.replace(now).map_or(Duration::ZERO, |at| now - at);
        self.counted += since.min(STEP_MAX);
        self.counted
    }
}

static CLOCK: Mutex<RunningClock> =
    Mutex::new(RunningClock { looked: None, counted: Duration::ZERO });

/// A moment by the process's clock of running time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(Duration);

impl Moment {
    /// This moment.
    pub fn now() -> Moment {
        let mut clock = CLOCK.lock();
        Moment(clock.look(Instant::now()))
    }

    /// Time in which the process has been running since. Right for who has looked at the clock
    /// once in a `SLICE`; too little for others.
    pub fn elapsed(self) -> Duration {
        Moment::now() - self
    }
}

impl Add<Duration> for Moment {
    type Output = Moment;

    fn add(self, time: Duration) -> Moment {
        Moment(self.0.saturating_add(time))
    }
}

impl Sub for Moment {
    type Output = Duration;

    fn sub(self, before: Moment) -> Duration {
        self.0.saturating_sub(before.0)
    }
}

/// When a wait has taken too long; never, where that is beyond what the clock counts to.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Option<Moment>);

impl Deadline {
    /// So much running time from now.
    pub fn after(time: Duration) -> Deadline {
        let now = Moment::now();
        Deadline(now.0.checked_add(time).map(Moment))
    }

    /// Time until then.
    pub fn left(self) -> Duration {
        self.0.map_or(Duration::MAX, |at| at - Moment::now())
    }

    /// Whether it has come.
    pub fn is_over(self) -> bool {
        self.left().is_zero()
    }

    /// How long who waits may sleep now; nothing once it has come.
    pub fn slice(self) -> Option<Duration> {
        let left = self.left();
        (!left.is_zero()).then_some(left.min(SLICE))
    }

    /// Waits, with `wait`, which gets the time that it may take, once or over and over, until that
    /// returns something or the deadline has come.
    pub fn until<T>(self, mut wait: impl FnMut(Duration) -> Option<T>) -> Option<T> {
        loop {
            let slice = self.slice();
            let got = wait(slice.unwrap_or_default());
            if got.is_some() || slice.is_none() {
                return got;
            }
        }
    }
}

/// Sleeps until `bell` rings, or for a slice of the time until `deadline`; whether that has come.
/// Who waits looks for what it waits for either way.
pub(crate) fn wait<T>(bell: &Condvar, guard: &mut MutexGuard<'_, T>, deadline: Deadline) -> bool {
    match deadline.slice() {
        Some(slice) => {
            bell.wait_for(guard, slice);
            deadline.is_over()
        }
        None => true,
    }
}

/// The item that comes from `channel` before the deadline, or its end; `None` where neither came.
pub(crate) fn received<T>(
    deadline: Deadline,
    channel: &Receiver<T>,
) -> Option<Result<T, RecvTimeoutError>> {
    deadline.until(|slice| match channel.recv_timeout(slice) {
        Err(RecvTimeoutError::Timeout) => None,
        got => Some(got),
    })
}

/// How long one operation between ranks may be waited for: longer until the ranks of this process
/// have their first step behind them, in which a GPU's kernels are compiled.
pub(crate) struct Timeout {
    usual: Duration,
    first: Duration,
    /// Ranks of this process that are not past their first step.
    new: AtomicUsize,
}

impl Timeout {
    /// That of a process of so many ranks; `first` where their first step has a time of its own.
    pub(crate) fn new(usual: Duration, first: Option<Duration>, ranks: usize) -> Timeout {
        let new = AtomicUsize::new(if first.is_some() { ranks } else { 0 });
        Timeout { usual, first: first.unwrap_or(usual), new }
    }

    /// The value now.
    pub(crate) fn get(&self) -> Duration {
        if self.new.load(Ordering::Relaxed) > 0 { self.first } else { self.usual }
    }

    /// One more rank has its first step behind it. Each says so once.
    pub(crate) fn past_first_step(&self) {
        let less = |new: usize| new.checked_sub(1);
        // The last rank may have said so before.
        let _ = self.new.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_goes_on_with_the_process_and_stands_still_with_it() {
        let begin = Instant::now();
        let mut clock = RunningClock { looked: None, counted: Duration::ZERO };
        clock.look(begin);
        let mut now = begin;
        for _ in 0..30 {
            now += SLICE;
            clock.look(now);
        }
        assert_eq!(clock.counted, 30 * SLICE);
        // Pauses of any length, over and over.
        for pause in [1, 5, 3600] {
            now += SLICE + Duration::from_secs(pause);
            clock.look(now);
        }
        assert_eq!(clock.counted, 30 * SLICE + 3 * STEP_MAX);
    }

    #[test]
    fn a_deadline_comes_once_its_time_has_run() {
        let begin = Instant::now();
        let deadline = Deadline::after(Duration::from_millis(350));
        let mut slices = Vec::new();
        let got = deadline.until(|slice| {
            slices.push(slice);
            std::thread::sleep(slice);
            None::<()>
        });
        assert_eq!((got, deadline.is_over()), (None, true));
        assert!(begin.elapsed() >= Duration::from_millis(350));
        assert!(slices.iter().all(|slice| *slice <= SLICE) && slices.len() >= 4, "{slices:?}");
        assert_eq!(deadline.until(|_| Some(1)), Some(1), "one look there is always");
        assert!(!Deadline::after(Duration::MAX).is_over(), "one beyond the clock never comes");
    }

    #[test]
    fn the_first_step_has_its_time_until_all_ranks_have_it_behind_them() {
        let [usual, first] = [1, 10].map(Duration::from_secs);
        let timeout = Timeout::new(usual, Some(first), 2);
        let at = || timeout.get();
        let times =
            [at(), (timeout.past_first_step(), at()).1, (timeout.past_first_step(), at()).1];
        assert_eq!(times, [first, first, usual]);
        timeout.past_first_step();
        assert_eq!(timeout.get(), usual);
        assert_eq!(Timeout::new(usual, None, 2).get(), usual);
    }
}
