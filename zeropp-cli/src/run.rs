//! `zeropp run`.

use std::fmt::Display;
use std::path::Path;

use zeropp::config::{ConfigError, EngineKind, Resume};
use zeropp::{Config, Resumed, Stopped, Summary, Trainer};
use zeropp_core::metrics::JsonLines;

use crate::args::Run;
use crate::choose::Wish;
use crate::figures::{say, speak_on_stderr};
use crate::log::Voice;
use crate::progress::Progress;
use crate::shell::quoted;
use crate::{Failure, emulate, pages, plan, summary};

/// Stands for standard output in place of the metrics file.
const STANDARD_OUTPUT: &str = "-";

/// Trains, or shows what would be trained; with the layout of a plan, where that is wished.
pub(crate) fn run(run: Run, wish: Option<Wish>, voice: Voice) -> Result<(), Failure> {
    let mut config = run.config;
    let asked = config.metrics.take_if(|path| *path == Path::new(STANDARD_OUTPUT));
    config.validate().map_err(Failure::bad_input)?;
    if run.print_config {
        config.metrics = asked.or(config.metrics);
        say(settings(&config).map_err(Failure::bad_input)?.trim_end());
        return Ok(());
    }
    // Nothing but metrics then goes there.
    let on_stdout = asked.filter(|_| !run.dry_run).map(|_| {
        speak_on_stderr();
        JsonLines::to(std::io::stdout())
    });
    if let Some(wish) = wish {
        let (chosen, words) = wish.chosen(&config)?;
        config = chosen;
        config.validate().map_err(Failure::bad_input)?;
        if config.has_rank_0()? {
            say(format_args!("{words}\n"));
        }
    }
    if let Some(costs) = config.emulate.as_ref().filter(|_| !run.dry_run) {
        return emulate::run(&config, costs);
    }
    let trainer = Trainer::new(config.clone())?;
    // A launcher whose processes would each train all by themselves is refused here.
    config.job()?;
    if run.dry_run {
        if config.has_rank_0()? {
            say(plan::text(&config, trainer.plan(), &trainer.memory()));
        }
        return Ok(());
    }
    pages::suit(&config, trainer.plan());
    let cannot = |e| Failure::failed_run(format!("signals cannot be caught ({e})"));
    zeropp::stop_on_signals(&trainer).map_err(cannot)?;
    zeropp::prepare_for_out_of_memory();
    if !config.has_rank_0()? {
        return ended(trainer.train(|_| ())?.stopped);
    }
    train(&config, &trainer, voice, on_stdout)
}

fn train(
    config: &Config,
    trainer: &Trainer,
    voice: Voice,
    mut on_stdout: Option<JsonLines>,
) -> Result<(), Failure> {
    // Until here nothing is printed: what is wrong with a checkpoint, its reading shows.
    let mut steps = trainer.steps()?;
    let done = steps.resumed().map(|resumed| resumed.step);
    // As JSON the same is told by the library's events.
    let say = |text: &dyn Display| {
        if !voice.json {
            say(text)
        }
    };
    match steps.resumed() {
        Some(resumed) => say(&going_on(resumed, config.steps)),
        None if config.resume != Resume::No => say(&beginning(config)),
        None => {}
    }
    if done == Some(config.steps) {
        return Ok(steps.finish().map(drop)?);
    }
    say(&plan::headline(config, trainer.plan(), &trainer.memory()));
    // mpirun gives every rank a terminal, wherever its own output goes.
    let in_place = config.engine != EngineKind::Mpi;
    let mut progress = Progress::new(
        config.steps,
        done.unwrap_or(0),
        in_place && !voice.json,
        !voice.steps || voice.json,
    );
    let mut failed = None;
    for step in &mut steps {
        match step {
            Ok(step) => {
                // A reader that has gone away has seen what it wanted.
                on_stdout.take_if(|lines| lines.write(&step).is_err());
                progress.step(&step);
            }
            Err(error) => failed = Some(error),
        }
    }
    progress.finish();
    let (summary, incomplete) = match failed {
        Some(zeropp::Error::Metrics { path, source, summary }) => {
            let error = zeropp::Error::Metrics { path, source, summary: summary.clone() };
            (*summary, Some(error))
        }
        Some(error) => return Err(error.into()),
        None => (steps.finish()?, None),
    };
    if !voice.json {
        conclude(config, &summary);
    }
    match incomplete {
        Some(error) => Err(error.into()),
        None => ended(summary.stopped),
    }
}

/// Says what came of a run.
fn conclude(config: &Config, summary: &Summary) {
    // Of several processes this one knows its own cores only.
    let own = std::thread::available_parallelism().map_or(1, usize::from);
    let cores = if config.engine == EngineKind::Threads { own } else { usize::MAX };
    say(format_args!("\n{}", summary::text(summary, config.mesh().world(), cores)));
    if let Some(path) = &summary.checkpoint {
        say(format_args!("\ncheckpoint {}", path.display()));
    }
    if let Some(stopped) = &summary.stopped {
        say(how_to_go_on(config, stopped, std::env::args().skip(1)));
    }
}

/// The settings as a file, with what follows from them as comments.
fn settings(config: &Config) -> Result<String, ConfigError> {
    let text = config.to_toml_beside(Some(&config.resolved()))?;
    Ok(format!(
        "# Settings of zeropp run. Those after a # are derived from others; set them to fix them.\n\
         # Relative paths count from this file's folder.\n\n{text}"
    ))
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
