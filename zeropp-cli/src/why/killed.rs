//! Facts of a run that left no records, since all of it was killed at once: from its
//! checkpoints and its metrics.

use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use zeropp::failures::FlightError;
use zeropp::{SavedRun, saved};
use zeropp_core::files::{escaped_line, open_regular};

use crate::failure::Failure;
use crate::figures::{duration, say};
use crate::why::spread;

/// Longest end of a file of metrics that is looked at, in bytes: some lines of it.
const METRICS_BYTES: u64 = 64 << 10;

/// Longest first line of a file of metrics that is looked at, in bytes.
const FIRST_BYTES: u64 = 64 << 10;

/// The last line of a file of metrics.
struct LastStep {
    step: u64,
    /// None where it was not finite.
    loss: Option<f64>,
    /// How it spread tokens over experts, in words.
    experts: Option<String>,
    /// The steps that the run was to have, where it says so.
    of: Option<u64>,
    /// When it was written.
    at: Option<SystemTime>,
}

/// How a run without records has ended.
enum ExitCause {
    /// With its last step.
    Done,
    /// As it was asked to, or by itself: it has saved what it had done.
    Stopped,
    Killed,
    /// The files do not show it, for this reason.
    Unknown(&'static str),
}

/// Tells what `paths` show of a run of which there are no records, for the reason in `error`.
pub(super) fn explain(paths: &[PathBuf], error: &FlightError) -> Result<(), Failure> {
    let now = SystemTime::now();
    let checkpoints = paths.iter().find_map(|path| Some((path, saved(path).ok()??)));
    let metrics = paths.iter().find_map(|path| Some((path, last_step(path)?)));
    if checkpoints.is_none() && metrics.is_none() {
        return Err(Failure::bad_input(format!(
            "{error}. A run that is killed from outside with SIGKILL, as where memory ran out, \
             leaves none; name its folder of checkpoints or its file of metrics to see how far it \
             came"
        )));
    }
    if let Some((folder, _)) = checkpoints.as_ref().filter(|(_, saved)| saved.in_use) {
        say(format_args!("{}: a run is saving here and has not ended", folder.display()));
        return Ok(());
    }
    match &checkpoints {
        Some((folder, _)) => say(format_args!(
            "{}: no run is at work here, and there are no records beside it",
            folder.display()
        )),
        None => say(
            "no rank left a record: if the run is not at work any more, and has not said that it \
             was stopped, it was killed",
        ),
    }
    if let Some((path, LastStep { step, loss, at, experts, .. })) = &metrics {
        let loss = loss.map_or_else(|| "that is not finite".into(), |loss| format!("of {loss}"));
        say(format_args!(
            "  - step {step} is the last in {}, with a loss {loss}{}",
            path.display(),
            ago(*at, now)
        ));
        if let Some(experts) = experts {
            say(format_args!("  - {experts}"));
        }
    }
    let checkpoints = checkpoints.map(|(_, saved)| saved);
    if let Some(saved) = &checkpoints {
        report_saved(saved, now);
    }
    let newest = checkpoints.as_ref().and_then(|saved| saved.newest.as_ref());
    let end = end_of(checkpoints.as_ref(), metrics.as_ref().map(|(_, last)| last));
    tell(&end);
    match (&end, newest) {
        (ExitCause::Done, _) => {}
        (_, Some(_)) => say("to go on from there: the same command with --resume"),
        (_, None) => {
            say("nothing was saved to go on from, as far as can be seen here: see --save");
        }
    }
    match end {
        ExitCause::Unknown(why) => Err(Failure::failed_run(why)),
        _ => Ok(()),
    }
}

/// How a run has ended that has saved this, and whose metrics have this step last.
fn end_of(saved: Option<&SavedRun>, last: Option<&LastStep>) -> ExitCause {
    let is_done = last.is_some_and(|last| last.of == Some(last.step));
    let Some(saved) = saved else {
        return if is_done { ExitCause::Done } else { ExitCause::Killed };
    };
    match (saved.newest.as_ref(), last.map(|last| last.step)) {
        (Some(newest), _) if newest.of == Some(newest.step) => ExitCause::Done,
        // A run that is stopped waits until all is saved.
        _ if !saved.half_written.is_empty() => ExitCause::Killed,
        (_, None) => ExitCause::Unknown(
            "whether it was stopped or killed cannot be told without its metrics; name its file \
             of metrics beside its folder of checkpoints",
        ),
        (Some(newest), Some(last)) if newest.step == last => ExitCause::Stopped,
        (Some(newest), Some(last)) if newest.step > last => ExitCause::Unknown(
            "whether it was stopped or killed cannot be told from metrics that end before its \
             newest checkpoint; name the file of metrics of its last start",
        ),
        _ => ExitCause::Killed,
    }
}

/// Tells what a folder of checkpoints shows.
fn report_saved(saved: &SavedRun, now: SystemTime) {
    if let Some(newest) = &saved.newest {
        let of = newest.of.map(|steps| format!(" of {steps}")).unwrap_or_default();
        say(format_args!("  - step {}{of} is saved{}", newest.step, ago(newest.at, now)));
    }
    for name in &saved.half_written {
        say(format_args!("  - {name}: it ended while it was saving"));
    }
}

/// Tells how a run without records has ended, what shows it, and where to look.
fn tell(end: &ExitCause) {
    match end {
        ExitCause::Done => return say("  - that was its last step: the run is done"),
        ExitCause::Stopped => {
            return say(
                "  - all of its steps are saved: it was stopped there, as with SIGTERM, or ended \
                 there by itself, as with patience, and was not killed at work; only a kill \
                 between a save and the next step would look the same",
            );
        }
        ExitCause::Unknown(_) => return,
        ExitCause::Killed => {}
    }
    say("  - a run that fails, or is told to stop, says so and leaves records or a last \
         checkpoint: this one was ended from outside with SIGKILL, or crashed");
    say("  - most often memory ran out: see `dmesg | grep -i oom` or `journalctl -k` on its \
         machine, and on Slurm `sacct -o state,exitcode,maxrss`; on Kubernetes the pod's last \
         state");
}

fn ago(at: Option<SystemTime>, now: SystemTime) -> String {
    let ago = at.and_then(|at| now.duration_since(at).ok());
    ago.map(|ago| format!(", {} ago", duration(ago.as_secs_f64()))).unwrap_or_default()
}

/// The last whole line of a file of metrics; none where it is no such file.
fn last_step(path: &Path) -> Option<LastStep> {
    let mut file = open_regular(path).ok()?;
    let meta = file.metadata().ok()?;
    let mut first = Vec::new();
    (&file).take(FIRST_BYTES).read_to_end(&mut first).ok()?;
    let first = first.split(|byte| *byte == b'\n').next().unwrap_or_default();
    file.seek(SeekFrom::Start(meta.len().saturating_sub(METRICS_BYTES))).ok()?;
    let mut end = Vec::new();
    file.take(METRICS_BYTES).read_to_end(&mut end).ok()?;
    // A kill may have come in the middle of a line.
    let whole = end.iter().rposition(|byte| *byte == b'\n')?;
    let lines = || end[..whole].split(|byte| *byte == b'\n').rev();
    let is_csv = first.starts_with(b"step,");
    let steps = lines().map(|line| if is_csv { step_of_row(first, line) } else { step_of(line) });
    let Told { step, loss, experts } = steps.flatten().next()?;
    // Each start says it, and the last one is right.
    let of = lines().find_map(steps_of_run).or_else(|| steps_of_run(first));
    Some(LastStep { step, loss, experts, of, at: meta.modified().ok() })
}

/// What a line tells of its step.
struct Told {
    step: u64,
    loss: Option<f64>,
    /// How it spread tokens over experts, in words.
    experts: Option<String>,
}

/// Of a line of JSON.
fn step_of(line: &[u8]) -> Option<Told> {
    let line: serde_json::Value = serde_json::from_slice(line).ok()?;
    let experts = line.get("experts").and_then(|of| {
        let idle = usize::try_from(of.get("idle")?.as_u64()?).ok()?;
        let layer = escaped_line(of.get("fullest_layer")?.as_str()?).into_owned();
        Some(spread(of.get("fullest")?.as_f64()?, &layer, idle))
    });
    Some(Told { step: line.get("step")?.as_u64()?, loss: line.get("loss")?.as_f64(), experts })
}

/// The steps that a run was to have, of the line that tells of it.
fn steps_of_run(line: &[u8]) -> Option<u64> {
    let line = Some(line).filter(|line| line.starts_with(b"{\"run\""))?;
    let line: serde_json::Value = serde_json::from_slice(line).ok()?;
    line.get("run")?.get("steps")?.as_u64()
}

/// Of a row of CSV below these `names`.
fn step_of_row(names: &[u8], row: &[u8]) -> Option<Told> {
    let (names, row) = (str::from_utf8(names).ok()?, str::from_utf8(row).ok()?);
    let cell = |name: &str| row.split(',').nth(names.split(',').position(|n| n == name)?);
    let number = |name: &str| cell(name)?.parse::<f64>().ok();
    let experts = number("experts.fullest").zip(cell("experts.idle")?.parse().ok());
    let layer = cell("experts.fullest_layer").unwrap_or_default().trim_matches('"');
    let experts = experts.map(|(fullest, idle)| spread(fullest, &escaped_line(layer), idle));
    Some(Told { step: cell("step")?.parse().ok()?, loss: number("loss"), experts })
}
