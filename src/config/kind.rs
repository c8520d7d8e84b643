//! The kinds of values that settings take: how a flag's text is read, and how a value is written.

use std::path::PathBuf;

use serde::Serialize;
use toml::Value;

use super::bytes::{self, Bytes};
use super::resume::{EXPECTED, Resume};
use super::slice_count::{self, SliceCount};
use super::step_range::StepRange;

/// The kind of value that a setting takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionKind {
    /// A whole number from 0.
    Count,
    /// A floating-point number.
    Number,
    /// True or false; a flag alone means true.
    Switch,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A file or folder.
    Path,
    /// Any text.
    Text,
    /// True, false, `must` or the number of a step; a flag alone means true.
    Resume,
    /// The first and the last of some steps, `100..107`, or one step.
    Steps,
    /// A number of bytes, or one with a unit.
    Bytes,
    /// A whole number from 0, or `auto`.
    Slices,
}

impl OptionKind {
    /// Reads the text of a flag as the value that stands for it in a file.
    ///
    /// # Errors
    /// The forms that are understood, where `text` is not of this kind.
    pub fn parse(&self, text: &str) -> Result<Value, String> {
        match self {
            OptionKind::Count => {
                text.parse().ok().filter(|n| *n >= 0).map(Value::Integer).ok_or_else(|| match text
                    .parse::<u128>(
                ) {
                    Ok(_) => format!("is too large; use at most {}", i64::MAX),
                    Err(_) => "expected a whole number, such as 4".into(),
                })
            }
            OptionKind::Number => {
                text.parse().map(Value::Float).map_err(|_| "expected a number, such as 0.1".into())
            }
            OptionKind::Switch => {
                text.parse().map(Value::Boolean).map_err(|_| "expected true or false".into())
            }
            OptionKind::Choice(names) if !names.contains(&text) => {
                Err(format!("expected one of {}", names.join(", ")))
            }
            OptionKind::Resume => match Resume::parse(text) {
                Some(resume) => Ok(Value::try_from(resume).expect("a word or a number")),
                None => Err(EXPECTED.into()),
            },
            OptionKind::Steps => text.parse::<StepRange>().map(|steps| steps.to_string().into()),
            OptionKind::Bytes => match Bytes::parse(text) {
                Some(bytes) => Ok(Value::try_from(bytes).expect("an integer")),
                None => Err(bytes::EXPECTED.into()),
            },
            OptionKind::Slices => match SliceCount::parse(text) {
                Some(n) => Ok(Value::try_from(n).expect("a word or an integer")),
                None => Err(slice_count::EXPECTED.into()),
            },
            OptionKind::Choice(_) | OptionKind::Path | OptionKind::Text => {
                Ok(Value::String(text.into()))
            }
        }
    }
}

/// A field type of [`Config`] and the kind of value it is read from.
pub(super) trait OptionType: Serialize + Sized {
    /// Its kind.
    const KIND: OptionKind;
    /// Whether it has no value, so that a file leaves it out.
    fn unset(&self) -> bool {
        false
    }
    /// The value as a person would write it, without quotes.
    fn text(&self) -> Option<String> {
        match Value::try_from(self).expect("a checked setting") {
            Value::String(text) => Some(text),
            other => Some(other.to_string()),
        }
    }
}

macro_rules! kind_of {
    ($($type:ty => $kind:ident),+) => {
        $(impl OptionType for $type { const KIND: OptionKind = OptionKind::$kind; })+
    };
}
kind_of!(
    usize => Count,
    u64 => Count,
    f64 => Number,
    bool => Switch,
    String => Text,
    Bytes => Bytes,
    Resume => Resume,
    SliceCount => Slices,
    StepRange => Steps
);

impl OptionType for PathBuf {
    const KIND: OptionKind = OptionKind::Path;
    fn text(&self) -> Option<String> {
        Some(self.to_string_lossy().into_owned())
    }
}

impl<T: OptionType> OptionType for Option<T> {
    const KIND: OptionKind = T::KIND;
    fn unset(&self) -> bool {
        self.is_none()
    }
    fn text(&self) -> Option<String> {
        self.as_ref().and_then(T::text)
    }
}
