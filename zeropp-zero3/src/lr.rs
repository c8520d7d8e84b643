//! Learning rate over the steps: linear warm-up, then a decay.

pub use zeropp_core::choice::Decay;

/// The part of a run, at its end, in which `wsd` falls: a fifth.
const FALLS: u64 = 5;

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
    /// In a test of rates, that of the first step: from there it grows by equal factors to `peak`
    /// at the last.
    pub grows_from: Option<f64>,
}

impl LearningRate {
    /// Rates that grow by equal factors `from` the first step `to` the last of `steps`.
    pub fn range(from: f64, to: f64, steps: u64) -> LearningRate {
        let (decay, grows_from) = (Decay::Constant, Some(from));
        LearningRate { peak: to, min: from, warmup: 0, total: steps, decay, grows_from }
    }

    /// The rate of step `step`, counted from 1.
    pub fn at(&self, step: u64) -> f64 {
        if let Some(first) = self.grows_from {
            let done = (step - 1) as f64 / self.total.saturating_sub(1).max(1) as f64;
            return first * (self.peak / first).powf(done);
        }
        if step <= self.warmup {
            return self.peak * step as f64 / self.warmup as f64;
        }
        let span = self.total.saturating_sub(self.warmup).max(1) as f64;
        let done = ((step - self.warmup) as f64 / span).min(1.0);
        let left = match self.decay {
            Decay::Constant => return self.peak,
            Decay::InverseSqrt => {
                let root = (self.warmup.max(1) as f64 / step as f64).sqrt();
                return (self.peak * root).max(self.min);
            }
            Decay::Linear => 1.0 - done,
            Decay::Wsd => {
                let falls_from = self.warmup.max(self.total - self.total / FALLS);
                let falls = self.total.saturating_sub(falls_from).max(1) as f64;
                1.0 - (step.saturating_sub(falls_from) as f64 / falls).min(1.0)
            }
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
        };
        self.min + (self.peak - self.min) * left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warms_up_then_decays_to_the_minimum() {
        let decay = Decay::Cosine;
        let lr =
            LearningRate { peak: 1.0, min: 0.1, warmup: 4, total: 12, decay, grows_from: None };
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

    #[test]
    fn a_range_grows_by_equal_factors() {
        let lr = LearningRate::range(1e-6, 1.0, 7);
        for (step, rate) in [(1, 1e-6), (2, 1e-5), (4, 1e-3), (7, 1.0)] {
            assert!((lr.at(step) / rate - 1.0).abs() < 1e-12, "{step}");
        }
        assert_eq!(LearningRate::range(0.1, 1.0, 1).at(1), 0.1);
    }

    #[test]
    fn wsd_stays_and_then_falls_in_the_last_fifth() {
        let lr = LearningRate {
            peak: 1.0,
            min: 0.1,
            warmup: 4,
            total: 100,
            decay: Decay::Wsd,
            grows_from: None,
        };
        assert_eq!((lr.at(2), lr.at(4), lr.at(5), lr.at(80)), (0.5, 1.0, 1.0, 1.0));
        assert!((lr.at(90) - 0.55).abs() < 1e-12);
        assert!((lr.at(100) - 0.1).abs() < 1e-12 && (lr.at(101) - 0.1).abs() < 1e-12);
        // The warm-up may last into it, or to the end.
        let long = LearningRate { warmup: 90, ..lr };
        assert_eq!(long.at(90), 1.0);
        assert!((long.at(95) - 0.55).abs() < 1e-12 && (long.at(100) - 0.1).abs() < 1e-12);
        assert_eq!(LearningRate { warmup: 100, ..lr }.at(100), 1.0);
    }

    #[test]
    fn the_inverse_root_goes_on_from_the_warm_up() {
        let decay = Decay::InverseSqrt;
        let lr =
            LearningRate { peak: 1.0, min: 0.1, warmup: 4, total: 100, decay, grows_from: None };
        assert_eq!((lr.at(4), lr.at(16), lr.at(64)), (1.0, 0.5, 0.25));
        assert_eq!(lr.at(10_000), 0.1, "not below the minimum");
        assert_eq!(LearningRate { warmup: 0, ..lr }.at(4), 0.5, "as if the first step were it");
    }
}
