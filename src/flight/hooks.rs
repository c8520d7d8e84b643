//! What ends a process from within or without: panics and signals. Records are written before.

use std::cell::RefCell;
use std::panic::PanicHookInfo;
use std::sync::{Arc, Once, Weak};
use std::time::Instant;

use parking_lot::Mutex;
use zeropp_pipeline::flight::EndKind;

use super::FlightRecorder;

/// The recorders of runs under way.
static ACTIVE: Mutex<Vec<Weak<FlightRecorder>>> = Mutex::new(Vec::new());

thread_local! {
    /// The rank whose thread this is, and its run.
    static RANK: RefCell<Option<(Weak<FlightRecorder>, usize)>> = const { RefCell::new(None) };
}

/// Says that this thread is `rank`'s, in the run of `recorder`.
pub(crate) fn this_thread_is(rank: usize, recorder: &Arc<FlightRecorder>) {
    RANK.set(Some((Arc::downgrade(recorder), rank)));
}

/// Lets panics and signals reach `recorder` as long as it lives.
pub(super) fn register(recorder: &Arc<FlightRecorder>) {
    static HOOK: Once = Once::new();
    let mut active = ACTIVE.lock();
    active.retain(|old| old.strong_count() > 0);
    active.push(Arc::downgrade(recorder));
    drop(active);
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            note_panic(info);
            before(info);
        }));
    });
}

fn active() -> Vec<Arc<FlightRecorder>> {
    ACTIVE.lock().iter().filter_map(Weak::upgrade).collect()
}

fn note_panic(info: &PanicHookInfo) {
    let text = format!("panicked: {}", text_of(info));
    let own = RANK.with_borrow(|own| own.as_ref().and_then(|(run, r)| Some((run.upgrade()?, *r))));
    let rank = own.as_ref().map(|(_, rank)| *rank);
    if let Some((recorder, rank)) = own {
        recorder.end(rank, EndKind::Panic, &text, None);
    }
    for recorder in active() {
        if recorder.dies_of_panics() {
            let others = match rank {
                Some(rank) => (EndKind::AtWork, format!("rank {rank} of this process {text}")),
                None => (EndKind::Panic, format!("a thread of the process {text}")),
            };
            // The message comes from the hook before this one.
            recorder.write_all(others.0, &others.1);
        }
    }
}

fn text_of(info: &PanicHookInfo) -> String {
    let what = info.payload_as_str().unwrap_or("no message");
    match info.location() {
        Some(place) => format!("{what} at {}:{}", place.file(), place.line()),
        None => what.to_string(),
    }
}

/// From now on SIGTERM, SIGINT and SIGHUP make the ranks of this process write what they did last
/// before the process dies of the signal. For programs that have no other plans for these signals;
/// the command `zeropp run` calls it.
///
/// # Errors
/// The system's, where it does not let signals be caught.
#[cfg(unix)]
pub fn end_on_signals() -> std::io::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    use signal_hook::iterator::Signals;

    // What the parent wants ignored (as nohup does) stays so.
    let ignored = ignored_signals();
    let caught = [SIGTERM, SIGINT, SIGHUP].into_iter().filter(|n| ignored >> (n - 1) & 1 == 0);
    let mut signals = Signals::new(caught)?;
    let body = move || {
        // One is enough: the process dies of it.
        if let Some(signal) = signals.forever().next() {
            let until = Instant::now() + super::LINGER;
            let name = zeropp_pipeline::flight::signal_name(signal);
            for recorder in active() {
                let found = recorder.write_all(EndKind::Signal(signal), &format!("got {name}"));
                eprintln!("{name}: {found}");
            }
            active().iter().for_each(|recorder| recorder.await_neighbours(until));
            // Dies here; where that fails, the signal must not be lost either.
            let _ = signal_hook::low_level::emulate_default_handler(signal);
            std::process::exit(128 + signal);
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(body).map(drop)
}

/// The signals that this process ignores, a bit each from signal 1 on; none where the system does
/// not tell.
#[cfg(unix)]
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Signals are left alone here.
///
/// # Errors
/// None.
#[cfg(not(unix))]
pub fn end_on_signals() -> std::io::Result<()> {
    Ok(())
}
