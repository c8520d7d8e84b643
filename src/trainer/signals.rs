//! The meaning of signals to the command: to stop well, to save, to say what the ranks are doing.

use std::io;
#[cfg(unix)]
use std::time::{Duration, Instant};

#[cfg(unix)]
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU};
#[cfg(unix)]
use tracing::{info, warn};
#[cfg(unix)]
use zeropp_core::threads::start;
#[cfg(unix)]
use zeropp_failures::{EndKind, signal_name};

#[cfg(unix)]
use crate::recorder;
#[cfg(unix)]
use crate::run::stop::Stopper;
use crate::trainer::Trainer;

/// Signals this close together are one wish: a terminal and a launcher both pass it on.
#[cfg(unix)]
const TOGETHER: Duration = Duration::from_millis(50);
/// How long a run may go on after SIGTERM before its records are written, in case it is killed.
#[cfg(unix)]
const TIME_TO_OBEY: Duration = Duration::from_millis(200);

/// From now on, in the runs of `trainer`: SIGINT, SIGTERM, SIGHUP, SIGUSR2 and SIGXCPU (a limit on
/// CPU time that is reached) stop all ranks after the step under way, saved if the run saves, and a
/// second one ends the process at once, as the first does before the first step; but for SIGXCPU,
/// which the system sends every second. SIGUSR1 saves and goes on. SIGQUIT makes the ranks of this
/// process write what they did last and ends it. Any process of a run may get them. For programs
/// that have no other plans for these signals; the command `zeropp run` calls it.
///
/// # Errors
/// The system's, where it does not let signals be caught.
#[cfg(unix)]
pub fn stop_on_signals(trainer: &Trainer) -> io::Result<()> {
    let wanted = [SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGXCPU];
    let mut signals = signal_hook::iterator::Signals::new(not_ignored(&wanted))?;
    let (stopper, saves) = (trainer.stopper(), trainer.saves());
    let body = move || {
        let mut stopping: Option<Instant> = None;
        for signal in signals.forever() {
            match signal {
                SIGUSR1 => save(&stopper, saves),
                SIGQUIT => die_recorded(signal),
                _ => match stopping {
                    Some(at) if at.elapsed() < TOGETHER => {}
                    Some(_) if signal == SIGXCPU => {}
                    // A stop of an earlier run of the program does not hold for this one.
                    _ if stopper.is_running() && !stopper.is_signalled() => {
                        stopping = Some(Instant::now());
                        stop(&stopper, signal, saves);
                    }
                    _ => die(signal),
                },
            }
        }
    };
    start("signals", body).map(drop)
}

/// Signals are left alone here.
///
/// # Errors
/// None.
#[cfg(not(unix))]
pub fn stop_on_signals(_trainer: &Trainer) -> io::Result<()> {
    Ok(())
}

#[cfg(unix)]
fn save(stopper: &Stopper, saves: bool) {
    match (saves, stopper.is_running()) {
        (false, _) => {
            warn!("SIGUSR1: nothing is saved, because the run has no folder for checkpoints (save)")
        }
        (true, true) => {
            info!("SIGUSR1: saving after this step");
            stopper.save();
        }
        (true, false) => warn!("SIGUSR1: no step is under way, so there is nothing to save"),
    }
}

#[cfg(unix)]
fn stop(stopper: &Stopper, signal: i32, saves: bool) {
    stopper.stop_for(signal);
    let what = if saves { "saving and stopping" } else { "stopping" };
    info!("{}: {what} after this step; send it again to end at once", signal_name(signal));
    // Launchers send it, and soon SIGKILL, to those that are left of a broken run.
    if signal == SIGTERM {
        let stopper = stopper.clone();
        let record = move || {
            std::thread::sleep(TIME_TO_OBEY);
            if stopper.is_running() {
                for recorder in recorder::active() {
                    recorder.write_provisionally(signal, "got SIGTERM, and was still at work");
                }
            }
        };
        // Without a thread there is no record, which is no reason not to stop.
        let _ = start("flight", record);
    }
}

/// Ends the process as the signal would; no record is left of what the user wished.
#[cfg(unix)]
fn die(signal: i32) -> ! {
    recorder::active().iter().for_each(|recorder| recorder.withdraw());
    let _ = signal_hook::low_level::emulate_default_handler(signal);
    // Where that fails, the signal must not be lost either.
    std::process::exit(128 + signal)
}

#[cfg(unix)]
fn die_recorded(signal: i32) -> ! {
    let until = Instant::now() + recorder::LINGER;
    let name = signal_name(signal);
    for recorder in recorder::active() {
        let found = recorder.write_all(EndKind::Signal(signal), &format!("got {name}"));
        info!("{name}: {}", found.unwrap_or_default());
    }
    recorder::active().iter().for_each(|recorder| recorder.await_neighbours(until));
    // Not of the signal, which would leave all of the memory in a file.
    std::process::exit(128 + signal)
}

/// Those of the `wanted` signals that this process does not ignore. What its parent wants ignored,
/// as nohup does, is ignored by those that it starts, too, as long as no handler is set.
#[cfg(unix)]
pub fn not_ignored(wanted: &[i32]) -> Vec<i32> {
    let ignored = ignored_signals();
    wanted.iter().copied().filter(|n| ignored >> (n - 1) & 1 == 0).collect()
}

/// The signals that this process ignores, a bit each from signal 1 on; none where the system does
/// not tell.
#[cfg(unix)]
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
