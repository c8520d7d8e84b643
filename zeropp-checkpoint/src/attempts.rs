//! Decides after a failure whether a run, or its ranks, are started again.

use std::collections::HashMap;
use std::time::Duration;

/// How often a run may fail at the same place.
pub const SAME_PLACE: u32 = 3;

/// The pause after a first failure at a place.
const PAUSE: Duration = Duration::from_millis(500);
/// How much longer each further one is.
const GROWTH: u32 = 10;

/// The failures of a run so far.
#[derive(Clone, Debug)]
pub struct Attempts {
    max: u64,
    made: u64,
    failed: HashMap<Option<u64>, u32>,
    /// How often it has failed where it failed last.
    here: u32,
}

/// The answer to a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// To start again.
    Again,
    /// Nothing: it has failed at this place [`SAME_PLACE`] times, so it would again.
    SamePlace,
    /// Nothing: as often as allowed was made already.
    UsedUp,
}

impl Attempts {
    /// Of a run that may be started again so often.
    pub fn new(max: u64) -> Attempts {
        Attempts { max, made: 0, failed: HashMap::new(), here: 0 }
    }

    /// Most recoveries that there may be.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// Recoveries that were made.
    pub fn made(&self) -> u64 {
        self.made
    }

    /// A failure at a `place`: the step under way, or the newest checkpoint; `None` before the
    /// first.
    pub fn fail(&mut self, place: Option<u64>) -> Remedy {
        let times = self.failed.entry(place).or_default();
        *times += 1;
        self.here = *times;
        if *times >= SAME_PLACE {
            return Remedy::SamePlace;
        }
        if self.made == self.max {
            return Remedy::UsedUp;
        }
        self.made += 1;
        Remedy::Again
    }

    /// How long to wait before the next start: what a machine refuses for a moment, such as threads
    /// or memory, it may grant a little later. Longer after each failure at the same place.
    pub fn pause(&self) -> Duration {
        match self.here {
            0 => Duration::ZERO,
            times => PAUSE * GROWTH.pow(times.min(SAME_PLACE) - 1),
        }
    }

    /// The run goes on with fewer replicas: what failed with more of them says nothing of its
    /// places.
    pub fn go_on_with_fewer(&mut self) {
        self.failed.clear();
        self.here = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_that_comes_back_ends_it_and_progress_does_not() {
        let mut attempts = Attempts::new(4);
        let places = [None, None, Some(1), Some(2), Some(3)];
        let remedies = places.map(|place| attempts.fail(place));
        assert_eq!(remedies[..4], [Remedy::Again; 4]);
        assert_eq!((remedies[4], attempts.made()), (Remedy::UsedUp, 4));
        assert_eq!(Attempts::new(9).fail(None), Remedy::Again);
        assert_eq!(attempts.fail(None), Remedy::SamePlace, "that says more");
        assert_eq!(Attempts::new(0).fail(None), Remedy::UsedUp);
        let mut attempts = Attempts::new(9);
        let remedies = [(); 4].map(|()| {
            attempts.go_on_with_fewer();
            attempts.fail(Some(1))
        });
        assert_eq!(remedies, [Remedy::Again; 4]);
        assert_eq!([(); 2].map(|()| attempts.fail(Some(1))), [Remedy::Again, Remedy::SamePlace]);
    }

    #[test]
    fn a_pause_grows_with_each_failure_at_the_same_place() {
        let mut attempts = Attempts::new(9);
        assert_eq!(attempts.pause(), Duration::ZERO, "before the first start");
        let pauses = [Some(1), Some(1), Some(2), Some(3)].map(|place| {
            attempts.fail(place);
            attempts.pause().as_millis()
        });
        assert_eq!(pauses, [500, 5000, 500, 500]);
        attempts.go_on_with_fewer();
        assert_eq!(attempts.pause(), Duration::ZERO);
    }
}
