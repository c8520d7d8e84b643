//! Schedules from files.

use std::path::Path;

use zeropp_pipeline::exchange::{self, Format, json::Document};

/// A schedule file that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {problem}")]
pub struct ScheduleFileError {
    /// The file.
    pub path: String,
    /// What is wrong with it.
    pub problem: String,
}

/// Reads a schedule from a `.csv` or `.json` file.
///
/// # Errors
/// One message that starts with the path: another extension, an unreadable file, or what
/// [`exchange::read`] found.
pub fn read_schedule(path: &Path) -> Result<Document, ScheduleFileError> {
    let fail = |problem| ScheduleFileError { path: path.display().to_string(), problem };
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
    let format = Format::from_extension(extension)
        .ok_or_else(|| fail("a schedule file ends in .csv or .json".into()))?;
    let text = std::fs::read_to_string(path).map_err(|e| fail(e.to_string()))?;
    exchange::read(&text, format).map_err(fail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_file_and_another_extension_are_named() {
        let missing = read_schedule(Path::new("none.csv")).unwrap_err().to_string();
        assert!(missing.starts_with("none.csv: "), "{missing}");
        let other = read_schedule(Path::new("plan.py")).unwrap_err().to_string();
        assert_eq!(other, "plan.py: a schedule file ends in .csv or .json");
    }
}
