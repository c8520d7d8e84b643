//! A small random generator of its own, so that a seed means the same on every machine.

/// SplitMix64 (Steele, Lea and Flood 2014).
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random(seed ^ 0x5851_f42d_4c95_7f2d)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// 0..n, for n well below 2³².
    pub(super) fn below(&mut self, n: usize) -> usize {
        (((self.next() >> 32) * n as u64) >> 32) as usize
    }

    /// True once in `n` times.
    pub(super) fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// In 0.0..1.0.
    pub(super) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 * (1.0 / 9_007_199_254_740_992.0)
    }

    /// Of an exponential distribution with mean 1. The logarithm is a series of exact operations:
    /// the platform's own may differ in its last bit, and with it the schedule.
    pub(super) fn exponential(&mut self) -> f64 {
        -logarithm(1.0 - self.unit())
    }
}

/// ln x for x > 0, from additions, multiplications and divisions only.
pub(super) fn logarithm(x: f64) -> f64 {
    let bits = x.to_bits();
    let exponent = ((bits >> 52) & 0x7ff) as i64 - 1023;
    let mantissa = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    // ln m = 2 artanh((m − 1) / (m + 1)), m in 1..2.
    let t = (mantissa - 1.0) / (mantissa + 1.0);
    let t2 = t * t;
    let mut sum = 0.0;
    for odd in (1..20).rev().step_by(2) {
        sum = sum * t2 + 1.0 / odd as f64;
    }
    2.0 * t * sum + exponent as f64 * std::f64::consts::LN_2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logarithm_is_one() {
        for x in [1e-16, 0.001, 0.3, 0.5, 0.9999, 1.0, 1.5, 2.0, 10.0] {
            let x: f64 = x;
            assert!((logarithm(x) - x.ln()).abs() < 1e-8, "{x}");
        }
    }

    #[test]
    fn draws_stay_within_their_ranges() {
        let mut random = Random::new(1);
        let mut seen = [false; 7];
        for _ in 0..1000 {
            seen[random.below(7)] = true;
            assert!((0.0..1.0).contains(&random.unit()));
            assert!(random.exponential() >= 0.0);
        }
        assert!(seen.iter().all(|s| *s));
    }
}
