//! A sum of floating-point numbers without rounding, so that no order can be seen in it.
//!
//! Every f64 is an integer multiple of 2^-1074, so a wide integer holds any sum of them exactly.

use serde::{Deserialize, Serialize};

const LIMBS: usize = 34; // 2^-1074 ..= 2^1024 is 2098 bits; the rest is room for 2^78 carries.

/// An exact sum of non-negative f64 values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Vec<u8>", try_from = "Vec<u8>")]
pub struct ExactSum {
    limbs: [u64; LIMBS],
    finite: bool,
}

impl Default for ExactSum {
    fn default() -> Self {
        Self { limbs: [0; LIMBS], finite: true }
    }
}

impl ExactSum {
    /// Adds one value. An infinity or NaN makes the whole sum infinite.
    ///
    /// # Panics
    /// Panics if `x` is negative: the sums here are of squares.
    pub(crate) fn add(&mut self, x: f64) {
        if !x.is_finite() {
            self.finite = false;
            return;
        }
        assert!(x >= 0.0, "ExactSum adds non-negative values, got {x}");
        let bits = x.to_bits();
        let exponent = (bits >> 52) as usize;
        let fraction = bits & ((1 << 52) - 1);
        // Subnormals and exponent 1 share the unit 2^-1074.
        let (mantissa, shift) =
            if exponent == 0 { (fraction, 0) } else { (fraction | 1 << 52, exponent - 1) };
        let (limb, bit) = (shift / 64, shift % 64);
        let wide = (mantissa as u128) << bit;
        self.add_at(limb, wide as u64);
        self.add_at(limb + 1, (wide >> 64) as u64);
    }

    /// Adds another sum.
    pub fn merge(&mut self, other: &Self) {
        self.finite &= other.finite;
        other.limbs.iter().enumerate().for_each(|(limb, value)| self.add_at(limb, *value));
    }

    fn add_at(&mut self, mut limb: usize, value: u64) {
        let mut carry = value;
        while carry != 0 {
            let (sum, overflow) = self.limbs[limb].overflowing_add(carry);
            self.limbs[limb] = sum;
            carry = overflow as u64;
            limb += 1;
        }
    }

    /// The sum, truncated to f64; infinite if a term was not finite or the sum does not fit.
    pub fn value(&self) -> f64 {
        if !self.finite {
            return f64::INFINITY;
        }
        let Some(top) = self.limbs.iter().rposition(|l| *l != 0) else { return 0.0 };
        // The two highest limbs hold at least 65 bits: more than a mantissa.
        let high = self.limbs[top] as f64 * 2f64.powi(64);
        let low = if top > 0 { self.limbs[top - 1] as f64 } else { 0.0 };
        scale(high + low, 64 * (top as i32 - 1) - 1074)
    }

    /// Bytes that `add_bytes` adds: whether all terms were finite, the first
    /// limb that is not zero, and the limbs from there to the last such. Those of a gradient are a
    /// few of all, and every rank reads every other's.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let is_set = |limb: &u64| *limb != 0;
        let first = self.limbs.iter().position(is_set).unwrap_or(LIMBS);
        let end = self.limbs.iter().rposition(is_set).map_or(first, |last| last + 1);
        let mut out = vec![self.finite as u8, first as u8];
        out.extend(self.limbs[first..end].iter().flat_map(|limb| limb.to_le_bytes()));
        out
    }

    /// Adds the sum that [`to_bytes`](Self::to_bytes) wrote; `None`, and nothing added, where the
    /// bytes are none.
    pub(crate) fn add_bytes(&mut self, bytes: &[u8]) -> Option<()> {
        let ([finite, first], limbs) = bytes.split_first_chunk::<2>()?;
        let (limbs, rest) = limbs.as_chunks::<8>();
        let first = usize::from(*first);
        if *finite > 1 || !rest.is_empty() || first + limbs.len() > LIMBS {
            return None;
        }
        self.finite &= *finite == 1;
        for (i, limb) in limbs.iter().enumerate() {
            self.add_at(first + i, u64::from_le_bytes(*limb));
        }
        Some(())
    }
}

impl From<ExactSum> for Vec<u8> {
    fn from(sum: ExactSum) -> Vec<u8> {
        sum.to_bytes()
    }
}

impl TryFrom<Vec<u8>> for ExactSum {
    type Error = &'static str;

    fn try_from(bytes: Vec<u8>) -> Result<ExactSum, &'static str> {
        let mut sum = ExactSum::default();
        sum.add_bytes(&bytes).map(|()| sum).ok_or("these bytes are no sum")
    }
}

/// x · 2^e in steps that neither overflow nor round on the way.
fn scale(mut x: f64, mut e: i32) -> f64 {
    while e < -1000 {
        x *= 2f64.powi(-1000);
        e += 1000;
    }
    while e > 1000 {
        x *= 2f64.powi(1000);
        e -= 1000;
    }
    x * 2f64.powi(e)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn exact_where_f64_is_not() {
        let mut s = ExactSum::default();
        s.add(1e300);
        for _ in 0..1000 {
            s.add(1e-300);
        }
        let mut t = ExactSum::default();
        for _ in 0..1000 {
            t.add(1e-300);
        }
        t.add(1e300);
        assert_eq!(s, t);
        assert_eq!(s.value(), 1e300);
        s.add(f64::NAN);
        assert_eq!(s.value(), f64::INFINITY);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]
        #[test]
        fn order_and_grouping_do_not_matter(
            xs in prop::collection::vec(0.0f64..1e30, 1..50), cut in 0usize..50,
        ) {
            let mut forward = ExactSum::default();
            xs.iter().for_each(|x| forward.add(*x));
            let cut = cut.min(xs.len());
            let (mut a, mut b) = (ExactSum::default(), ExactSum::default());
            xs[..cut].iter().rev().for_each(|x| a.add(*x));
            xs[cut..].iter().rev().for_each(|x| b.add(*x));
            let mut merged = ExactSum::default();
            merged.add_bytes(&b.to_bytes()).unwrap();
            let mut whole = b;
            whole.merge(&a);
            prop_assert_eq!(&whole, &forward);
            merged.add_bytes(&a.to_bytes()).unwrap();
            prop_assert_eq!(&merged, &forward);
            let plain: f64 = xs.iter().sum();
            prop_assert!((forward.value() - plain).abs() <= 1e-14 * plain);
        }

        #[test]
        fn any_bytes_are_added_or_refused(
            bytes in prop::collection::vec(any::<u8>(), 0..300), few in 0u8..40,
        ) {
            let mut sum = ExactSum::default();
            let _ = sum.add_bytes(&bytes);
            // A sum is small on the wire: every rank reads every other's.
            let mut sum = ExactSum::default();
            (0..few).for_each(|i| sum.add(f64::from(i) * 1e-6));
            prop_assert!(sum.to_bytes().len() <= 2 + 4 * 8);
        }

        #[test]
        fn one_value_reads_back(bits in 0u64..0x7ff0_0000_0000_0000) {
            let x = f64::from_bits(bits);
            let mut s = ExactSum::default();
            s.add(x);
            prop_assert_eq!(s.value().to_bits(), x.to_bits());
        }
    }
}
