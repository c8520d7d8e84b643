//! `zeropp run`.

use std::path::Path;

use zeropp::config::{ConfigError, EngineKind, Resume};
use zeropp::{Resumed, StepMetrics, Stopped, Trainer};
use zeropp_core::metrics::JsonLines;

use crate::args::Run;
use crate::figures::say;
use crate::progress::Progress;
use crate::{Failure, emulate, plan, summary};

/// Trains, or shows what would be trained.
pub(crate) fn run(run: Run) -> Result<(), Failure> {
    let config = run.config;
    config.validate().map_err(Failure::bad_input)?;
    if run.print_config {
        let text = config.resolved().to_toml().map_err(Failure::bad_input)?;
        say(text.trim_end());
        return Ok(());
    }
    if let Some(costs) = config.emulate.as_ref().filter(|_| !run.dry_run) {
        return emulate::run(&config, costs);
    }
    let trainer = Trainer::new(config.clone())?;
    if run.dry_run {
        if !is_follower(&config)? {
            say(plan::text(&config, trainer.plan()));
        }
        return Ok(());
    }
    let cannot = |e| Failure::failed_run(format!("signals cannot be caught ({e})"));
    zeropp::stop_on_signals(&trainer).map_err(cannot)?;
    if is_follower(&config)? {
        return ended(trainer.train(|_| ())?.stopped);
    }
    trainer.check_device()?;
    train(&config, &trainer, run.quiet)
}

fn train(config: &zeropp::Config, trainer: &Trainer, quiet: bool) -> Result<(), Failure> {
    // Until here nothing is printed: what is wrong with a checkpoint, its reading shows.
    let mut steps = trainer.steps()?;
    let done = steps.resumed().map(|resumed| resumed.step);
    match steps.resumed() {
        Some(resumed) => say(going_on(resumed, config.steps)),
        None if config.resume != Resume::No => say(beginning(config)),
        None => {}
    }
    if done == Some(config.steps) {
        return Ok(steps.finish().map(drop)?);
    }
    let mut metrics = Metrics::open(config, done)?;
    say(plan::headline(config, trainer.plan()));
    // mpirun gives every rank a terminal, wherever its own output goes.
    let in_place = config.engine != EngineKind::Mpi;
    let mut progress = Progress::new(config.steps, done.unwrap_or(0), in_place, quiet);
    let mut failed = None;
    for step in &mut steps {
        match step {
            Ok(step) => {
                metrics.write(&step);
                progress.step(&step);
            }
            Err(error) => failed = Some(error),
        }
    }
    progress.finish();
    if let Some(error) = failed {
        return Err(error.into());
    }
    let summary = steps.finish()?;
    // Of several processes this one knows its own cores only.
    let own = std::thread::available_parallelism().map_or(1, usize::from);
    let cores = if config.engine == EngineKind::Threads { own } else { usize::MAX };
    say(format_args!("\n{}", summary::text(&summary, config.mesh().world(), cores)));
    if let Some(path) = &summary.checkpoint {
        say(format_args!("\ncheckpoint {}", path.display()));
    }
    if let Some(stopped) = &summary.stopped {
        say(how_to_go_on(config, stopped, std::env::args().skip(1)));
    }
    metrics.close()?;
    ended(summary.stopped)
}

/// The exit of a run that may have been stopped.
fn ended(stopped: Option<Stopped>) -> Result<(), Failure> {
    match stopped.and_then(|stopped| stopped.signal) {
        Some(signal) => Err(Failure::stopped_by(signal)),
        None => Ok(()),
    }
}

/// What a run says that was told to resume and has nothing to go on from.
fn beginning(config: &zeropp::Config) -> String {
    let folder = config.save.as_deref().unwrap_or(Path::new(""));
    format!("nothing was saved in {} yet: beginning with step 1", folder.display())
}

/// What a stopped run says last: the same command, told to resume.
fn how_to_go_on(
    config: &zeropp::Config,
    stopped: &Stopped,
    words: impl Iterator<Item = String>,
) -> String {
    let (step, steps) = (stopped.step, config.steps);
    if config.save.is_none() {
        return format!(
            "stopped after step {step} of {steps}; nothing is saved (save names a folder)"
        );
    }
    let is_resume = |word: &String| word == "--resume" || word.starts_with("--resume=");
    let words = words.filter(|word| !is_resume(word)).map(|word| quoted(&word));
    let line: Vec<String> = words.chain(["--resume".into()]).collect();
    format!("stopped after step {step} of {steps}; to go on: zeropp {}", line.join(" "))
}

/// A word as a shell reads it back.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// Whether this process is one of several and another one shows the run.
fn is_follower(config: &zeropp::Config) -> Result<bool, Failure> {
    Ok(!config.job()?.has_rank_0())
}

/// What a resumed run goes on from, and what is not as it was.
fn going_on(resumed: &Resumed, steps: u64) -> String {
    let Resumed { path, step, changed } = resumed;
    let mut text = format!("resuming from {}: {step} of {steps} steps are done", path.display());
    if *step == steps {
        text.push_str("; nothing is left to do (a larger --steps goes on)");
    }
    if !changed.is_empty() {
        text.push_str(&format!("; changed: {}", changed.join(", ")));
    }
    text
}

/// The metrics file, if one is wanted. A full disk does not end a run; it is told at the end.
struct Metrics {
    file: Option<JsonLines>,
    path: String,
    error: Option<std::io::Error>,
}

impl Metrics {
    fn open(config: &zeropp::Config, done: Option<u64>) -> Result<Metrics, Failure> {
        let Some(path) = &config.metrics else {
            return Ok(Metrics { file: None, path: String::new(), error: None });
        };
        let shown = path.display().to_string();
        let file = JsonLines::open(path, done).map_err(|e| {
            let problem = format!("cannot be written ({e})");
            let help = "choose a file in a folder you may write to";
            Failure::bad_input(ConfigError::value("metrics", &shown, problem, help))
        })?;
        Ok(Metrics { file: Some(file), path: shown, error: None })
    }

    fn write(&mut self, step: &StepMetrics) {
        let Some(file) = &mut self.file else { return };
        if let Err(error) = file.write(step) {
            self.file = None;
            self.error = Some(error);
        }
    }

    fn close(self) -> Result<(), Failure> {
        match self.error {
            None => Ok(()),
            Some(e) => Err(Failure::failed_run(format!(
                "the run is done, but metrics = {} could not be written to its end ({e})",
                self.path
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_run_prints_its_own_command() {
        let stopped = Stopped { step: 7, signal: Some(15) };
        let words = ["run", "my run.toml", "--resume=must", "--save", "a", "--data", "it's"];
        let line = |save: Option<&str>| {
            let config = zeropp::Config { save: save.map(Into::into), ..Default::default() };
            how_to_go_on(&config, &stopped, words.iter().map(ToString::to_string))
        };
        assert_eq!(
            line(Some("a")),
            "stopped after step 7 of 40; to go on: zeropp run 'my run.toml' --save a --data \
             'it'\\''s' --resume"
        );
        assert!(line(None).contains("nothing is saved"));
    }
}
