//! What rank 0's process writes of every step while the run goes: metrics in JSON lines or CSV,
//! TensorBoard's event files, and the last step's figures for Prometheus.

mod csv;
mod header;
mod prometheus;
mod tensorboard;

use std::io;
use std::path::{Path, PathBuf};

use zeropp_core::metrics::{JsonLines, RunHeader, StepMetrics, Summary};

use crate::Error;
use crate::config::{Config, ConfigError};
use crate::telemetry::csv::CsvRows;
use crate::telemetry::tensorboard::EventFile;

pub(crate) use header::header;
pub(crate) use prometheus::Prometheus;

/// Something that is written step by step.
trait Steps: Send {
    /// Writes what comes before the first step.
    fn begin(&mut self, run: &RunHeader) -> io::Result<()>;

    /// Writes a step and hands it to the operating system.
    fn write(&mut self, step: &StepMetrics) -> io::Result<()>;
}

impl Steps for JsonLines {
    fn begin(&mut self, run: &RunHeader) -> io::Result<()> {
        self.write_header(run)
    }

    fn write(&mut self, step: &StepMetrics) -> io::Result<()> {
        JsonLines::write(self, step)
    }
}

/// A file, until a step could not be written to it.
struct Written {
    path: PathBuf,
    steps: Result<Box<dyn Steps>, io::Error>,
}

/// All that is written. A disk that is full does not end a run; it is told at the end.
#[derive(Default)]
pub(crate) struct Telemetry {
    files: Vec<Written>,
    prometheus: Option<Prometheus>,
}

impl Telemetry {
    /// Opens what `config` names: from its start, or, where `run` goes on from a checkpoint, after
    /// the last step that the checkpoint has behind it. `prometheus` listens already.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub(crate) fn open(
        config: &Config,
        run: &RunHeader,
        prometheus: Option<Prometheus>,
    ) -> Result<Telemetry, Error> {
        let mut files = Vec::new();
        let mut add = |path: PathBuf, mut steps: Box<dyn Steps>| {
            let steps = steps.begin(run).map(|()| steps);
            files.push(Written { path, steps });
        };
        if let Some(path) = &config.metrics {
            let steps = metrics(path, run).map_err(|e| refused("metrics", path, &e))?;
            add(path.clone(), steps);
        }
        if let Some(folder) = &config.tensorboard {
            let (path, events) =
                EventFile::create(folder, run).map_err(|e| refused("tensorboard", folder, &e))?;
            add(path, Box::new(events));
        }
        Ok(Telemetry { files, prometheus })
    }

    /// Writes a step; to a file that one could not be written to, nothing more.
    pub(crate) fn write(&mut self, step: &StepMetrics) {
        for file in &mut self.files {
            if let Ok(steps) = &mut file.steps
                && let Err(error) = steps.write(step)
            {
                file.steps = Err(error);
            }
        }
        if let Some(prometheus) = &self.prometheus {
            prometheus.show(step);
        }
    }

    /// Ends a run that has come to its end.
    ///
    /// # Errors
    /// [`Error::Metrics`], with the run's summary, where a step is missing in a file.
    pub(crate) fn close(self, summary: &Summary) -> Result<(), Error> {
        for Written { path, steps } in self.files {
            let summary = || Box::new(summary.clone());
            steps.map(drop).map_err(|source| Error::Metrics {
                path,
                source,
                summary: summary(),
            })?;
        }
        Ok(())
    }
}

/// The metrics file: CSV where its name says so.
fn metrics(path: &Path, run: &RunHeader) -> io::Result<Box<dyn Steps>> {
    if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("csv")) {
        return Ok(Box::new(CsvRows::open(path, run.resumed_step)?));
    }
    Ok(Box::new(JsonLines::open(path, run.resumed_step)?))
}

fn refused(field: &str, path: &std::path::Path, error: &io::Error) -> Error {
    let problem = format!("cannot be written ({error})");
    let help = "choose a file or folder that you may write to";
    ConfigError::value(field, path.display(), problem, help).into()
}
