//! The metrics file: one JSON object a line. The first says what the run is, and has a key `run`
//! alone; then there is a line a step. A run that goes on from a checkpoint adds a line for itself.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{RunHeader, StepMetrics};
use crate::files::open_kept;

/// Writes `--metrics`. Every number reads back to the same bits (the shortest decimal that does);
/// a loss or norm that is not finite is written as null, since JSON has no name for it.
pub struct JsonLines(BufWriter<Box<dyn Write + Send>>);

impl JsonLines {
    /// Opens `path` to write to: from the start, or, where the run goes on from a checkpoint, after
    /// the last step that the checkpoint has behind it. What an interrupted run wrote of later
    /// steps is removed, since they come again.
    ///
    /// # Errors
    /// The file cannot be opened, read or cut.
    pub fn file(path: &Path, resumed: Option<u64>) -> io::Result<File> {
        open_kept(path, |file| match resumed {
            Some(step) => bytes_up_to(BufReader::new(file), step),
            None => Ok(0),
        })
    }

    /// Writes to `out`.
    pub fn to(out: impl Write + Send + 'static) -> JsonLines {
        JsonLines(BufWriter::new(Box::new(out)))
    }

    /// Writes what the run is, before its first step.
    ///
    /// # Errors
    /// The line cannot be written.
    pub fn write_header(&mut self, run: &RunHeader) -> io::Result<()> {
        #[derive(Serialize)]
        struct JsonLine<'a> {
            run: &'a RunHeader,
        }
        self.line(&JsonLine { run })
    }

    /// Writes one step and hands it to the operating system, so that a run can be watched and
    /// nothing is lost when it ends early.
    ///
    /// # Errors
    /// The line cannot be written.
    pub fn write(&mut self, step: &StepMetrics) -> io::Result<()> {
        self.line(step)
    }

    fn line(&mut self, value: &impl Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut self.0, value)?;
        self.0.write_all(b"\n")?;
        self.0.flush()
    }
}

/// Length of the lines before the first one of a later step, of a run that went on from here or
/// later, or that has no end.
fn bytes_up_to(mut lines: impl BufRead, step: u64) -> io::Result<u64> {
    #[derive(Deserialize)]
    struct ResumedRun {
        resumed_step: Option<u64>,
    }
    #[derive(Deserialize)]
    struct JsonLine {
        step: Option<u64>,
        run: Option<ResumedRun>,
    }
    let is_later = |line: JsonLine| {
        let resumed = line.run.and_then(|run| run.resumed_step);
        line.step.is_some_and(|n| n > step) || resumed.is_some_and(|n| n >= step)
    };
    let (mut kept, mut line) = (0, Vec::new());
    while lines.read_until(b'\n', &mut line)? > 0 {
        let later = serde_json::from_slice(&line).is_ok_and(is_later);
        if later || !line.ends_with(b"\n") {
            break;
        }
        kept += line.len() as u64;
        line.clear();
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn opened(path: &Path, resumed: Option<u64>) -> JsonLines {
        JsonLines::to(JsonLines::file(path, resumed).unwrap())
    }

    fn lines(path: &Path) -> Vec<String> {
        std::fs::read_to_string(path).unwrap().lines().map(str::to_string).collect()
    }

    /// The text of a number in a line, as any reader of JSON finds it.
    fn field(line: &str, key: &str) -> String {
        let start = line.find(&format!("\"{key}\":")).expect("the key is there") + key.len() + 3;
        line[start..].split([',', '}']).next().unwrap().to_string()
    }

    #[test]
    fn a_line_has_the_documented_keys() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        let mut file = opened(&path, None);
        file.write(&StepMetrics { step: 1, ..StepMetrics::default() }).unwrap();
        let value: serde_json::Value = serde_json::from_str(&lines(&path)[0]).unwrap();
        let keys = |v: &serde_json::Value| -> Vec<String> {
            v.as_object().unwrap().keys().cloned().collect()
        };
        let mut expected = vec![
            "step",
            "wall_time",
            "loss",
            "grad_norm",
            "lr",
            "tokens",
            "tokens_per_s",
            "step_s",
            "flops_util",
            "bubble",
            "bubble_own_span",
            "bubble_step",
            "all_gathers",
            "reduce_scatters",
            "all_reduces",
            "at_once_bytes",
            "comm_bytes",
            "early_bytes",
            "idle_bytes",
            "peak_bytes",
        ];
        expected.sort();
        let mut found = keys(&value);
        found.sort();
        assert_eq!(found, expected);
        let masked = StepMetrics { scored_tokens: Some(7), ..StepMetrics::default() };
        let value_of_masked = serde_json::to_value(&masked).unwrap();
        assert_eq!(value_of_masked["scored_tokens"], 7, "where not all tokens are scored");
        let mut kinds = keys(&value["peak_bytes"]);
        kinds.sort();
        assert_eq!(
            kinds,
            [
                "activation",
                "communication",
                "gathered",
                "gradient",
                "gradient_shard",
                "optimizer",
                "packed_weights",
                "parameter_shard",
                "rollback",
                "save",
                "weight_stash",
            ]
        );
    }

    #[test]
    fn a_run_starts_anew_and_a_resumed_one_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        let write = |resumed, step| {
            let mut file = opened(&path, resumed);
            file.write(&StepMetrics { step, ..StepMetrics::default() }).unwrap();
            lines(&path).iter().map(|l| field(l, "step")).collect::<Vec<_>>()
        };
        assert_eq!(write(Some(0), 1), ["1"]);
        assert_eq!(write(Some(1), 2), ["1", "2"]);
        assert_eq!(write(Some(2), 3), ["1", "2", "3"]);
        // Killed in the middle of a line, after step 2 was saved.
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, &text[..text.len() - 9]).unwrap();
        assert_eq!(write(Some(2), 3), ["1", "2", "3"]);
        assert_eq!(write(Some(1), 2), ["1", "2"]);
        assert_eq!(write(None, 7), ["7"]);
    }

    #[test]
    fn a_file_begins_with_its_run_and_has_one_line_for_each_that_went_on() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        let write = |resumed_step, steps: &[u64]| {
            let settings = [("pp".to_string(), "2".to_string())].into();
            let header = RunHeader { resumed_step, settings, ..RunHeader::default() };
            let mut file = opened(&path, resumed_step);
            file.write_header(&header).unwrap();
            for step in steps {
                file.write(&StepMetrics { step: *step, ..StepMetrics::default() }).unwrap();
            }
            let reported = |line: &String| match line.starts_with("{\"run\":") {
                true => "run".to_string(),
                false => field(line, "step"),
            };
            lines(&path).iter().map(reported).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(write(None, &[1, 2, 3]), "run 1 2 3");
        assert_eq!(write(Some(2), &[]), "run 1 2 run");
        assert_eq!(write(Some(2), &[3, 4]), "run 1 2 run 3 4", "one for all that began there");
        assert_eq!(write(Some(3), &[4]), "run 1 2 run 3 run 4");
        assert_eq!(write(Some(1), &[2]), "run 1 run 2");
        assert_eq!(write(None, &[1]), "run 1");
        let first: serde_json::Value = serde_json::from_str(&lines(&path)[0]).unwrap();
        let back: RunHeader = serde_json::from_value(first["run"].clone()).unwrap();
        assert_eq!((back.settings["pp"].as_str(), back.resumed_step), ("2", None));
    }

    #[test]
    fn non_finite_numbers_are_written_as_null() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        let step = StepMetrics { loss: f64::NAN, grad_norm: f64::INFINITY, ..Default::default() };
        opened(&path, None).write(&step).unwrap();
        let line = &lines(&path)[0];
        assert_eq!((field(line, "loss"), field(line, "grad_norm")), ("null".into(), "null".into()));
        let back: StepMetrics = serde_json::from_str(line).unwrap();
        assert!(back.loss.is_nan() && back.grad_norm.is_nan());
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 128,
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn loss_and_norm_read_back_to_the_same_bits(loss: f64, norm: f32) {
            let step = StepMetrics { loss, grad_norm: norm.into(), ..Default::default() };
            let line = serde_json::to_string(&step).unwrap();
            let bits = |key| field(&line, key).parse::<f64>().unwrap().to_bits();
            prop_assert_eq!(bits("loss"), loss.to_bits());
            prop_assert_eq!(bits("grad_norm"), f64::from(norm).to_bits());
        }
    }
}
