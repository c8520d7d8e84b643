//! `zeropp run`.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use zeropp::config::{ConfigError, DeviceKind, EngineKind, Resume};
use zeropp::launch::RankProcesses;
use zeropp::pipeline::draw::chart::{self, Curve, CurveStyle, Mark, Panel};
use zeropp::pipeline::draw::page::page;
use zeropp::{Config, Evaluation, Resumed, Steps, Stopped, Summary, Trainer};
use zeropp_core::metrics::JsonLines;

use crate::args::Run;
use crate::choose::RunToPlan;
use crate::failure::Failure;
use crate::figures::{say, speak_on_stderr, speaks_on_stderr};
use crate::log::Voice;
use crate::log_file;
use crate::output::write;
use crate::pace::{LinePace, shared_cores};
use crate::progress::Progress;
use crate::samples::SampleTexts;
use crate::shell::{command_line_without, quoted};
use crate::supervise::COPIES_VARIABLE;
use crate::{emulate, find_lr, kernels, large, pages, plan, stdout, summary};

/// Most steps of which a plan draws the learning rate.
const PLANNED_POINTS: u64 = 1000;
/// Stands for standard output in place of the metrics file.
const STANDARD_OUTPUT: &str = "-";

/// From now on SIGUSR1, the request to save, ends nothing: until a step is under way it is ignored.
fn await_saving() {
    #[cfg(unix)]
    for signal in zeropp::not_ignored(&[signal_hook::consts::SIGUSR1]) {
        // What cannot be caught now cannot be later, which is reported then.
        let _ = signal_hook::flag::register(signal, std::sync::Arc::default());
    }
}

/// Trains, or shows what would be trained; with the layout of a plan, where that is wished.
pub(crate) fn run(run: Run, run_to_plan: Option<RunToPlan>, voice: Voice) -> Result<(), Failure> {
    await_saving();
    let mut config = run.config;
    if config.find_lr > 0 && !run.print_config {
        config = find_lr::test_of(config);
    }
    let asked = config.metrics.take_if(|path| *path == Path::new(STANDARD_OUTPUT));
    if config.save.is_some() && config.copies.is_none() {
        config.copies = std::env::var_os(COPIES_VARIABLE).map(PathBuf::from);
    }
    let is_run = !run.dry_run && !run.print_config;
    let valid = |config: &Config| valid(config, is_run);
    valid(&config)?;
    if run.print_config {
        config.metrics = asked.or(config.metrics);
        say(settings(&config).map_err(Failure::bad_input)?.trim_end());
        return Ok(());
    }
    keep_inputs(&config, run.page.as_deref().filter(|_| run.dry_run), run_to_plan.as_ref())?;
    // Nothing but metrics then goes there.
    let on_stdout = asked.filter(|_| !run.dry_run).map(|_| {
        speak_on_stderr();
        JsonLines::to(std::io::stdout())
    });
    if let Some(run_to_plan) = run_to_plan {
        let (chosen, words) = run_to_plan.chosen(&config)?;
        config = chosen;
        valid(&config)?;
        if config.has_rank_0()? {
            say(format_args!("{words}\n"));
        }
    }
    if !run.dry_run && config.has_rank_0()? {
        begin_log(&config)?;
    }
    let _others = match is_run && config.emulate.is_none() {
        true => start_processes(&config)?,
        false => RankProcesses::default(),
    };
    if let (Some(steps), None) = (config.trace_steps, &config.trace) {
        tracing::warn!("trace:steps = {steps}: no trace is written, as `trace` names no file");
    }
    if let Some(costs) = config.emulate.as_ref().filter(|_| !run.dry_run) {
        return emulate::run(&config, costs);
    }
    if config.has_rank_0()? && valid(&config).is_ok() {
        large::announce(config.pp, config.virtual_stages(), config.micro_batches());
    }
    let trainer = match run.dry_run {
        true => Trainer::builder(config.clone()).for_prediction().build()?,
        false => Trainer::new(config.clone())?,
    };
    // A launcher whose processes would each train all by themselves is refused here.
    config.job()?;
    if run.dry_run {
        return show(&config, &trainer, run.page.as_deref());
    }
    pages::suit(&config, trainer.plan());
    let cannot = |e| Failure::failed_run(format!("signals cannot be caught ({e})"));
    zeropp::stop_on_signals(&trainer).map_err(cannot)?;
    zeropp::prepare_for_out_of_memory();
    if !config.has_rank_0()? {
        return ended(trainer.train(|_| ())?.stopped);
    }
    if config.find_lr > 0 {
        say(plan::headline(&config, trainer.plan(), &trainer.memory()));
        return find_lr::run(&config, &trainer, voice);
    }
    train(&config, &trainer, voice, on_stdout)
}

/// The processes of this machine's other ranks, where every rank is to have its own.
fn start_processes(config: &Config) -> Result<RankProcesses, Failure> {
    if config.engine == EngineKind::Nccl {
        config.check_devices()?;
    }
    Ok(config.start_rank_processes()?)
}

/// Checks the settings; what is only shown needs no device.
fn valid(config: &Config, is_run: bool) -> Result<(), Failure> {
    let checked = match is_run {
        true => config.validate(),
        false => config.validate_for_prediction(),
    };
    checked.map_err(Failure::bad_input)
}

/// Shows what a dry run predicts, where rank 0 is to be; writes its page.
fn show(config: &Config, trainer: &Trainer, page: Option<&Path>) -> Result<(), Failure> {
    if config.has_rank_0()? {
        let text = plan::text(config, trainer.plan(), &trainer.memory());
        if let Some(path) = page {
            let command = command_line_without("--dry-run");
            let plan = plan::html(config, trainer.plan(), &trainer.memory(), &command);
            write(path, planned(config, &plan).as_bytes())?;
        }
        say(text);
    }
    Ok(())
}

/// Nothing that the run reads is written by the command, and nothing that the command reads by the
/// run.
fn keep_inputs(
    config: &Config,
    page: Option<&Path>,
    run_to_plan: Option<&RunToPlan>,
) -> Result<(), Failure> {
    let reads: Vec<_> =
        run_to_plan.and_then(RunToPlan::file).map(|file| ("plan", file)).into_iter().collect();
    let mut writes: Vec<_> = page.map(|page| ("dry-run", page)).into_iter().collect();
    if config.find_lr > 0 {
        writes.extend([find_lr::PAGE, find_lr::ROWS].map(|name| ("find-lr", Path::new(name))));
    }
    if reads.is_empty() && writes.is_empty() {
        return Ok(());
    }
    config.check_files(&reads, &writes).map_err(Failure::bad_input)
}

fn train(
    config: &Config,
    trainer: &Trainer,
    voice: Voice,
    mut on_stdout: Option<JsonLines>,
) -> Result<(), Failure> {
    // Until here nothing is printed: what is wrong with a checkpoint, its reading shows.
    let mut steps = trainer.steps()?;
    log_file::begin();
    let (done, no_lower) = (steps.resumed().map(|resumed| resumed.step), steps.no_lower());
    // As JSON the library's events report the same.
    let say = |text: &dyn Display| {
        if !voice.json {
            say(text)
        }
    };
    match steps.resumed() {
        Some(resumed) => say(&going_on(resumed, config.steps, no_lower)),
        None if config.resume != Resume::No => say(&beginning(config)),
        None => {}
    }
    if done == Some(config.steps) || no_lower.is_some() {
        return Ok(steps.finish().map(drop)?);
    }
    if let Some(lines) = &mut on_stdout {
        stdout::note(lines.write_header(&steps.header()));
    }
    say(&plan::headline(config, trainer.plan(), &trainer.memory()));
    // mpirun gives every rank a terminal, wherever its own output goes.
    let in_place = config.engine != EngineKind::Mpi;
    let mut progress = Progress::new(
        LinePace::new(config.steps, config.log_every).on(config),
        config.steps,
        done.unwrap_or(0),
        in_place && !voice.json,
        !voice.steps || voice.json,
    );
    let mut samples = SampleTexts::new(config)?;
    let mut failed = None;
    let mut compiles = config.device == DeviceKind::Cuda && voice.steps;
    if compiles {
        kernels::watch();
    }
    while let Some(step) = steps.next() {
        if std::mem::take(&mut compiles) {
            kernels::end();
        }
        match step {
            Ok(step) => {
                // A reader that has gone away has seen what it wanted.
                on_stdout.take_if(|lines| !stdout::note(lines.write(&step)));
                progress.step(&step);
                show_sample(&mut samples, &progress, step.step, trainer, &mut steps);
            }
            Err(error) => failed = Some(error),
        }
    }
    let mean = progress.finish();
    end(config, voice, mean, failed.map_or_else(|| steps.finish(), Err))
}

/// Says what came of a run, and what could not be written of it.
fn end(
    config: &Config,
    voice: Voice,
    mean: Option<(f64, u64)>,
    end: Result<Summary, zeropp::Error>,
) -> Result<(), Failure> {
    let (summary, incomplete) = match end {
        Err(zeropp::Error::Metrics { path, source, summary }) => {
            let error = zeropp::Error::Metrics { path, source, summary: summary.clone() };
            (*summary, Some(error))
        }
        Err(error) => return Err(error.into()),
        Ok(summary) => (summary, None),
    };
    if !voice.json {
        conclude(config, &summary, mean);
    }
    report_lost_steps(config);
    let stopped = ended(summary.stopped);
    match incomplete {
        // The sender of the signal sees by the code that it was followed.
        Some(error) if stopped.is_err() => tracing::error!("{error}"),
        Some(error) => return Err(error.into()),
        None => {}
    }
    stopped
}

/// Warns of words of the run that were not written: it has trained all the same. Metrics that were
/// to be on standard output are its result, and missing ones an error.
fn report_lost_steps(config: &Config) {
    if let (Some(error), Some(path)) = (log_file::lost(), &config.log_file) {
        tracing::warn!("log-file = {}: is incomplete ({error})", path.display());
    }
    if speaks_on_stderr() {
        return;
    }
    if let Some(error) = stdout::lost() {
        tracing::warn!("standard output cannot be written ({error}): lines are missing there");
    }
}

/// Page of `--dry-run=PAGE.html`: the plan in HTML, and the learning rate of every step.
fn planned(config: &Config, plan: &str) -> String {
    let rate = config.learning_rate();
    // As many steps as a picture shows; a long run's curve is smooth.
    let apart = config.steps.div_ceil(PLANNED_POINTS).max(1);
    let steps = (1..=config.steps).step_by(apart as usize).chain([config.steps]);
    let curve = Curve {
        name: config.decay.to_string(),
        points: steps.map(|step| (step as f64, rate.at(step))).collect(),
        mark: Mark::Line,
        look: CurveStyle::one_of(0, 1),
    };
    let title = format!("Plan of {}", config.run_name());
    let rate = chart::both(&[Panel::over_steps("Learning rate", vec![curve])]);
    page(&title, &format!("{plan}<h2>Learning rate</h2>{rate}"))
}

/// Opens the log file, if there is to be one; it keeps what it has until the run begins. Comes
/// after planning: before, a process of another rank has settings of fewer ranks.
fn begin_log(config: &Config) -> Result<(), Failure> {
    let Some(path) = &config.log_file else { return Ok(()) };
    log_file::open(path, config.resume != Resume::No).map_err(|e| {
        let problem = format!("cannot be written ({e})");
        let help = "choose a file in a folder you may write to";
        Failure::bad_input(ConfigError::value("log-file", path.display(), problem, help))
    })
}

/// Shows a text that the model has written. Where it cannot, the run goes on without.
fn show_sample(
    samples: &mut Option<SampleTexts>,
    progress: &Progress,
    step: u64,
    trainer: &Trainer,
    steps: &mut Steps<'_>,
) {
    match samples.as_ref().map(|samples| samples.after(step, trainer, steps)) {
        Some(Ok(Some(text))) => progress.sample(step, &text),
        Some(Err(failure)) => {
            tracing::warn!("no more text is shown: {}", failure.message);
            *samples = None;
        }
        _ => {}
    }
}

/// Says what came of a run.
fn conclude(config: &Config, summary: &Summary, mean: Option<(f64, u64)>) {
    let text = summary::text(summary, config, shared_cores(config), mean);
    say(format_args!("\n{text}"));
    if let Some(path) = &summary.checkpoint {
        say(format_args!("\ncheckpoint {}", path.display()));
    }
    if let Some((stopped, n)) = summary.stopped.and_then(|s| Some((s, s.no_lower?))) {
        say(ended_early(config.steps, stopped.step, n, summary.best_eval));
    } else if let Some(stopped) = &summary.stopped {
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

/// Last line of a run that ended because its validation loss fell no more.
fn ended_early(steps: u64, step: u64, n: u64, best: Option<(u64, Evaluation)>) -> String {
    // Of those of this run even the lowest may be above one from before.
    let lowest = match best.filter(|(_, best)| best.best) {
        Some((at, best)) => format!("; the lowest was {:.4}, after step {at}", best.loss),
        None => "; the lowest came before this run went on".into(),
    };
    format!("ended after step {step} of {steps}: {}{lowest}", losses_no_lower(n))
}

fn losses_no_lower(n: u64) -> String {
    match n {
        1 => "a validation loss was no lower".into(),
        _ => format!("{n} validation losses in a row were no lower"),
    }
}

/// The exit of a run that may have been stopped.
fn ended(stopped: Option<Stopped>) -> Result<(), Failure> {
    match stopped.and_then(|stopped| stopped.signal) {
        Some(signal) => Err(Failure::stopped_by(signal)),
        None => Ok(()),
    }
}

/// First line of a run that is to resume and has nothing to go on from.
fn beginning(config: &zeropp::Config) -> String {
    let folder = config.save.as_deref().unwrap_or(Path::new(""));
    format!("nothing was saved in {} yet: beginning with step 1", folder.display())
}

/// Last line of a stopped run: the same command, with `--resume`.
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

/// Lines on where a resumed run goes on from, and on settings that are not as they were.
fn going_on(resumed: &Resumed, steps: u64, no_lower: Option<u64>) -> String {
    let Resumed { path, step, changed, kept_unit, .. } = resumed;
    let mut text = format!("resuming from {}: {step} of {steps} steps are done", path.display());
    if *step == steps {
        text.push_str("; nothing is left to do (a larger --steps goes on)");
    } else if let Some(n) = no_lower {
        let why = losses_no_lower(n);
        text += &format!("; nothing is left to do: {why} (a larger eval-every:patience goes on)");
    }
    if !changed.is_empty() {
        text.push_str(&format!("; changed: {}", changed.join(", ")));
    }
    text.extend(kept_unit.iter().map(|cost| format!("; {cost}")));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_run_prints_its_own_command() {
        let stopped = Stopped { step: 7, signal: Some(15), no_lower: None };
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
