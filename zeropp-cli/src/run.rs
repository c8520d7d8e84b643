//! `zeropp run`.

use std::path::Path;

use zeropp::config::{ConfigError, EngineKind};
use zeropp::{Config, Resumed, StepMetrics, Trainer};
use zeropp_core::metrics::JsonLines;

use crate::args::Run;
use crate::figures::{say, speak_on_stderr};
use crate::progress::Progress;
use crate::{Failure, emulate, plan, summary};

/// Stands for standard output in place of the metrics file.
const STANDARD_OUTPUT: &str = "-";

/// Trains, or shows what would be trained.
pub(crate) fn run(run: Run) -> Result<(), Failure> {
    let mut config = run.config;
    let asked = config.metrics.take_if(|path| *path == Path::new(STANDARD_OUTPUT));
    config.validate().map_err(Failure::bad_input)?;
    if run.print_config {
        config.metrics = asked.or(config.metrics);
        say(settings(&config).map_err(Failure::bad_input)?.trim_end());
        return Ok(());
    }
    // Nothing but metrics then goes there.
    let mut on_stdout = asked.filter(|_| !run.dry_run).map(|_| {
        speak_on_stderr();
        JsonLines::to(std::io::stdout())
    });
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
    say(plan::headline(&config, trainer.plan()));
    // mpirun gives every rank a terminal, wherever its own output goes.
    let in_place = config.engine != EngineKind::Mpi;
    let progress = Progress::new(config.steps, done.unwrap_or(0), in_place);
    let result = trainer.train(|step: &StepMetrics| {
        // A reader that has gone away has seen what it wanted.
        on_stdout.take_if(|lines| lines.write(step).is_err());
        progress.step(step);
    });
    progress.finish();
    let (result, incomplete) = match result {
        Err(zeropp::Error::Metrics { path, source, summary }) => {
            let error = zeropp::Error::Metrics { path, source, summary: summary.clone() };
            (Ok(*summary), Some(error))
        }
        other => (other, None),
    };
    // Of several processes this one knows its own cores only.
    let own = std::thread::available_parallelism().map_or(1, usize::from);
    let cores = if config.engine == EngineKind::Threads { own } else { usize::MAX };
    say(format_args!("\n{}", summary::text(&result?, config.mesh().world(), cores)));
    if let Some(path) = trainer.last_checkpoint() {
        say(format_args!("\ncheckpoint {}", path.display()));
    }
    incomplete.map_or(Ok(()), |error| Err(error.into()))
}

/// The settings as a file, with what follows from them as comments.
fn settings(config: &Config) -> Result<String, ConfigError> {
    let text = config.to_toml_beside(Some(&config.resolved()))?;
    Ok(format!(
        "# Settings of zeropp run. Those behind a # follow from others; give them to fix them.\n\
         # Relative paths count from this file's folder.\n\n{text}"
    ))
}

/// Whether this process is one of several and another one shows the run.
fn is_follower(config: &Config) -> Result<bool, Failure> {
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
