//! Times as they are typed, and the integer unit in which they are exact.

use std::fmt;
use std::str::FromStr;

/// A number of at most 28 digits, exactly as it was typed: `digits` / 10^`decimals`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Decimal {
    digits: u128,
    decimals: u32,
}

/// The longest time, in µs: a quarter of an hour for one action.
const MICROS_MAX: u128 = 1_000_000_000;
/// With 10^9 µs at most, no product of digits and a power of ten leaves 128 bits.
const DIGITS_MAX: usize = 28;

impl FromStr for Decimal {
    type Err = String;

    /// Reads `18522`, `0.601`, `1.5e3`.
    fn from_str(text: &str) -> Result<Decimal, String> {
        let works = || "expected a time of 0 to 1e9 us, such as 18522 or 0.601".to_string();
        let (number, exponent) = match text.split_once(['e', 'E']) {
            Some((number, exponent)) => (number, exponent.parse::<i32>().map_err(|_| works())?),
            None => (text, 0),
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let all = format!("{whole}{fraction}");
        if all.is_empty() || !all.bytes().all(|b| b.is_ascii_digit()) {
            return Err(works());
        }
        let fraction_digits = fraction.trim_end_matches('0').len();
        let digits = &all[..all.len() - (fraction.len() - fraction_digits)];
        let digits = digits.trim_start_matches('0');
        let decimals = fraction_digits as i64 - i64::from(exponent);
        if digits.is_empty() {
            return Ok(Decimal::default());
        }
        let length = digits.len() as i64 + (-decimals).max(0);
        if length.max(decimals) > DIGITS_MAX as i64 {
            return Err(format!("{}, of at most {DIGITS_MAX} digits", works()));
        }
        let digits: u128 = digits.parse().map_err(|_| works())?;
        let value = Decimal {
            digits: digits * 10u128.pow((-decimals).max(0) as u32),
            decimals: decimals.max(0) as u32,
        };
        if value.digits > MICROS_MAX * 10u128.pow(value.decimals) {
            Err(works())
        } else {
            Ok(value)
        }
    }
}

impl Decimal {
    /// 1 us.
    pub(crate) const ONE: Decimal = Decimal { digits: 1, decimals: 0 };

    /// So many times as much.
    pub(crate) fn times(self, n: usize) -> Decimal {
        Decimal { digits: self.digits * n as u128, ..self }
    }
}

/// The unit of time of one simulation: 10^-`decimals` µs, a nanosecond or finer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    decimals: u32,
}

const NS: u32 = 3;

impl Unit {
    /// A nanosecond.
    pub(crate) const NANO: Unit = Unit { decimals: NS };

    /// The coarsest unit in which all `times` are whole, or the finest in which `actions` of the
    /// longest still fit into 64 bits, whichever is coarser. The error is the longest time where
    /// not even nanoseconds fit.
    pub(crate) fn fitting(times: &[Decimal], actions: usize) -> Result<Unit, String> {
        let whole = times.iter().map(|t| t.decimals).max().unwrap_or(0).max(NS);
        let longest = |unit: Unit| times.iter().map(|t| unit.units_wide(t)).max().unwrap_or(0);
        let fits = |decimals: &u32| {
            // Three times a time is the most that an action can add (an overlapped pair).
            let all = longest(Unit { decimals: *decimals }).checked_mul(3 * (actions as u128 + 1));
            all.is_some_and(|sum| sum <= u128::from(u64::MAX))
        };
        match (NS..=whole).rev().find(fits) {
            Some(decimals) => Ok(Unit { decimals }),
            None => Err(Unit { decimals: NS }.text(longest(Unit { decimals: NS }))),
        }
    }

    /// True where `time` is a whole number of units.
    pub(crate) fn holds(self, time: &Decimal) -> bool {
        time.decimals <= self.decimals
    }

    /// `time` in units, to the nearest where it is not a whole number of them.
    pub(crate) fn units(self, time: &Decimal) -> u64 {
        u64::try_from(self.units_wide(time)).expect("checked when the unit was chosen")
    }

    fn units_wide(self, time: &Decimal) -> u128 {
        match time.decimals.checked_sub(self.decimals) {
            Some(finer) => {
                let divisor = 10u128.pow(finer);
                (time.digits + divisor / 2) / divisor
            }
            None => time.digits * 10u128.pow(self.decimals - time.decimals),
        }
    }

    /// Units as µs: the `f64` nearest to the exact number, so that it reads back to it.
    pub(crate) fn micros(self, units: u64) -> f64 {
        self.text(units.into()).parse().expect("a decimal number")
    }

    /// Units as nanoseconds, to the nearest.
    pub(crate) fn nanos(self, units: u64) -> u64 {
        let divisor = 10u64.pow(self.decimals - NS);
        units / divisor + u64::from(units % divisor * 2 >= divisor && divisor > 1)
    }

    /// Units as µs without superfluous zeros: `193`, `0.601`.
    pub(crate) fn text(self, units: u128) -> String {
        let scale = 10u128.pow(self.decimals);
        let width = self.decimals as usize;
        let text = format!("{}.{:0width$}", units / scale, units % scale);
        text.trim_end_matches('0').trim_end_matches('.').to_string()
    }
}

/// µs, as they were typed but for superfluous zeros.
impl fmt::Display for Decimal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&Unit { decimals: self.decimals }.text(self.digits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Decimal {
        text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
    }

    #[test]
    fn numbers_are_kept_as_typed() {
        for (text, shown) in [
            ("0", "0"),
            ("0.000", "0"),
            ("18522", "18522"),
            (".601", "0.601"),
            ("5.", "5"),
            ("007.2500", "7.25"),
            ("1e3", "1000"),
            ("1.5e-05", "0.000015"),
            ("1.25E1", "12.5"),
            ("1000000000", "1000000000"),
            ("6028.666666666667", "6028.666666666667"),
        ] {
            assert_eq!(read(text).to_string(), shown, "{text}");
        }
        let too_fine = format!("0.{}1", "0".repeat(30));
        for text in
            ["", ".", "-1", "+1", "1,5", "1.2.3", "x", "1e", "1e99", "nan", "inf", "1000000001"]
        {
            assert!(text.parse::<Decimal>().is_err(), "{text}");
        }
        assert!(too_fine.parse::<Decimal>().is_err());
    }

    #[test]
    fn the_unit_is_the_coarsest_that_is_exact() {
        let unit = |texts: &[&str], actions| {
            let times: Vec<Decimal> = texts.iter().map(|t| read(t)).collect();
            Unit::fitting(&times, actions).map(|unit| unit.decimals)
        };
        assert_eq!(unit(&["1", "2"], 10), Ok(3));
        assert_eq!(unit(&["18522", "0.601"], 1000), Ok(3));
        assert_eq!(unit(&["1", "0.00001"], 10), Ok(5));
        assert_eq!(unit(&["6028.6666666666667"], 1151), Ok(11), "as fine as 64 bits allow");
        let fine = format!("0.{}1", "0".repeat(27));
        assert_eq!(unit(&[&fine, "1000000000"], 10), Ok(8));
        assert_eq!(unit(&["1000000000"], 10_000_000), Err("1000000000".into()));
    }

    #[test]
    fn units_read_back_to_the_same_number() {
        let unit = Unit { decimals: 5 };
        assert_eq!(unit.units(&read("0.60125")), 60125);
        assert_eq!(unit.units(&read("0.601254")), 60125);
        assert_eq!(unit.units(&read("0.601256")), 60126);
        assert!(unit.holds(&read("0.60125")) && !unit.holds(&read("0.601255")));
        assert_eq!(unit.micros(60125), 0.60125);
        assert_eq!([unit.nanos(60125), unit.nanos(60149), unit.nanos(60150)], [601, 601, 602]);
        assert_eq!(Unit { decimals: 3 }.nanos(601), 601);
        // Beyond 53 bits a division of rounded numbers would be rounded twice.
        assert_eq!(Unit { decimals: 9 }.micros(9_007_199_254_740_993), 9007199.254740993);
    }
}
