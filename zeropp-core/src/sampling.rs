//! Which token follows: the likeliest, or one drawn by the probabilities that the logits give.

use crate::rng::Rng;

/// How a token is chosen from logits. What is drawn depends on logits, seed and the token's number
/// alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// The divisor of logits; 0, or what is not a number, takes the likeliest token (greedy), the
    /// first of equals.
    pub temperature: f64,
    /// Only so many of the likeliest tokens are drawn from, with the first of equals; 0 takes all.
    pub top_k: usize,
    /// Of these, only as many of the likeliest as together have this probability; 1 takes all.
    pub top_p: f64,
    /// Key of the random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    /// Greedy.
    fn default() -> Sampling {
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 }
    }
}

impl Sampling {
    /// Token number `n` of a text, by `logits`, one a token id. What is not a number is never
    /// taken, unless all are; of infinite ones the first is.
    ///
    /// # Panics
    /// Panics if there are no logits.
    pub fn pick(&self, logits: &[f32], n: u64) -> u32 {
        assert!(!logits.is_empty(), "a model has a vocabulary");
        let value = |id: u32| match logits[id as usize] {
            logit if logit.is_nan() => f32::NEG_INFINITY,
            logit => logit,
        };
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let order = |a: &u32, b: &u32| value(*b).total_cmp(&value(*a)).then(a.cmp(b));
        let likeliest = ids.iter().copied().min_by(order).expect("there are logits");
        // Without a temperature, or of infinite logits alone, there are no probabilities.
        let largest = f64::from(value(likeliest));
        if self.temperature.is_nan() || self.temperature <= 0.0 || largest.is_infinite() {
            return likeliest;
        }
        if (1..ids.len()).contains(&self.top_k) {
            ids.select_nth_unstable_by(self.top_k - 1, order);
            ids.truncate(self.top_k);
        }
        ids.sort_unstable_by(order);
        let weight = |id: &u32| ((f64::from(value(*id)) - largest) / self.temperature).exp();
        let mut weights: Vec<f64> = ids.iter().map(weight).collect();
        let total: f64 = weights.iter().sum();
        if self.top_p < 1.0 {
            let mut sum = 0.0;
            let enough = |weight: &f64| {
                sum += weight / total;
                sum >= self.top_p
            };
            let last = weights.iter().position(enough).unwrap_or(weights.len() - 1);
            weights.truncate(last + 1);
        }
        let kept: f64 = weights.iter().sum();
        let [a, b, ..] = Rng::keyed(self.seed, "text").block(n, 0);
        let drawn = (u64::from(a) << 32 | u64::from(b)) as f64 / 2f64.powi(64) * kept;
        let mut sum = 0.0;
        let reached = |weight: &f64| {
            sum += weight;
            drawn < sum
        };
        ids[weights.iter().position(reached).unwrap_or(weights.len() - 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [1.0, 3.0, f32::NAN, 2.0, 3.0];

    fn shares(sampling: Sampling) -> [f64; 5] {
        let mut hits = [0; 5];
        (0..4000).for_each(|n| hits[sampling.pick(&LOGITS, n) as usize] += 1);
        hits.map(|n| f64::from(n) / 4000.0)
    }

    #[test]
    fn greedy_takes_the_first_of_the_likeliest() {
        assert!((0..9).all(|n| Sampling::default().pick(&LOGITS, n) == 1));
        assert_eq!(Sampling::default().pick(&[f32::NAN, f32::NAN], 0), 0);
        let warm = Sampling { temperature: 1.0, ..Sampling::default() };
        for n in 0..9 {
            let unset = Sampling { temperature: f64::NAN, ..warm };
            assert_eq!(unset.pick(&LOGITS, n), 1);
            let inf = f32::INFINITY;
            assert_eq!(warm.pick(&[1.0, inf, f32::NAN, inf, 9.0], n), 1);
            assert_eq!(warm.pick(&[f32::NAN, -inf, f32::NAN], n), 0);
            assert_eq!(warm.pick(&[-inf, -inf, 3.0], n), 2);
        }
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let e = f64::exp;
        let warm = Sampling { temperature: 2.0, seed: 3, ..Sampling::default() };
        let weights = [e(0.5), e(1.5), 0.0, e(1.0), e(1.5)];
        let total: f64 = weights.iter().sum();
        for (share, weight) in shares(warm).iter().zip(weights) {
            assert!((share - weight / total).abs() < 0.03, "{share} of {}", weight / total);
        }
        assert_eq!(shares(warm), shares(warm), "the same seed, the same text");
        assert_ne!(shares(warm), shares(Sampling { seed: 4, ..warm }));
    }

    #[test]
    fn the_unlikely_are_cut_off() {
        let one = Sampling { temperature: 1.0, top_k: 1, ..Sampling::default() };
        assert_eq!(shares(one)[1], 1.0);
        let three = shares(Sampling { top_k: 3, ..one });
        assert!(three[0] == 0.0 && three[3] > 0.0 && three[4] > 0.0, "{three:?}");
        // Ids 1 and 4 have 0.40 each of the whole, id 3 has 0.15.
        let half = shares(Sampling { top_k: 0, top_p: 0.5, ..one });
        assert!(half[3] == 0.0 && (half[1] - 0.5).abs() < 0.03, "{half:?}");
        let least = shares(Sampling { top_k: 0, top_p: 1e-9, ..one });
        assert_eq!(least[1], 1.0, "one is left at least");
        let both = shares(Sampling { top_k: 2, top_p: 0.6, ..one });
        assert!(both[1] + both[4] == 1.0 && both[4] > 0.4, "{both:?}");
    }
}
