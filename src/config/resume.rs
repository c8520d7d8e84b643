//! Whether a run goes on from a checkpoint, and from which: `true`, `false`, `"must"` or a step.

use std::fmt;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// How [`Resume`] is read where it is not `true` or a step.
const MUST: &str = "must";
/// The expected form, for a value that is none of these.
pub(super) const EXPECTED: &str = "expected true, false, must or the number of a step";

/// From what a run with a folder of checkpoints goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Resume {
    /// It begins anew, and the folder must have no checkpoint.
    #[default]
    No,
    /// From the newest checkpoint; where nothing was saved yet it begins anew.
    Newest,
    /// From the newest checkpoint, and there must be one.
    Must,
    /// From the checkpoint after this many steps.
    Step(u64),
}

impl Resume {
    /// Reads the spelling of a flag.
    pub(super) fn parse(text: &str) -> Option<Resume> {
        match text {
            "false" => Some(Resume::No),
            "true" => Some(Resume::Newest),
            MUST => Some(Resume::Must),
            step => step.parse().ok().filter(|n| i64::try_from(*n).is_ok()).map(Resume::Step),
        }
    }
}

impl From<bool> for Resume {
    fn from(on: bool) -> Resume {
        if on { Resume::Newest } else { Resume::No }
    }
}

impl fmt::Display for Resume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Resume::No => f.write_str("false"),
            Resume::Newest => f.write_str("true"),
            Resume::Must => f.write_str(MUST),
            Resume::Step(step) => step.fmt(f),
        }
    }
}

impl Serialize for Resume {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Resume::No => serializer.serialize_bool(false),
            Resume::Newest => serializer.serialize_bool(true),
            Resume::Must => serializer.serialize_str(MUST),
            Resume::Step(step) => serializer.serialize_u64(*step),
        }
    }
}

impl<'de> Deserialize<'de> for Resume {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Resume, D::Error> {
        struct ResumeVisitor;
        impl Visitor<'_> for ResumeVisitor {
            type Value = Resume;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(EXPECTED.strip_prefix("expected ").unwrap_or(EXPECTED))
            }
            fn visit_bool<E: Error>(self, on: bool) -> Result<Resume, E> {
                Ok(on.into())
            }
            fn visit_i64<E: Error>(self, step: i64) -> Result<Resume, E> {
                u64::try_from(step).map(Resume::Step).map_err(|_| E::custom(EXPECTED))
            }
            fn visit_u64<E: Error>(self, step: u64) -> Result<Resume, E> {
                Ok(Resume::Step(step))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Resume, E> {
                Resume::parse(text).ok_or_else(|| E::custom(EXPECTED))
            }
        }
        deserializer.deserialize_any(ResumeVisitor)
    }
}
