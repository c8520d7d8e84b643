//! Records of every step that rank 0's process writes while the run goes: metrics in JSON lines or
//! CSV, TensorBoard's event files, and the last step's figures for Prometheus.

mod csv;
mod header;
mod keys;
mod out;
mod prometheus;
mod step_writer;
mod tensorboard;

use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};

use tracing::{info, warn};
use zeropp_core::metrics::{JsonLines, RunHeader, StepMetrics, Summary};

use crate::Error;
use crate::config::{Config, ConfigError};
use csv::CsvRows;
use out::{FileEvent, Out, WAITING_MAX};
use step_writer::StepWriter;
use tensorboard::EventFile;

pub(crate) use header::header;
pub(crate) use prometheus::Prometheus;

/// A file.
struct MetricsFile {
    /// The setting that names it.
    field: &'static str,
    path: PathBuf,
    steps: Box<dyn StepWriter>,
    /// Where they write to.
    out: Out,
}

/// All that is written. A disk that is full does not end a run: it is reported at once, and what it
/// cannot take waits.
#[derive(Default)]
pub(crate) struct Telemetry {
    files: Vec<MetricsFile>,
    prometheus: Option<Prometheus>,
}

impl Telemetry {
    /// Whether [`open`](Self::open) takes what is there already, for a run that goes on after step
    /// `resumed`, where it does; asked before a rank starts. Changes nothing.
    ///
    /// # Errors
    /// A file that is not to be written on.
    pub(crate) fn check(config: &Config, resumed: Option<u64>) -> Result<(), Error> {
        // What a pipe has can be read once.
        let Some(path) = config.metrics.as_ref().filter(|path| path.is_file()) else {
            return Ok(());
        };
        let opened = OpenOptions::new().read(true).append(true).open(path);
        let checked = opened.and_then(|file| match resumed {
            Some(step) if is_csv(path) => CsvRows::kept(&file, step).map(drop),
            _ => Ok(()),
        });
        checked.map_err(|e| refused("metrics", path, &e))
    }

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
        if let Some(path) = &config.metrics {
            let (steps, out) = metrics(path, run).map_err(|e| refused("metrics", path, &e))?;
            files.push(MetricsFile { field: "metrics", path: path.clone(), steps, out });
        }
        if let Some(folder) = &config.tensorboard {
            let (path, file) =
                tensorboard::create(folder, run).map_err(|e| refused("tensorboard", folder, &e))?;
            let out = Out::new(file);
            let steps = Box::new(EventFile::to(out.clone()));
            files.push(MetricsFile { field: "tensorboard", path, steps, out });
        }
        for file in &mut files {
            file.steps.begin(run).map_err(|e| refused(file.field, &file.path, &e))?;
            file.tell();
        }
        Ok(Telemetry { files, prometheus })
    }

    /// Writes a step; what cannot be written is tried again with the next one.
    pub(crate) fn write(&mut self, step: &StepMetrics) {
        for file in &mut self.files {
            if let Err(error) = file.steps.write(step) {
                let (field, path) = (file.field, file.path.display());
                warn!("{field} = {path}: step {} is missing there ({error})", step.step);
            }
            file.tell();
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
        // Each has its last try, whatever becomes of the others.
        let ends = self.files.into_iter().map(|MetricsFile { path, out, .. }| (path, out.end()));
        let ends: Vec<_> = ends.collect();
        ends.into_iter().try_for_each(|(path, end)| {
            let summary = || Box::new(summary.clone());
            end.map_err(|source| Error::Metrics { path, source, summary: summary() })
        })
    }
}

impl MetricsFile {
    /// Tells what has become of the file since the last time.
    fn tell(&self) {
        let (field, path) = (self.field, self.path.display());
        match self.out.news() {
            Some(FileEvent::Waits(error)) => warn!(
                "{field} = {path}: cannot be written ({error}); the run goes on, and its steps \
                 wait in memory until they can be; make room on the disk"
            ),
            Some(FileEvent::Written) => {
                info!("{field} = {path}: is written again, and no step is missing");
            }
            Some(FileEvent::Lost(error)) => warn!(
                "{field} = {path}: more than {} MiB of steps wait that cannot be written \
                 ({error}), so the file gets no more; the run goes on without",
                WAITING_MAX >> 20
            ),
            None => {}
        }
    }
}

fn is_csv(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("csv"))
}

/// The metrics file: CSV where its name says so.
fn metrics(path: &Path, run: &RunHeader) -> io::Result<(Box<dyn StepWriter>, Out)> {
    if is_csv(path) {
        let (file, kept) = CsvRows::open(path, run.resumed_step)?;
        let out = Out::new(file);
        return Ok((Box::new(CsvRows::to(out.clone(), kept > 0)), out));
    }
    let out = Out::new(JsonLines::file(path, run.resumed_step)?);
    Ok((Box::new(JsonLines::to(out.clone())), out))
}

fn refused(field: &str, path: &Path, error: &io::Error) -> Error {
    let problem = format!("cannot be written ({error})");
    let help = "choose a file or folder that you may write to";
    ConfigError::value(field, path.display(), problem, help).into()
}
