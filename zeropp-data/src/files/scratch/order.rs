//! Copies in other orders than that in which they were started, for tests.

use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use crate::rng::Rng;

/// The seed of the orders; 0 is none, as copies were started.
static SEED: AtomicU64 = AtomicU64::new(0);
/// A copy begins so much later at most.
const LATE_US: u64 = 600;

/// Files that this process opens from now on delay their copies, and swap those of which none
/// writes where another one writes or reads, as `seed` says; with 0, no more. It is for tests: what
/// waits for the copies that it needs has the same bits in any of these orders.
#[doc(hidden)]
pub fn copies_in_any_order(seed: u64) {
    SEED.store(seed, Ordering::Relaxed);
}

/// What a copy does.
type Body = Box<dyn FnOnce(&File) + Send>;

/// A copy that has not begun.
struct Waiting {
    /// Bytes of the file.
    at: Vec<Range<u64>>,
    writes: bool,
    body: Body,
}

impl Waiting {
    /// Whether this copy, which was started later, has to be done after `other`.
    fn needs(&self, other: &Waiting) -> bool {
        let meets = |a: &Range<u64>, b: &Range<u64>| a.start < b.end && b.start < a.end;
        let both = self.at.iter().any(|a| other.at.iter().any(|b| meets(a, b)));
        (self.writes || other.writes) && both
    }
}

/// The copies of a file that are started and have not begun. One thread does them.
pub(super) struct AnyOrder {
    random: Rng,
    drawn: AtomicU64,
    waiting: Mutex<Vec<Waiting>>,
}

impl fmt::Debug for AnyOrder {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("AnyOrder").finish_non_exhaustive()
    }
}

impl AnyOrder {
    /// Orders of the seed that a test has set, if one has.
    pub(super) fn of_test(file: u64) -> Option<AnyOrder> {
        let seed = Some(SEED.load(Ordering::Relaxed)).filter(|seed| *seed > 0)?;
        let random = Rng::keyed(seed, &format!("copies of file {file}"));
        Some(AnyOrder { random, drawn: AtomicU64::new(0), waiting: Mutex::default() })
    }

    /// Puts a copy to those that wait, for each of which there is one call of
    /// [`do_one`](Self::do_one).
    pub(super) fn start(&self, at: Vec<Range<u64>>, writes: bool, body: Body) {
        self.waiting().push(Waiting { at, writes, body });
    }

    /// Does one of the copies that may begin.
    pub(super) fn do_one(&self, file: &File) {
        // More of them are started meanwhile.
        sleep(Duration::from_micros(self.below(LATE_US)));
        let one = {
            let mut all = self.waiting();
            let may = |i: &usize| all[..*i].iter().all(|before| !all[*i].needs(before));
            let may: Vec<usize> = (0..all.len()).filter(may).collect();
            let chosen = may[self.below(may.len() as u64) as usize];
            all.remove(chosen)
        };
        (one.body)(file);
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number below `n`.
    fn below(&self, n: u64) -> u64 {
        let [bits, ..] = self.random.block(self.drawn.fetch_add(1, Ordering::Relaxed), 0);
        u64::from(bits) % n
    }
}
