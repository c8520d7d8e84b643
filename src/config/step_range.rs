//! Some steps of a run, one after another: `100..107`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The steps from `first` to `last`, both of them; steps count from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct StepRange {
    /// The first step.
    pub first: u64,
    /// The last one, not before the first.
    pub last: u64,
}

impl FromStr for StepRange {
    type Err = String;

    fn from_str(text: &str) -> Result<StepRange, String> {
        let (first, last) = text.split_once("..").unwrap_or((text, text));
        let step = |text: &str| text.trim().parse::<u64>().ok().filter(|step| *step > 0);
        match step(first).zip(step(last)) {
            Some((first, last)) if first <= last => Ok(StepRange { first, last }),
            _ => Err("expected two steps from 1 on, the first of them first: 100..107".into()),
        }
    }
}

impl fmt::Display for StepRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.first, self.last)
    }
}

impl TryFrom<String> for StepRange {
    type Error = String;

    fn try_from(text: String) -> Result<StepRange, String> {
        text.parse()
    }
}

impl From<StepRange> for String {
    fn from(steps: StepRange) -> String {
        steps.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_read_as_they_are_written() {
        let steps = |text: &str| text.parse::<StepRange>().map(|s| (s.first, s.last)).ok();
        assert_eq!(steps("100..107"), Some((100, 107)));
        assert_eq!((steps("7"), steps("3 .. 3")), (Some((7, 7)), Some((3, 3))));
        for wrong in ["", "..", "0..3", "5..4", "1..", "a..b", "1..2..3", "-1..2"] {
            assert_eq!(steps(wrong), None, "{wrong}");
        }
        assert_eq!(StepRange { first: 2, last: 9 }.to_string(), "2..9");
    }
}
