//! The metrics file of a run, which rank 0's process writes.

use std::io;
use std::path::PathBuf;

use crate::config::{Config, ConfigError};
use zeropp_core::metrics::{JsonLines, StepMetrics, Summary};

use crate::Error;

/// A metrics file. A disk that is full does not end a run; it is told at the end.
pub(crate) struct MetricsFile {
    path: PathBuf,
    lines: Result<JsonLines, io::Error>,
}

impl MetricsFile {
    /// Opens the file that `config` names, if it names one: from its start, or, where `done` steps
    /// are behind the run, after the last of them.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn open(config: &Config, done: Option<u64>) -> Result<Option<MetricsFile>, Error> {
        let Some(path) = config.metrics.clone() else { return Ok(None) };
        match JsonLines::open(&path, done) {
            Ok(lines) => Ok(Some(MetricsFile { path, lines: Ok(lines) })),
            Err(e) => {
                let problem = format!("cannot be written ({e})");
                let help = "choose a file in a folder you may write to";
                Err(ConfigError::value("metrics", path.display(), problem, help).into())
            }
        }
    }

    /// Writes a step; after the first one that could not be written, nothing.
    pub(crate) fn write(&mut self, step: &StepMetrics) {
        if let Ok(lines) = &mut self.lines
            && let Err(error) = lines.write(step)
        {
            self.lines = Err(error);
        }
    }

    /// Ends a run that has come to its end.
    ///
    /// # Errors
    /// [`Error::Metrics`], with the run's summary, where a step is missing in the file.
    pub(crate) fn close(self, summary: &Summary) -> Result<(), Error> {
        let (path, summary) = (self.path, Box::new(summary.clone()));
        self.lines.map(drop).map_err(|source| Error::Metrics { path, source, summary })
    }
}
