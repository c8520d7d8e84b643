//! Times as they are typed: in µs, kept in nanoseconds.

use std::fmt;
use std::str::FromStr;

/// A time in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Micros(u64);

/// The longest time, in µs: a quarter of an hour for one action.
const MICROS_MAX: f64 = 1e9;
/// The largest part of a time by which rounding to a nanosecond may change it.
const ROUNDED_MAX: f64 = 1e-3;

impl FromStr for Micros {
    type Err = String;

    /// Reads `18522`, `0.601`, `1.5e3`.
    fn from_str(text: &str) -> Result<Micros, String> {
        let works = || "expected a time of 0 to 1e9 us, such as 18522 or 0.601".to_string();
        let is_number = text.bytes().all(|b| b.is_ascii_digit() || b".eE-".contains(&b));
        let micros: f64 = text.parse().map_err(|_| works())?;
        if !is_number || text.starts_with('-') || !(0.0..=MICROS_MAX).contains(&micros) {
            return Err(works());
        }
        let whole = (1000.0 * micros).round();
        if (whole - 1000.0 * micros).abs() > ROUNDED_MAX * 1000.0 * micros {
            return Err("times are in whole nanoseconds, of which this is a part; make all times \
                        1000 times as long"
                .into());
        }
        Ok(Micros(whole as u64))
    }
}

impl Micros {
    /// 1 us.
    pub(crate) const ONE: Micros = Micros(1000);

    /// So many times as much.
    pub(crate) fn times(self, n: usize) -> Micros {
        Micros(self.0.saturating_mul(n as u64))
    }

    pub(crate) fn nanos(self) -> u64 {
        self.0
    }
}

/// Nanoseconds as µs: the `f64` nearest to the exact number up to 2⁵³ ns.
pub(super) fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1e3
}

impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        micros(self.0).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_to_the_nanosecond_and_shown_as_typed() {
        for (text, shown) in [
            ("0", "0"),
            ("18522", "18522"),
            (".601", "0.601"),
            ("5.", "5"),
            ("007.2500", "7.25"),
            ("1e3", "1000"),
            ("1.25E1", "12.5"),
            ("1000000000", "1000000000"),
            ("6028.666666666667", "6028.667"),
        ] {
            let time: Micros = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(time.to_string(), shown, "{text}");
        }
        for text in ["", ".", "-1", "-0", "+1", "1,5", "1.2.3", "x", "1e", "1e99", "nan", "inf"] {
            assert!(text.parse::<Micros>().is_err(), "{text}");
        }
        for text in ["0.0001", "0.0015", "1e-9"] {
            let error = text.parse::<Micros>().unwrap_err();
            assert!(error.contains("1000 times as long"), "{text}: {error}");
        }
    }
}
