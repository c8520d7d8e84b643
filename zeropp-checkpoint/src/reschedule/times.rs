//! The times of the last steps with one program, and their noise.

use std::collections::VecDeque;

/// The last steps: what a step takes now.
pub(super) const RECENT: usize = 4;
/// From the mean of distances to the standard deviation of a normal distribution.
pub(super) const NORMAL: f64 = 1.2533;
/// The same where the largest quarter of them is left out.
const TRIMMED: f64 = 1.94;

/// Seconds of the last steps, the first one with a program left out: it warms up.
#[derive(Clone, Debug, Default)]
pub(super) struct StepTimes {
    last: VecDeque<f64>,
    warm: bool,
}

impl StepTimes {
    /// The most that are kept.
    pub(super) const KEPT: usize = 16;

    pub(super) fn add(&mut self, seconds: f64) {
        if !std::mem::replace(&mut self.warm, true) {
            return;
        }
        if self.last.len() == Self::KEPT {
            self.last.pop_front();
        }
        self.last.push_back(seconds);
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.last.len()
    }

    /// Forgets all but the last `n`.
    pub(super) fn keep(&mut self, n: usize) {
        self.last.drain(..self.last.len().saturating_sub(n));
    }

    /// The median of the last `n`, or of as many as there are.
    pub(super) fn middle(&self, n: usize) -> Option<f64> {
        let from = self.last.len().saturating_sub(n);
        median(self.last.iter().skip(from).copied().collect())
    }

    /// The same without the last `n`.
    pub(super) fn without_last(&self, n: usize) -> StepTimes {
        let last = self.last.iter().take(self.last.len().saturating_sub(n)).copied().collect();
        StepTimes { last, warm: self.warm }
    }

    /// All of them.
    pub(super) fn all(&self) -> impl Iterator<Item = f64> {
        self.last.iter().copied()
    }

    /// The last few of them, or fewer.
    pub(super) fn recent(&self) -> impl Iterator<Item = f64> {
        self.last.range(self.last.len().saturating_sub(RECENT)..).copied()
    }

    /// The mean of these without the least and the largest one, where there are enough.
    pub(super) fn centre(&self) -> Option<f64> {
        let mut recent: Vec<f64> = self.recent().collect();
        recent.sort_by(f64::total_cmp);
        let within = recent.get(1..RECENT - 1)?;
        Some(within.iter().sum::<f64>() / within.len() as f64)
    }

    /// How far the median of these steps may be from that of many, as a share of it. Of enough
    /// steps the quarter that is farthest off does not count: on a shared machine some steps are
    /// late by far, which says nothing of their median.
    pub(super) fn noise(&self) -> f64 {
        let Some(middle) = self.middle(Self::KEPT) else { return 0.0 };
        let mut distances: Vec<f64> = self.last.iter().map(|s| (s - middle).abs()).collect();
        distances.sort_by(f64::total_cmp);
        let n = distances.len();
        let factor = if n > RECENT { TRIMMED } else { NORMAL };
        distances.truncate(if n > RECENT { n - n / 4 } else { n });
        let spread = factor * distances.iter().sum::<f64>() / distances.len() as f64;
        spread / (n as f64).sqrt() / middle.max(f64::MIN_POSITIVE)
    }
}

/// The lower one of two in the middle.
fn median(mut all: Vec<f64>) -> Option<f64> {
    all.sort_by(f64::total_cmp);
    all.get(all.len().checked_sub(1)? / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_step_and_single_slow_ones_do_not_count() {
        let mut times = StepTimes::default();
        for seconds in [9.0, 1.0, 1.0, 7.0, 1.0, 1.0] {
            times.add(seconds);
        }
        assert_eq!((times.middle(16), times.centre(), times.noise()), (Some(1.0), Some(1.0), 0.0));
        assert_eq!(StepTimes::default().middle(3), None);
    }

    #[test]
    fn noise_is_that_of_most_steps() {
        let mut times = StepTimes::default();
        (0..17).for_each(|i| times.add(if i % 4 == 1 { 1.5 } else { 1.0 + 0.01 * (i % 2) as f64 }));
        assert!((0.001..0.006).contains(&times.noise()), "{}", times.noise());
    }

    #[test]
    fn noise_shrinks_with_the_number_of_steps() {
        let of = |n: usize| {
            let mut times = StepTimes::default();
            times.add(1.0);
            (0..n).for_each(|i| times.add(1.0 + 0.02 * (i % 3) as f64));
            times.noise()
        };
        assert!(of(16) < of(3) && of(16) > 0.0);
    }
}
