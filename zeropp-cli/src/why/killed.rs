//! What can be known of a run that left no records, since all of it was killed at once: from its
//! checkpoints and its metrics.

use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use zeropp::pipeline::flight::FlightError;
use zeropp::{Saved, saved};
use zeropp_core::files::open_regular;

use crate::Failure;
use crate::figures::{duration, say};

/// Longest end of a file of metrics that is looked at, in bytes: some lines of it.
const METRICS_BYTES: u64 = 64 << 10;

/// The last line of a file of metrics.
struct LastStep {
    step: u64,
    loss: f64,
    /// When it was written.
    at: Option<SystemTime>,
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
        None => say("no rank left a record: if the run is not at work any more, it was killed"),
    }
    if let Some((path, last)) = &metrics {
        let (path, LastStep { step, loss, at }) = (path.display(), last);
        say(format_args!(
            "  - step {step} is the last in {path}, with a loss of {loss}{}",
            ago(*at, now)
        ));
    }
    let is_done = checkpoints.as_ref().is_some_and(|(_, saved)| tell_saved(saved, now));
    if !is_done {
        reasons();
        match &checkpoints {
            Some((_, Saved { newest: Some(_), .. })) => {
                say("to go on from there: the same command with --resume");
            }
            _ => say("nothing was saved to go on from, as far as can be seen here: see --save"),
        }
    }
    Ok(())
}

/// Tells what a folder of checkpoints shows; whether its run had come to its end.
fn tell_saved(saved: &Saved, now: SystemTime) -> bool {
    if let Some(newest) = &saved.newest {
        let of = newest.of.map(|steps| format!(" of {steps}")).unwrap_or_default();
        say(format_args!("  - step {}{of} is saved{}", newest.step, ago(newest.at, now)));
        if newest.of == Some(newest.step) {
            say("  - that was its last step: the run is done");
            return true;
        }
    }
    for name in &saved.half_written {
        say(format_args!("  - {name}: it ended while it was saving"));
    }
    false
}

/// Tells why a run without records is thought to have been killed, and where to look.
fn reasons() {
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
    file.seek(SeekFrom::Start(meta.len().saturating_sub(METRICS_BYTES))).ok()?;
    let mut end = Vec::new();
    file.take(METRICS_BYTES).read_to_end(&mut end).ok()?;
    // A kill may have come in the middle of a line.
    let steps = end.split(|byte| *byte == b'\n').rev().find_map(|line| {
        let line: serde_json::Value = serde_json::from_slice(line).ok()?;
        Some((line.get("step")?.as_u64()?, line.get("loss")?.as_f64()?))
    });
    let (step, loss) = steps?;
    Some(LastStep { step, loss, at: meta.modified().ok() })
}
