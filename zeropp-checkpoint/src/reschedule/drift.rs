//! Whether the last steps take other times than those that a search has measured, beyond noise: of
//! the whole step, and of each rank's share of all computing. Shares tell a rank that has become
//! slower in three steps, whatever program runs; what makes all ranks slower alike changes none of
//! them, and no order.

use super::times::{NORMAL, RECENT, StepTimes};

/// The fewest steps that are referred to, and the most.
const REFERRED: (usize, usize) = (3, 12);
/// Standard errors from which a difference is none of chance: in hundreds of steps of many ranks.
const ERRORS: f64 = 5.0;
/// From so many steps on, the one that is farthest off does not count.
const MANY: usize = 9;

/// Some values of each of the last steps.
#[derive(Clone, Debug)]
pub(super) struct Drift {
    /// Drift is at least so large a part of a value.
    least: f64,
    last: Vec<StepTimes>,
    /// The steps that drift counts from: those that were measured, and the next ones.
    reference: Vec<StepTimes>,
}

impl Drift {
    /// Of no step yet.
    pub(super) fn new(least: f64) -> Drift {
        Drift { least, last: Vec::new(), reference: Vec::new() }
    }

    /// Of no step yet, in which the value is to be this.
    pub(super) fn from(least: f64, value: f64) -> Drift {
        let mut reference = StepTimes::default();
        (0..=REFERRED.0).for_each(|_| reference.add(value));
        Drift { reference: vec![reference], ..Drift::new(least) }
    }

    /// Adds a step with these values.
    pub(super) fn add(&mut self, values: impl ExactSizeIterator<Item = f64>) {
        self.last.resize_with(values.len(), StepTimes::default);
        self.last.iter_mut().zip(values).for_each(|(last, value)| last.add(value));
        let known = self.reference.first().map_or(REFERRED.0 - 1, StepTimes::count);
        let more = self.last.first().map_or(0, StepTimes::count).saturating_sub(RECENT);
        if known < REFERRED.1 && more > known && !self.is_there() {
            self.reference = self.last.iter().map(|last| last.without_last(RECENT)).collect();
        }
    }

    /// Adds a step in which ranks computed for so many seconds: the share of each.
    pub(super) fn add_shares(&mut self, busy: &[f64]) {
        let all: f64 = busy.iter().sum();
        if all > 0.0 {
            self.add(busy.iter().map(|busy| busy / all));
        }
    }

    /// Counts drift from the last `n` steps, and forgets those before them.
    pub(super) fn refer_to(&mut self, n: usize) {
        self.last.iter_mut().for_each(|last| last.keep(n));
        self.reference = self.last.clone();
    }

    /// Whether a value has become larger or smaller, beyond its noise.
    pub(super) fn is_there(&self) -> bool {
        let mut all = self.last.iter().zip(&self.reference);
        all.any(|(last, reference)| {
            let (Some(now), Some(then)) = (last.centre(), reference.middle(StepTimes::KEPT)) else {
                return false;
            };
            let drift = (now / then - 1.0).abs();
            drift > self.least.max(ERRORS * error(last, now, reference, then))
        })
    }
}

/// The standard error of the difference of two medians, as a share of the second one: of the last
/// few steps, and of those before.
fn error(last: &StepTimes, now: f64, reference: &StepTimes, then: f64) -> f64 {
    let from = |middle: f64| move |value: f64| (value - middle).abs();
    let mut distances: Vec<f64> = last.recent().map(from(now)).collect();
    distances.extend(reference.all().map(from(then)));
    distances.sort_by(f64::total_cmp);
    if distances.len() >= MANY {
        distances.pop();
    }
    // Each of both middles is one of what it is the middle of.
    let mean = distances.iter().sum::<f64>() / (distances.len() - 2) as f64;
    let each = 1.0 / RECENT as f64 + 1.0 / reference.count() as f64;
    NORMAL * mean / then * each.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shares of four ranks that were measured in steps 2 to 4.
    fn measured() -> Drift {
        let mut drift = Drift::new(0.05);
        (0..4).for_each(|_| drift.add_shares(&[1.0, 1.0, 1.0, 1.4]));
        drift.refer_to(3);
        drift
    }

    #[test]
    fn a_rank_that_has_become_slower_is_seen_after_three_steps_and_as_long_as_it_is() {
        for calm in [0, 1, 2, 3, 5, 9, 40] {
            let mut drift = measured();
            (0..calm).for_each(|_| drift.add_shares(&[1.0, 1.01, 1.0, 1.4]));
            assert!(!drift.is_there());
            for after in 1..30 {
                drift.add_shares(&[1.5, 1.0, 1.0, 1.4]);
                assert!(after < 3 || drift.is_there(), "{after} steps after {calm}");
            }
        }
    }

    #[test]
    fn ranks_that_become_slower_alike_and_single_slow_steps_change_no_share() {
        let mut drift = measured();
        for step in 0..30 {
            let all = if step > 10 { 1.7 } else { 1.0 };
            let one = if step % 7 == 3 { 2.0 } else { 1.0 };
            drift.add_shares(&[all * one, all, all, 1.4 * all]);
            assert!(!drift.is_there(), "step {step}");
        }
    }

    #[test]
    fn a_resumed_run_counts_from_its_first_steps() {
        let mut drift = Drift::new(0.05);
        (0..20).for_each(|_| drift.add_shares(&[1.0, 1.0]));
        assert!(!drift.is_there());
        (0..3).for_each(|_| drift.add_shares(&[1.0, 1.3]));
        assert!(drift.is_there());
        drift.add_shares(&[]);
    }
}
