//! The metrics file as CSV: a row of names, then a row a step.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;

use serde_json::Value;
use zeropp_core::files::open_kept;
use zeropp_core::metrics::{RunHeader, StepMetrics};

use super::keys::{KEYS, values};
use super::out::Out;
use super::step_writer::StepWriter;

/// The row of names.
fn names() -> String {
    KEYS.iter().map(|key| key.name).collect::<Vec<_>>().join(",")
}

/// A file of rows.
pub(super) struct CsvRows {
    out: Out,
    /// Whether it has the row of names.
    named: bool,
}

impl CsvRows {
    /// Opens `path` from its start, or, for a run that goes on after step `resumed`, after the row
    /// of that step, and says how many bytes it has. What an interrupted run wrote of later steps
    /// is removed.
    ///
    /// # Errors
    /// The file cannot be opened, read or cut, or has other columns.
    pub(super) fn open(path: &Path, resumed: Option<u64>) -> io::Result<(File, u64)> {
        let mut kept = 0;
        let file = open_kept(path, |file| {
            if let Some(step) = resumed {
                kept = Self::kept(file, step)?;
            }
            Ok(kept)
        })?;
        Ok((file, kept))
    }

    /// Bytes of `file` that a run which goes on after `step` keeps.
    ///
    /// # Errors
    /// The file cannot be read, or has other columns.
    pub(super) fn kept(file: &File, step: u64) -> io::Result<u64> {
        bytes_up_to(BufReader::new(file), step, &names())
    }

    /// Writes to `out`, which has the row of names where it is `named`.
    pub(super) fn to(out: Out, named: bool) -> CsvRows {
        CsvRows { out, named }
    }
}

impl StepWriter for CsvRows {
    fn begin(&mut self, _run: &RunHeader) -> io::Result<()> {
        if !self.named {
            writeln!(self.out, "{}", names())?;
        }
        self.out.flush()
    }

    /// Every number reads back to the same bits; what is not finite, and what a step does not have,
    /// is an empty cell.
    fn write(&mut self, step: &StepMetrics) -> io::Result<()> {
        let step = values(step)?;
        let cells: Vec<String> = KEYS.iter().map(|key| cell(key.written(&step))).collect();
        writeln!(self.out, "{}", cells.join(","))?;
        self.out.flush()
    }
}

fn cell(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(value) => value.to_string(),
    }
}

/// Length of the rows up to the last one of `step` or before that is whole, that of `names`
/// included; none where there is none.
fn bytes_up_to(mut rows: impl BufRead, step: u64, names: &str) -> io::Result<u64> {
    let (mut kept, mut row) = (0, String::new());
    while rows.read_line(&mut row)? > 0 {
        let Some(text) = row.strip_suffix('\n') else { break };
        if kept == 0 && text != names {
            let problem = "it has other columns than this version writes";
            return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
        }
        let number = text.split(',').next().and_then(|cell| cell.parse::<u64>().ok());
        if number.is_some_and(|number| number > step) {
            break;
        }
        kept += row.len() as u64;
        row.clear();
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;
    use zeropp_core::meter::MemoryBytes;
    use zeropp_core::metrics::{Evaluation, ExpertMetrics};

    /// A step that has all there is.
    fn full(step: u64) -> StepMetrics {
        let eval = Evaluation {
            bits_per_byte: Some(1.5),
            scored_tokens: Some(1),
            ..Evaluation::default()
        };
        StepMetrics {
            step,
            loss: 0.1 + 0.2,
            scored_tokens: Some(1),
            optimizer_gathers: 1,
            save_blocked_s: 1.0,
            experts: Some(ExpertMetrics::default()),
            eval: Some(eval),
            skipped: true,
            rolled_back: true,
            redone_s: 1.0,
            program: 1,
            peak_bytes: MemoryBytes { host_activation: 1, host_state: 1, ..MemoryBytes::default() },
            ..StepMetrics::default()
        }
    }

    fn opened(path: &Path, resumed: Option<u64>) -> CsvRows {
        let (file, kept) = CsvRows::open(path, resumed).unwrap();
        CsvRows::to(Out::new(file), kept > 0)
    }

    #[test]
    fn every_key_of_a_line_has_a_column() {
        fn keys(before: &str, value: &Value, found: &mut Vec<String>) {
            for (key, value) in value.as_object().unwrap() {
                match value.is_object() {
                    true => keys(&format!("{before}{key}."), value, found),
                    false => found.push(format!("{before}{key}")),
                }
            }
        }
        let mut found = Vec::new();
        keys("", &serde_json::to_value(full(1)).unwrap(), &mut found);
        let mut columns: Vec<String> = KEYS.iter().map(|key| key.name.to_string()).collect();
        columns.sort();
        found.sort();
        assert_eq!(found, columns);
    }

    #[test]
    fn rows_read_back_and_a_resumed_run_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.csv");
        let write = |resumed, steps: &[u64]| {
            let mut rows = opened(&path, resumed);
            rows.begin(&RunHeader::default()).unwrap();
            steps.iter().for_each(|step| rows.write(&full(*step)).unwrap());
            let text = std::fs::read_to_string(&path).unwrap();
            let first = |row: &str| row.split(',').next().unwrap().to_string();
            text.lines().map(first).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(write(None, &[1, 2, 3]), "step 1 2 3");
        assert_eq!(write(Some(2), &[3]), "step 1 2 3");
        assert_eq!(write(Some(0), &[1]), "step 1");
        let mut rows = opened(&path, None);
        rows.begin(&RunHeader::default()).unwrap();
        rows.write(&StepMetrics { loss: f64::NAN, ..full(7) }).unwrap();
        rows.write(&full(8)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let cells: Vec<Vec<&str>> = text.lines().map(|row| row.split(',').collect()).collect();
        assert!(cells.iter().all(|row| row.len() == KEYS.len()));
        assert_eq!((cells[1][2], cells[2][2]), ("", "0.30000000000000004"));
        // Killed in the middle of a row.
        std::fs::write(&path, &text[..text.len() - 4]).unwrap();
        assert_eq!(write(Some(8), &[8]), "step 7 8");
        std::fs::write(&path, "a,b\n1,2\n").unwrap();
        assert!(CsvRows::open(&path, Some(1)).is_err(), "not ours");
    }
}
