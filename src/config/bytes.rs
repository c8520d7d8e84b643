//! Amounts of memory: a number of bytes, or a text with a unit.

use std::fmt;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The expected form, for a value that is no amount of memory.
pub(super) const EXPECTED: &str = "expected bytes, such as 25769803776, 24GiB, 512 MiB or 1.5GB";
/// Units, by their letters in lower case. A letter alone is what it is in SI, as in `80G`.
const UNITS: [(&str, f64); 16] = [
    ("b", 1.0),
    ("kib", 1024.0),
    ("mib", 1048576.0),
    ("gib", 1073741824.0),
    ("tib", 1099511627776.0),
    ("pib", 1125899906842624.0),
    ("kb", 1e3),
    ("mb", 1e6),
    ("gb", 1e9),
    ("tb", 1e12),
    ("pb", 1e15),
    ("k", 1e3),
    ("m", 1e6),
    ("g", 1e9),
    ("t", 1e12),
    ("p", 1e15),
];

/// So many bytes. Shown with the largest binary unit that they fill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Reads the spelling of a flag: digits, a fraction, a unit, none of which is bytes.
    pub fn parse(text: &str) -> Option<Bytes> {
        let text = text.trim();
        let digits = |c: char| c.is_ascii_digit() || c == '.';
        let (number, unit) = text.split_at(text.find(|c| !digits(c)).unwrap_or(text.len()));
        let unit = unit.trim().to_ascii_lowercase();
        let whole = number.parse::<u64>().ok();
        let bytes = match (unit.as_str(), whole) {
            ("" | "b", _) => whole?,
            _ => {
                let (_, size) = UNITS.iter().find(|(name, _)| *name == unit)?;
                let bytes = number.parse::<f64>().ok()? * size;
                // A file's integers have 63 bits.
                (bytes < 2f64.powi(63)).then_some(bytes.round() as u64)?
            }
        };
        i64::try_from(bytes).ok().map(|_| Bytes(bytes))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = ["KiB", "MiB", "GiB", "TiB", "PiB"];
        let fits = (1..=names.len()).rev().find(|power| self.0 >> (10 * power) > 0);
        match fits {
            Some(power) => {
                let number = format!("{:.2}", self.0 as f64 / 1024f64.powi(power as i32));
                let number = number.trim_end_matches('0').trim_end_matches('.');
                write!(f, "{number} {}", names[power - 1])
            }
            None => write!(f, "{} B", self.0),
        }
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
        struct BytesVisitor;
        impl Visitor<'_> for BytesVisitor {
            type Value = Bytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(EXPECTED.strip_prefix("expected ").unwrap_or(EXPECTED))
            }
            fn visit_i64<E: Error>(self, bytes: i64) -> Result<Bytes, E> {
                u64::try_from(bytes).map(Bytes).map_err(|_| E::custom(EXPECTED))
            }
            fn visit_u64<E: Error>(self, bytes: u64) -> Result<Bytes, E> {
                Ok(Bytes(bytes))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Bytes, E> {
                Bytes::parse(text).ok_or_else(|| E::custom(EXPECTED))
            }
        }
        deserializer.deserialize_any(BytesVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_with_and_without_units() {
        for (text, bytes) in [
            ("0", 0),
            ("25769803776", 24 << 30),
            ("24GiB", 24 << 30),
            ("24 gib", 24 << 30),
            ("1.5 MiB", 3 << 19),
            ("2 GB", 2_000_000_000),
            ("512 B", 512),
            ("80G", 80_000_000_000),
            ("1.5k", 1500),
            ("9007199254740993", 9007199254740993),
        ] {
            assert_eq!(Bytes::parse(text), Some(Bytes(bytes)), "{text}");
        }
        for text in ["", "GiB", "-1", "1.5", "1.5.2 GiB", "24X", "24 GiBs", "1e3", "nan", "9 EiB"] {
            assert_eq!(Bytes::parse(text), None, "{text}");
        }
        assert_eq!(Bytes::parse("8192 PiB"), None, "beyond a file's integers");
    }

    #[test]
    fn amounts_read_well() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (3 << 19, "1.5 MiB"),
            (24 << 30, "24 GiB"),
            (1500, "1.46 KiB"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }
}
