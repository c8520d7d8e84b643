//! The totals of a run's steps for its summary, in as much memory for a million of them as for a
//! thousand.

use zeropp_core::meter::MemoryBytes;
use zeropp_core::metrics::{Evaluation, StepMetrics, Summary};

/// Most steps whose figures are kept for the medians.
const SAMPLES_MAX: usize = 4096;

/// A step's figures of which the summary has the median: tokens per second, FLOP utilisation, and
/// the three bubbles.
type Sample = [f64; 5];

/// The steps of a run so far.
#[derive(Default)]
pub(crate) struct Totals {
    steps: u64,
    /// Units of all ranks together.
    units: u64,
    /// Those of the first and the last step of which a token was scored.
    losses: Option<(f64, f64)>,
    all_gathers: u64,
    reduce_scatters: u64,
    peak: MemoryBytes,
    at_once: u64,
    early: u64,
    idle: u64,
    save_blocked_s: f64,
    rollbacks: u64,
    redone_s: f64,
    /// The figures of every `1 << thinned`th step after the first.
    samples: Vec<Sample>,
    thinned: u32,
    last_eval: Option<(u64, Evaluation)>,
    best_eval: Option<(u64, Evaluation)>,
}

impl Totals {
    /// Adds the next step, in which all ranks together did so many units.
    pub(crate) fn add(&mut self, step: &StepMetrics, units: usize) {
        self.units += units as u64;
        if let Some(loss) = step.measured_loss() {
            self.losses.get_or_insert((loss, loss)).1 = loss;
        }
        if let Some(eval) = step.eval {
            self.last_eval = Some((step.step, eval));
            if self.best_eval.is_none_or(|(_, best)| eval.loss < best.loss) {
                self.best_eval = self.last_eval;
            }
        }
        self.all_gathers += step.all_gathers;
        self.reduce_scatters += step.reduce_scatters;
        self.peak = self.peak.max(&step.peak_bytes);
        self.at_once = self.at_once.max(step.at_once_bytes);
        self.early = self.early.max(step.early_bytes);
        self.idle = self.idle.max(step.idle_bytes);
        self.save_blocked_s += step.save_blocked_s;
        self.rollbacks += u64::from(step.rolled_back);
        self.redone_s += step.redone_s;
        // The first step warms caches and pools up; it counts only where it is alone.
        if self.steps == 1 {
            self.samples.clear();
        }
        let settled = self.steps.saturating_sub(1);
        self.steps += 1;
        if settled & ((1 << self.thinned) - 1) != 0 {
            return;
        }
        if self.samples.len() == SAMPLES_MAX {
            let mut place = 0;
            self.samples.retain(|_| {
                place += 1;
                place % 2 == 1
            });
            self.thinned += 1;
        }
        let StepMetrics { tokens_per_s, flops_util, bubble, bubble_own_span, bubble_step, .. } =
            *step;
        self.samples.push([tokens_per_s, flops_util, bubble, bubble_own_span, bubble_step]);
    }

    /// Steps so far.
    pub(crate) fn steps(&self) -> u64 {
        self.steps
    }

    /// Whether there were steps, and none of them had a token that was scored.
    pub(crate) fn scored_nothing(&self) -> bool {
        self.steps > 0 && self.losses.is_none()
    }

    /// The part of a summary that follows from the steps.
    pub(crate) fn summary(&self) -> Summary {
        let median = |figure: usize| {
            let mut values: Vec<f64> = self.samples.iter().map(|sample| sample[figure]).collect();
            values.sort_by(f64::total_cmp);
            values.get(values.len() / 2).copied().unwrap_or(0.0)
        };
        let per_unit = |n: u64| n as f64 / self.units.max(1) as f64;
        let (first_loss, last_loss) = self.losses.unwrap_or((f64::NAN, f64::NAN));
        Summary {
            steps: self.steps,
            first_loss,
            last_loss,
            tokens_per_s: median(0),
            flops_util: median(1),
            bubble: median(2),
            bubble_own_span: median(3),
            bubble_step: median(4),
            all_gathers_per_unit: per_unit(self.all_gathers),
            reduce_scatters_per_unit: per_unit(self.reduce_scatters),
            peak_bytes: self.peak,
            at_once_bytes: self.at_once,
            early_bytes: self.early,
            idle_bytes: self.idle,
            save_blocked_s: self.save_blocked_s,
            rollbacks: self.rollbacks,
            redone_s: self.redone_s,
            last_eval: self.last_eval,
            best_eval: self.best_eval,
            ..Summary::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(n: u64) -> StepMetrics {
        let x = n as f64;
        let peak_bytes = MemoryBytes { activation: 1000 - n.min(900), ..MemoryBytes::default() };
        StepMetrics {
            loss: x,
            tokens_per_s: x,
            bubble_step: -x,
            all_gathers: 6,
            reduce_scatters: 4,
            peak_bytes,
            ..StepMetrics::default()
        }
    }

    fn after(steps: u64) -> Totals {
        let mut totals = Totals::default();
        (1..=steps).for_each(|n| totals.add(&step(n), 2));
        totals
    }

    #[test]
    fn the_first_step_counts_for_medians_only_where_it_is_alone() {
        assert!(after(0).summary().first_loss.is_nan());
        assert_eq!(after(1).summary().tokens_per_s, 1.0);
        assert_eq!(after(2).summary().tokens_per_s, 2.0);
        let seven = after(7).summary();
        assert_eq!((seven.steps, seven.first_loss, seven.last_loss), (7, 1.0, 7.0));
        assert_eq!((seven.tokens_per_s, seven.bubble_step), (5.0, -4.0), "of 2 to 7, as sorted");
        assert_eq!((seven.all_gathers_per_unit, seven.reduce_scatters_per_unit), (3.0, 2.0));
        assert_eq!(seven.peak_bytes.activation, 999);
    }

    /// Before, such a step entered as a loss of 0.
    #[test]
    fn a_step_without_scored_tokens_has_no_loss() {
        let of = |loss: f64, scored_tokens| StepMetrics { loss, scored_tokens, ..step(1) };
        let mut totals = Totals::default();
        totals.add(&of(0.0, Some(0)), 2);
        assert!(totals.scored_nothing() && totals.summary().last_loss.is_nan());
        for (loss, scored) in [(5.0, Some(3)), (4.0, None), (0.0, Some(0))] {
            totals.add(&of(loss, scored), 2);
        }
        let summary = totals.summary();
        assert_eq!((summary.first_loss, summary.last_loss, summary.steps), (5.0, 4.0, 4));
        assert!(!totals.scored_nothing());
    }

    /// Before, every step's record was kept: 27 MiB after 159 000 of them.
    #[test]
    fn a_long_run_takes_no_more_memory_and_has_its_median() {
        let steps = 1_000_000;
        let totals = after(steps);
        assert!(totals.samples.capacity() <= 2 * SAMPLES_MAX, "{}", totals.samples.capacity());
        let median = totals.summary().tokens_per_s;
        assert!((median / (steps as f64 / 2.0) - 1.0).abs() < 0.001, "{median}");
        // Evenly over the whole run.
        let apart = 1 << totals.thinned;
        assert!(totals.samples.windows(2).all(|w| w[1][0] - w[0][0] == f64::from(apart)));
    }
}
