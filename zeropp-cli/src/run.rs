//! `zeropp run`.

use zeropp::config::{ConfigError, EngineKind};
use zeropp::{Resumed, StepMetrics, Trainer};
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
    if !run.dry_run {
        let cannot = |e| Failure::failed_run(format!("signals cannot be caught ({e})"));
        zeropp::end_on_signals().map_err(cannot)?;
    }
    if !run.dry_run && is_follower(&config)? {
        return Ok(trainer.train(|_| ()).map(drop)?);
    }
    if run.dry_run {
        say(plan::text(&config, trainer.plan()));
        return Ok(());
    }
    trainer.check_device()?;
    let done = trainer.resumed().map(|r| r.step);
    if let Some(resumed) = trainer.resumed() {
        say(going_on(resumed, config.steps));
    }
    if done == Some(config.steps) {
        return Ok(());
    }
    let mut metrics = Metrics::open(&config, done)?;
    say(plan::headline(&config, trainer.plan()));
    // mpirun gives every rank a terminal, wherever its own output goes.
    let in_place = config.engine != EngineKind::Mpi;
    let progress = Progress::new(config.steps, done.unwrap_or(0), in_place);
    let result = trainer.train(|step: &StepMetrics| {
        metrics.write(step);
        progress.step(step);
    });
    progress.finish();
    // Of several processes this one knows its own cores only.
    let own = std::thread::available_parallelism().map_or(1, usize::from);
    let cores = if config.engine == EngineKind::Threads { own } else { usize::MAX };
    say(format_args!("\n{}", summary::text(&result?, config.mesh().world(), cores)));
    if let Some(path) = trainer.last_checkpoint() {
        say(format_args!("\ncheckpoint {}", path.display()));
    }
    metrics.close()
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
