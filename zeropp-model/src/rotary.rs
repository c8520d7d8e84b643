//! How rotary positions turn queries and keys, and what makes a model fit longer texts than it was
//! first trained on.

/// Rotary positions: place p turns pair i of a head by p times number i of [`inverse_frequencies`].
///
/// [`inverse_frequencies`]: Rotary::inverse_frequencies
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// θ: pair i turns by p·θ^(−2i/d) before scaling.
    pub theta: f64,
    /// The scaling that makes a model fit longer texts than it was first trained on.
    pub scaling: RotaryScaling,
}

/// How rotary frequencies are changed for longer texts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RotaryScaling {
    /// Not at all.
    None,
    /// All are divided by this.
    Linear(f64),
    /// LLaMA 3.1's: low frequencies are divided by `factor`, high ones stay, those between are
    /// mixed.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `context`/`low` are low frequencies.
        low: f64,
        /// Wavelengths below `context`/`high` are high ones.
        high: f64,
        /// Tokens of the texts that it was first trained on.
        context: f64,
    },
    /// YaRN.
    Yarn(Yarn),
}

/// YaRN (arXiv 2309.00071): pairs that turn slowly are divided by `factor`, fast ones stay, those
/// between are mixed by their number; and what has turned is scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// The divisor of slow pairs.
    pub factor: f64,
    /// Tokens of the texts that the model was first trained on.
    pub context: f64,
    /// Pairs that turn this often within `context` and more stay.
    pub fast: f64,
    /// Pairs that turn this often within `context` and less are divided.
    pub slow: f64,
    /// Queries and keys are multiplied by this.
    pub attention: f64,
    /// Whether the mixture begins and ends at whole numbers of pairs.
    pub truncated: bool,
}

impl Yarn {
    /// The value of `attention` for a factor: 1 + `weight` · ln(factor)/10, and 1 where texts do
    /// not grow.
    pub(crate) fn attention_of(factor: f64, weight: f64) -> f64 {
        if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 }
    }

    /// The frequency of pair `pair` of `d` elements, which is `inverse` without scaling.
    fn apply(&self, inverse: f64, pair: usize, d: usize, theta: f64) -> f64 {
        let d = d as f64;
        // The pair that turns so often within the context.
        let pair_of = |turns: f64| {
            d * (self.context / (turns * 2.0 * core::f64::consts::PI)).ln() / (2.0 * theta.ln())
        };
        let (low, high) = match (pair_of(self.fast), pair_of(self.slow), self.truncated) {
            (low, high, true) => (low.floor(), high.ceil()),
            (low, high, false) => (low, high),
        };
        let (low, high) = (low.max(0.0), high.min(d - 1.0));
        let high = if low == high { high + 0.001 } else { high };
        let divided = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
        inverse / self.factor * divided + inverse * (1.0 - divided)
    }
}

impl Rotary {
    /// The angle by which one place turns each of the d/2 pairs of a head, in radians.
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f64> {
        let plain = |i: usize| self.theta.powf(-2.0 * i as f64 / head_dim as f64);
        let scaled = |i: usize| match self.scaling {
            RotaryScaling::Yarn(yarn) => yarn.apply(plain(i), i, head_dim, self.theta),
            scaling => scaling.apply(plain(i)),
        };
        (0..head_dim / 2).map(scaled).collect()
    }

    /// The factor of queries and keys when they turn.
    pub fn attention(&self) -> f64 {
        match self.scaling {
            RotaryScaling::Yarn(yarn) => yarn.attention,
            _ => 1.0,
        }
    }
}

impl RotaryScaling {
    /// Where a pair's frequency alone decides.
    fn apply(&self, inverse: f64) -> f64 {
        match *self {
            RotaryScaling::None | RotaryScaling::Yarn(_) => inverse,
            RotaryScaling::Linear(factor) => inverse / factor,
            RotaryScaling::Llama3 { factor, low, high, context } => {
                let wavelength = 2.0 * core::f64::consts::PI / inverse;
                if wavelength > context / low {
                    return inverse / factor;
                }
                if wavelength < context / high {
                    return inverse;
                }
                let smooth = (context / wavelength - low) / (high - low);
                (1.0 - smooth) * inverse / factor + smooth * inverse
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the formula of transformers' `_compute_llama3_parameters`, for θ 100, d 8.
    #[test]
    fn llama_3_mixes_the_frequencies_between() {
        let scaling = RotaryScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, context: 32.0 };
        let scaled = Rotary { theta: 100.0, scaling }.inverse_frequencies(8);
        let plain = Rotary { theta: 100.0, scaling: RotaryScaling::None }.inverse_frequencies(8);
        // Wavelengths 6.3, 19.9, 62.8 and 199: below 8, between, above 32 twice.
        assert_eq!(scaled[0], plain[0]);
        let smooth = (32.0 * plain[1] / (2.0 * core::f64::consts::PI) - 1.0) / 3.0;
        assert!((0.0..1.0).contains(&smooth));
        let mixed = plain[1] * (smooth + (1.0 - smooth) / 8.0);
        assert!((scaled[1] - mixed).abs() < 1e-15);
        assert_eq!(scaled[2..], [plain[2] / 8.0, plain[3] / 8.0]);
    }
    /// By the formulas of the paper with transformers' rounding, worked out by hand: θ 10000, d 16,
    /// first texts of 64 tokens, four times as long now.
    #[test]
    fn yarn_divides_slow_pairs_and_scales_what_turned() {
        let attention = Yarn::attention_of(4.0, 1.0);
        let yarn =
            Yarn { factor: 4.0, context: 64.0, fast: 32.0, slow: 1.0, attention, truncated: true };
        let rotary = Rotary { theta: 1e4, scaling: RotaryScaling::Yarn(yarn) };
        let plain = Rotary { scaling: RotaryScaling::None, ..rotary }.inverse_frequencies(16);
        let scaled = rotary.inverse_frequencies(16);
        // 32 turns: pair 8·ln(64/201.06)/ln(1e4) = −0.99, so 0; one: 8·ln(64/6.28)/ln(1e4) = 2.02.
        let kept = [1.0, 2.0 / 3.0, 1.0 / 3.0, 0.0, 0.0];
        for (i, kept) in kept.into_iter().enumerate() {
            let expected = plain[i] * (kept + (1.0 - kept) / 4.0);
            assert!((scaled[i] - expected).abs() < 1e-15, "{i}: {} {expected}", scaled[i]);
        }
        assert!((rotary.attention() - 1.138_629_436).abs() < 1e-9);
        assert_eq!(Rotary { scaling: RotaryScaling::Linear(4.0), ..rotary }.attention(), 1.0);
    }
}
