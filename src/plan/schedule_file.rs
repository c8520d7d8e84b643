//! Schedules from files.

use std::path::Path;

use zeropp_core::files::{escaped_line, read_text};
use zeropp_pipeline::exchange::{self, Format, json::Document};

/// Largest schedule file, in bytes: some 30 million actions.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// A file of a schedule, or of costs, that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {problem}")]
pub struct ScheduleFileError {
    /// The file.
    pub path: String,
    /// What is wrong with it.
    pub problem: String,
}

/// Reads a schedule from a `.csv` or `.json` file. Control characters of its name are escaped.
///
/// # Errors
/// One message that starts with the path: another extension, an unreadable file, or what
/// [`exchange::read`] found; control characters of the file are escaped.
pub fn read_schedule(path: &Path) -> Result<Document, ScheduleFileError> {
    let (text, format) = schedule_text(path)?;
    let fail = |problem: String| failed(path, &problem);
    let mut document = exchange::read(&text, format).map_err(fail)?;
    document.schedule.kind = escaped_line(&document.schedule.kind).into();
    Ok(document)
}

/// The text of a schedule file, and the form that its extension names.
///
/// # Errors
/// Another extension, an unreadable file.
pub fn schedule_text(path: &Path) -> Result<(String, Format), ScheduleFileError> {
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
    let format = Format::from_extension(extension)
        .ok_or_else(|| failed(path, "a schedule file ends in .csv or .json"))?;
    let text = read_text(path, FILE_BYTES_MAX).map_err(|e| failed(path, &e.to_string()))?;
    Ok((text, format))
}

fn failed(path: &Path, problem: &str) -> ScheduleFileError {
    let problem = escaped_line(problem).into();
    ScheduleFileError { path: path.display().to_string(), problem }
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

    #[test]
    fn file_text_is_escaped_for_terminals() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.json");
        let mut json = Vec::new();
        let kind = "\u{1b}[2Jmine\nerror: forged".into();
        let schedule = exchange::read("0F0,0B0\n", Format::Csv).unwrap().schedule;
        let schedule = zeropp_pipeline::ir::Schedule { kind, ..schedule };
        let document = Document { schedule, costs: None, measures: None };
        exchange::json::write(&document, &mut json).unwrap();
        std::fs::write(&path, &json).unwrap();
        let kind = read_schedule(&path).unwrap().schedule.kind;
        assert_eq!(kind, "\\u001b[2Jmine\\u000aerror: forged");
        // serde's own messages quote a field as it is.
        let text = String::from_utf8(json).unwrap().replacen('{', "{\"\\u009b3m\": 1,", 1);
        std::fs::write(&path, text).unwrap();
        let error = read_schedule(&path).unwrap_err().to_string();
        assert!(error.contains("\\u009b3m") && !error.contains('\u{9b}'), "{error}");
    }

    #[test]
    #[cfg(unix)]
    fn a_pipe_is_refused_and_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.csv");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let error = read_schedule(&path).unwrap_err().to_string();
        assert!(error.ends_with("it is a pipe (FIFO), not a regular file"), "{error}");
    }
}
