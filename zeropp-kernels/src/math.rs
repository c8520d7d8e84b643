//! Elementary functions in plain arithmetic, so that loops over them vectorise and their bits do
//! not depend on the CPU.

/// 1.5·2²³: adding it to a small float rounds it to an integer, left in the low mantissa bits.
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has few enough bits to be multiplied exactly by an exponent.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Below this eˣ is treated as zero: the result would no longer be a normal number.
const EXP_MIN: f32 = -87.0;
/// Above this eˣ is held at its value here, just below the largest float.
const EXP_MAX: f32 = 88.37;

/// eˣ with a relative error of about 1e-7; 0 below −87, finite everywhere.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let clamped = x.clamp(EXP_MIN, EXP_MAX);
    let shifted = clamped * core::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    // Taylor series of eʳ for |r| ≤ ln2/2; the next term is below 6e-9.
    let mut p = 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r * r + r;
    // 2ⁿ: the integer sits in the low bits of `shifted`; the shift drops all but the exponent.
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    let y = p * scale + scale;
    if x < EXP_MIN { 0.0 } else { y }
}

/// The natural logarithm of a positive normal number, in double precision and rounded once: the
/// standard library's may depend on the machine's mathematical library.
pub fn ln(x: f32) -> f32 {
    let bits = x.to_bits();
    if !(x.is_normal() && x > 0.0) {
        return x.ln();
    }
    // x = m·2ⁿ with m between √½ and √2.
    let n = (bits.wrapping_sub(0x3f35_04f3) as i32) >> 23;
    let m = f64::from(f32::from_bits(bits.wrapping_sub((n << 23) as u32)));
    let t = (m - 1.0) / (m + 1.0);
    let square = t * t;
    let mut series = 1.0 / 13.0;
    for odd in [11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        series = series * square + 1.0 / odd;
    }
    (f64::from(n) * core::f64::consts::LN_2 + 2.0 * t * series) as f32
}

/// 1/(1 + e⁻ˣ).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Φ(x) and e^{−x²/2} for the standard normal distribution: Φ = (1 + erf(x/√2))/2.
///
/// Φ(−|x|) = e^{−x²/2}·t·P(t) with t = 1/(1 + 0.3|x|); P interpolates the scaled tail at the
/// Chebyshev nodes of 0 ≤ |x| ≤ 9 (relative error 6e-8, checked against double precision below).
#[inline(always)]
pub(crate) fn normal_cdf(x: f32) -> (f32, f32) {
    let a = x.abs();
    let t = 1.0 / (1.0 + 0.3 * a);
    let mut p = 0.038_035_683;
    p = p * t - 0.167_287_55;
    p = p * t + 0.224_263_64;
    p = p * t - 0.070_785_66;
    p = p * t + 0.138_021_3;
    p = p * t + 0.096_889_04;
    p = p * t + 0.121_270_62;
    p = p * t + 0.119_592_95;
    let bell = exp(-0.5 * (a * a));
    let tail = bell * (t * p);
    (if x < 0.0 { tail } else { 1.0 - tail }, bell)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_agrees_with_double_precision() {
        for i in -870_000..=883_000 {
            let x = i as f32 * 1e-4;
            let want = f64::from(x).exp();
            let error = (f64::from(exp(x)) / want - 1.0).abs();
            assert!(error < 2.5e-7, "exp({x}) is off by {error:e}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-1e30), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(1e30).is_finite());
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn ln_agrees_with_double_precision() {
        for i in 0..1_990_000_u32 {
            let x = f32::from_bits(0x0080_0000 + i * 1069);
            let want = f64::from(x).ln();
            let error = (f64::from(ln(x)) - want).abs() / want.abs().max(1e-30);
            assert!(error < 6.1e-8, "ln({x}) is off by {error:e}");
        }
        assert_eq!((ln(1.0), ln(0.0), ln(f32::INFINITY)), (0.0, f32::NEG_INFINITY, f32::INFINITY));
        assert!(ln(f32::NAN).is_nan() && ln(-1.0).is_nan());
    }

    #[test]
    fn sigmoid_agrees_with_double_precision() {
        for i in -80_000..=80_000 {
            let x = i as f32 * 1e-3;
            let want = 1.0 / (1.0 + (-f64::from(x)).exp());
            let error = (f64::from(sigmoid(x)) / want - 1.0).abs();
            assert!(error < 4e-7, "sigmoid({x}) is off by {error:e}");
        }
    }

    /// Φ by Simpson's rule on the density, from the nearer end.
    fn normal_cdf_f64(x: f64) -> f64 {
        let density = |t: f64| (-0.5 * t * t).exp() / (2.0 * core::f64::consts::PI).sqrt();
        let steps = 400;
        let h = x.abs() / f64::from(steps);
        let inner = (1..steps).map(|i| {
            let weight = if i % 2 == 1 { 4.0 } else { 2.0 };
            weight * density(f64::from(i) * h)
        });
        let area = (density(0.0) + density(x) + inner.sum::<f64>()) * h / 3.0;
        if x < 0.0 { 0.5 - area } else { 0.5 + area }
    }

    #[test]
    fn normal_cdf_agrees_with_double_precision() {
        for i in -6000..=6000 {
            let x = i as f32 * 1e-3;
            let want = normal_cdf_f64(f64::from(x));
            let error = (f64::from(normal_cdf(x).0) - want).abs();
            assert!(error < 2.5e-7, "cdf({x}) is off by {error:e}");
        }
        assert_eq!(normal_cdf(40.0).0, 1.0);
        assert_eq!(normal_cdf(-40.0).0, 0.0);
    }
}
