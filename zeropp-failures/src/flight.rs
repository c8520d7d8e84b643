//! Parts of a flight recorder: a clock that all records of a process share, and a ring of the last
//! things that happened.

use std::collections::VecDeque;
use std::sync::OnceLock;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Actions and operations of a rank that are remembered.
pub const KEPT: usize = 2000;

/// Nanoseconds since 1970. It is read off the system's clock once and goes on steadily from there,
/// so that records of one process are in order even if someone sets the clock.
pub fn now_ns() -> u64 {
    ns_at(Instant::now())
}

/// The same of another moment of this process.
pub fn ns_at(moment: Instant) -> u64 {
    static START: OnceLock<(Instant, u64)> = OnceLock::new();
    let (start, wall_ns) = START.get_or_init(|| {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        (Instant::now(), wall.as_nanos() as u64)
    });
    let before =
        || wall_ns.saturating_sub(start.saturating_duration_since(moment).as_nanos() as u64);
    moment.checked_duration_since(*start).map_or_else(before, |t| wall_ns + t.as_nanos() as u64)
}

/// The last [`KEPT`] of many entries. An entry can be changed by its number as long as it is kept.
#[derive(Clone, Debug)]
pub struct Ring<T> {
    kept: VecDeque<T>,
    pushed: u64,
}

impl<T> Default for Ring<T> {
    fn default() -> Self {
        Self { kept: VecDeque::new(), pushed: 0 }
    }
}

impl<T> Ring<T> {
    /// Adds an entry, in place of the oldest one if the ring is full. Returns its number.
    pub fn push(&mut self, entry: T) -> u64 {
        if self.kept.len() == KEPT {
            self.kept.pop_front();
        }
        self.kept.push_back(entry);
        self.pushed += 1;
        self.pushed - 1
    }

    /// The entry of this number, if it is still kept.
    pub fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        let behind = self.pushed.checked_sub(number + 1)?;
        let place = self.kept.len().checked_sub(behind as usize + 1)?;
        self.kept.get_mut(place)
    }

    /// The newest entry.
    pub fn last_mut(&mut self) -> Option<&mut T> {
        self.kept.back_mut()
    }

    /// The entries that are kept, from the oldest to the newest.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &T> + ExactSizeIterator {
        self.kept.iter()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_ring_keeps_the_newest_and_knows_them_by_number() {
        let mut ring = Ring::default();
        assert!(ring.get_mut(0).is_none());
        for i in 0..KEPT as u64 + 5 {
            assert_eq!(ring.push(i), i);
        }
        let kept: Vec<u64> = ring.iter().copied().collect();
        assert_eq!(kept, (5..KEPT as u64 + 5).collect::<Vec<_>>());
        assert!(ring.get_mut(4).is_none() && ring.get_mut(KEPT as u64 + 5).is_none());
        *ring.get_mut(5).unwrap() = 99;
        assert_eq!(ring.iter().next(), Some(&99));
        assert_eq!(ring.last_mut(), Some(&mut (KEPT as u64 + 4)));
    }

    #[test]
    fn the_clock_never_goes_back() {
        let times: Vec<u64> = (0..1000).map(|_| now_ns()).collect();
        assert!(times.is_sorted());
        let (moment, apart) = (Instant::now(), Duration::from_secs(7));
        let earlier = moment.checked_sub(apart).expect("the machine has run that long");
        assert_eq!(ns_at(moment) - ns_at(earlier), apart.as_nanos() as u64);
    }
}
