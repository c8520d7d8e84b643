//! Learning rate over the steps: linear warm-up, then a decay.

pub use zeropp_core::choice::Decay;

/// The learning rate of every step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    /// After the warm-up.
    pub peak: f64,
    /// At the last step.
    pub min: f64,
    /// Steps of linear warm-up; the first step already has peak / warmup.
    pub warmup: u64,
    /// Steps of the whole run.
    pub total: u64,
    /// Shape after the warm-up.
    pub decay: Decay,
}

impl LearningRate {
    /// The rate of step `step`, counted from 1.
    pub fn at(&self, step: u64) -> f64 {
        if step <= self.warmup {
            return self.peak * step as f64 / self.warmup as f64;
        }
        let span = self.total.saturating_sub(self.warmup).max(1) as f64;
        let done = ((step - self.warmup) as f64 / span).min(1.0);
        let left = match self.decay {
            Decay::Constant => 1.0,
            Decay::Linear => 1.0 - done,
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
        };
        match self.decay {
            Decay::Constant => self.peak,
            _ => self.min + (self.peak - self.min) * left,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warms_up_then_decays_to_the_minimum() {
        let lr = LearningRate { peak: 1.0, min: 0.1, warmup: 4, total: 12, decay: Decay::Cosine };
        assert_eq!(lr.at(1), 0.25);
        assert_eq!(lr.at(4), 1.0);
        assert!((lr.at(8) - 0.55).abs() < 1e-12);
        assert!((lr.at(12) - 0.1).abs() < 1e-12);
        assert!((lr.at(99) - 0.1).abs() < 1e-12);
        let linear = LearningRate { decay: Decay::Linear, ..lr };
        assert!((linear.at(6) - 0.775).abs() < 1e-12);
        let constant = LearningRate { decay: Decay::Constant, warmup: 0, ..lr };
        assert_eq!(constant.at(7), 1.0);
    }
}
