//! Costs from files.

use std::path::Path;

use zeropp_core::files::{escaped, read_text, toml_keys};
use zeropp_pipeline::costs::Table;

use super::schedule_file::ScheduleFileError;
use crate::config::ConfigError;

/// Largest file of costs, in bytes: a trace of some million actions.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// Reads a file of costs: a table in TOML or JSON, a schedule's JSON that has costs, or a trace.
///
/// # Errors
/// One message that starts with the path: another extension, an unreadable file, or what is wrong
/// with the text; control characters of the file are escaped.
pub fn read_costs(path: &Path) -> Result<Table, ScheduleFileError> {
    let fail = |problem: String| ScheduleFileError {
        path: path.display().to_string(),
        problem: escaped(&problem).into(),
    };
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
    let is_toml = match extension.to_ascii_lowercase().as_str() {
        "toml" => true,
        "json" => false,
        _ => return Err(fail("a file of costs ends in .toml or .json".into())),
    };
    let text = read_text(path, FILE_BYTES_MAX).map_err(|e| fail(e.to_string()))?;
    let table = match is_toml {
        true => Table::of_keys(toml_keys(&text).map_err(fail)?),
        false => Table::from_json(&text),
    };
    table.map_err(|e| fail(e.to_string()))
}

/// A setting that names costs which do not work.
pub(crate) fn wrong(field: &str, name: &dyn std::fmt::Display, problem: &str) -> ConfigError {
    let help = "docs/costs.md says what such a file has";
    // It may quote the file.
    ConfigError::value(field, name, escaped(problem), help)
}

/// The costs that the setting `field` names.
pub(crate) fn load(field: &str, path: &Path) -> Result<Table, ConfigError> {
    read_costs(path).map_err(|e| wrong(field, &path.display(), &e.problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_used_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let message = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            let error = read_costs(&path).unwrap_err();
            assert_eq!(error.path, path.display().to_string());
            error.problem
        };
        assert_eq!(message("x.yaml", ""), "a file of costs ends in .toml or .json");
        assert!(message("x.toml", "t_f = ").contains("TOML"));
        let forged = message("x.json", "{\"\u{9b}3m\": 1, }");
        assert!(!forged.contains('\u{9b}'), "{forged}");
        let error = read_costs(&dir.path().join("none.json")).unwrap_err();
        assert!(error.to_string().contains("none.json: "), "{error}");
    }

    #[test]
    #[cfg(unix)]
    fn a_pipe_is_refused_and_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.toml");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let error = read_costs(&path).unwrap_err().to_string();
        assert!(error.ends_with("it is a pipe (FIFO), not a regular file"), "{error}");
    }
}
