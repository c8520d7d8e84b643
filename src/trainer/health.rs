//! Warnings while a run goes on: a loss that is not a number, or that jumps. Each
//! is reported once.

use tracing::warn;
use zeropp_core::metrics::StepMetrics;

/// Steps over which the usual loss and its spread are averaged.
const MEMORY: f64 = 50.0;
/// Steps at a run's beginning whose losses are held against that of guessing, too.
const FIRST_STEPS: u64 = 10;
/// A loss this many usual deviations above the usual loss, and this much larger, is a jump.
const DEVIATIONS: f64 = 6.0;
const FACTOR: f64 = 1.2;
/// The spread that losses are taken to have before any is known, as a part of the first one: that
/// of batches of a few samples.
const FIRST_SPREAD: f64 = 0.25;

/// Watches the losses of a run.
pub(crate) struct Health {
    /// The loss of a model that knows nothing, where it is known.
    of_guessing: Option<f64>,
    seen: u64,
    mean: f64,
    /// Mean absolute deviation from it.
    spread: f64,
    reported_jump: bool,
    reported_skip: bool,
}

impl Health {
    /// For a model that knows so many token ids; none where its loss is no cross entropy of them.
    pub(crate) fn new(vocabulary: Option<usize>) -> Health {
        Health {
            of_guessing: vocabulary.map(|ids| (ids as f64).ln()),
            seen: 0,
            mean: 0.0,
            spread: 0.0,
            reported_jump: false,
            reported_skip: false,
        }
    }

    /// Looks at a step, and returns what is to be reported after it.
    pub(crate) fn see(&mut self, m: &StepMetrics) {
        if let Some(text) = self.remark(m) {
            warn!("{text}");
        }
    }

    fn remark(&mut self, m: &StepMetrics) -> Option<String> {
        m.measured_loss()?;
        if m.skipped || !m.loss.is_finite() {
            return (!std::mem::replace(&mut self.reported_skip, true)).then(|| {
                format!(
                    "step {}: a gradient was not finite (loss {}), and no weight has changed; a \
                     smaller lr or clip, or a longer warmup may help. This is reported once; the \
                     run ends after clip:max-skipped such steps in a row",
                    m.step, m.loss
                )
            });
        }
        if self.seen == 0 {
            (self.seen, self.mean, self.spread) = (1, m.loss, FIRST_SPREAD * m.loss);
            return None;
        }
        let (usual, limit) = (self.mean, self.limit());
        // What is above the limit counts as the limit, so that a loss that blows up is never usual.
        let loss = m.loss.min(limit);
        let weight = 1.0 / (self.seen as f64 + 1.0).min(MEMORY);
        self.seen += 1;
        self.mean += weight * (loss - self.mean);
        self.spread += weight * ((loss - usual).abs() - self.spread);
        (m.loss > limit && !std::mem::replace(&mut self.reported_jump, true)).then(|| {
            format!(
                "step {}: the loss jumped to {:.4} from about {usual:.4}; where it stays there, a \
                 smaller lr, a smaller clip or another seed may help. This is reported once",
                m.step, m.loss
            )
        })
    }

    /// The largest loss that is no jump.
    fn limit(&self) -> f64 {
        let limit = (self.mean + DEVIATIONS * self.spread).max(FACTOR * self.mean);
        let of_guessing = self.of_guessing.filter(|_| self.seen < FIRST_STEPS);
        of_guessing.map_or(limit, |guess| limit.min(FACTOR * guess.max(self.mean)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reports_of(vocabulary: usize, losses: impl IntoIterator<Item = f64>) -> Vec<u64> {
        let mut health = Health::new(Some(vocabulary));
        let mut reported = Vec::new();
        for (step, loss) in (1..).zip(losses) {
            let m = StepMetrics { step, loss, skipped: !loss.is_finite(), ..Default::default() };
            reported.extend(health.remark(&m).map(|text| {
                assert!(text.starts_with(&format!("step {step}: ")), "{text}");
                step
            }));
        }
        reported
    }

    fn reported(losses: impl IntoIterator<Item = f64>) -> Vec<u64> {
        reports_of(256, losses)
    }

    /// An ordinary run's loss.
    fn noisy(i: u64) -> f64 {
        2.0 + 3.0 / (i as f64 + 1.0) + 0.1 * ((i * 37) % 11) as f64 / 11.0
    }

    #[test]
    fn a_jump_and_a_loss_that_is_no_number_are_reported_once_each() {
        assert_eq!(reported((0..300).map(noisy)), [0; 0], "an ordinary run");
        let spikes = |i: u64| if [40, 41, 90].contains(&i) { 8.0 } else { noisy(i) };
        assert_eq!(reported((0..100).map(spikes)), [41]);
        let bad = |i: u64| if i >= 20 && i != 25 { f64::NAN } else { noisy(i) };
        assert_eq!(reported((0..30).map(bad)), [21]);
    }

    #[test]
    fn a_run_that_diverges_from_its_second_step_is_reported_there() {
        assert_eq!(reported([5.6, 39_076.0, 112_000.0, 698_108.0]), [2]);
        assert_eq!(
            reported([5.6, 5.9, 6.4, 7.2, 8.5, 11.0, 15.0]),
            [4],
            "it is worse than guessing"
        );
        assert_eq!(reported((0..30).map(|i| if i == 5 { 50.0 } else { 1.0 })), [6]);
        // Weights of before know more than guessing: the first loss counts.
        assert_eq!(reports_of(50_000, [2.3, 2.9, 1.7, 2.6, 2.0, 9.0]), [6]);
        assert_eq!(
            reports_of(50_000, [0.8, 1.9, 0.5, 1.6, 0.7, 1.2, 2.0]),
            [0; 0],
            "small batches"
        );
        // A loss of a program's own is held against its first steps alone.
        let mut own = Health::new(None);
        let step = |loss| StepMetrics { loss, ..Default::default() };
        assert!([300.0, 500.0, 250.0].iter().all(|loss| own.remark(&step(*loss)).is_none()));
        assert!(own.remark(&step(3000.0)).is_some());
    }

    #[test]
    fn a_loss_that_blows_up_never_becomes_the_usual_one() {
        let mut health = Health::new(Some(256));
        for i in 0..12 {
            let loss = if i == 0 { 5.5 } else { 100_000.0 };
            health.remark(&StepMetrics { step: i + 1, loss, ..Default::default() });
        }
        assert!(health.mean < 50.0, "{}", health.mean);
    }
}
