//! What a user should hear of while a run goes on: a loss that is not a number, or that jumps. Each
//! is told once.

use tracing::warn;
use zeropp_core::metrics::StepMetrics;

/// Steps over which the usual loss and its spread are averaged.
const MEMORY: f64 = 50.0;
/// Steps before a jump can be told from the start of a run.
const FIRST_STEPS: u64 = 10;
/// A loss this many usual deviations above the usual loss, and this much larger, is a jump.
const DEVIATIONS: f64 = 6.0;
const FACTOR: f64 = 1.2;

/// Watches the losses of a run.
#[derive(Default)]
pub(crate) struct Health {
    seen: u64,
    mean: f64,
    /// Mean absolute deviation from it.
    spread: f64,
    told_jump: bool,
    told_skip: bool,
}

impl Health {
    /// Looks at a step, and tells what is to be told after it.
    pub(crate) fn see(&mut self, m: &StepMetrics) {
        if let Some(text) = self.remark(m) {
            warn!("{text}");
        }
    }

    fn remark(&mut self, m: &StepMetrics) -> Option<String> {
        m.measured_loss()?;
        if m.skipped || !m.loss.is_finite() {
            return (!std::mem::replace(&mut self.told_skip, true)).then(|| {
                format!(
                    "step {}: a gradient was not finite (loss {}), and no weight has changed; a \
                     smaller lr or clip, or a longer warmup may help. This is reported once; the \
                     run ends after max-skipped such steps in a row",
                    m.step, m.loss
                )
            });
        }
        let limit = (self.mean + DEVIATIONS * self.spread).max(FACTOR * self.mean);
        let jumps = self.seen >= FIRST_STEPS && m.loss > limit && m.loss > self.mean;
        let (usual, weight) = (self.mean, 1.0 / (self.seen as f64 + 1.0).min(MEMORY));
        self.seen += 1;
        self.mean += weight * (m.loss - self.mean);
        self.spread += weight * ((m.loss - usual).abs() - self.spread);
        (jumps && !std::mem::replace(&mut self.told_jump, true)).then(|| {
            format!(
                "step {}: the loss jumped to {:.4} from about {usual:.4}; where it stays there, a \
                 smaller lr, a smaller clip or another seed may help. This is reported once",
                m.step, m.loss
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(losses: impl IntoIterator<Item = f64>) -> Vec<u64> {
        let mut health = Health::default();
        let mut told = Vec::new();
        for (step, loss) in (1..).zip(losses) {
            let m = StepMetrics { step, loss, skipped: !loss.is_finite(), ..Default::default() };
            told.extend(health.remark(&m).map(|text| {
                assert!(text.starts_with(&format!("step {step}: ")), "{text}");
                step
            }));
        }
        told
    }

    #[test]
    fn a_jump_and_a_loss_that_is_no_number_are_told_once_each() {
        let noisy = |i: u64| 2.0 + 3.0 / (i as f64 + 1.0) + 0.1 * ((i * 37) % 11) as f64 / 11.0;
        assert_eq!(told((0..300).map(noisy)), [0; 0], "an ordinary run");
        let spikes = |i: u64| if [40, 41, 90].contains(&i) { 8.0 } else { noisy(i) };
        assert_eq!(told((0..100).map(spikes)), [41]);
        let bad = |i: u64| if i >= 20 && i != 25 { f64::NAN } else { noisy(i) };
        assert_eq!(told((0..30).map(bad)), [21]);
        assert_eq!(told((0..30).map(|i| if i == 5 { 50.0 } else { 1.0 })), [0; 0], "too early");
    }
}
