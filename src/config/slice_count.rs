//! Into how many slices samples are cut: a number, or `auto`.

use std::fmt;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// How the choice is left to the run.
const AUTO: &str = "auto";
/// The expected form, for a value that is no such number.
pub(super) const EXPECTED: &str = "expected auto, or a whole number, such as 4";

/// Slices of a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SliceCount {
    /// As many as a step is predicted to be shortest with; one where they bring little.
    #[default]
    Auto,
    /// So many; with one, samples are whole.
    Of(usize),
}

impl SliceCount {
    /// Reads the spelling of a flag.
    pub fn parse(text: &str) -> Option<SliceCount> {
        match text {
            AUTO => Some(SliceCount::Auto),
            number => number.parse().ok().filter(|n| i64::try_from(*n).is_ok()).map(Self::Of),
        }
    }
}

impl From<usize> for SliceCount {
    fn from(n: usize) -> SliceCount {
        SliceCount::Of(n)
    }
}

impl fmt::Display for SliceCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SliceCount::Auto => f.write_str(AUTO),
            SliceCount::Of(n) => n.fmt(f),
        }
    }
}

impl Serialize for SliceCount {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            SliceCount::Auto => serializer.serialize_str(AUTO),
            SliceCount::Of(n) => serializer.serialize_u64(*n as u64),
        }
    }
}

impl<'de> Deserialize<'de> for SliceCount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<SliceCount, D::Error> {
        struct SliceCountVisitor;
        impl Visitor<'_> for SliceCountVisitor {
            type Value = SliceCount;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(EXPECTED.strip_prefix("expected ").unwrap_or(EXPECTED))
            }
            fn visit_i64<E: Error>(self, n: i64) -> Result<SliceCount, E> {
                usize::try_from(n).map(SliceCount::Of).map_err(|_| E::custom(EXPECTED))
            }
            fn visit_u64<E: Error>(self, n: u64) -> Result<SliceCount, E> {
                usize::try_from(n).map(SliceCount::Of).map_err(|_| E::custom(EXPECTED))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<SliceCount, E> {
                SliceCount::parse(text).ok_or_else(|| E::custom(EXPECTED))
            }
        }
        deserializer.deserialize_any(SliceCountVisitor)
    }
}
