//! Panics, which may end a process: records are written before.

use std::cell::RefCell;
use std::panic::PanicHookInfo;
use std::sync::{Arc, Once, Weak};

use parking_lot::Mutex;
use zeropp_failures::EndKind;

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

/// The recorders of runs under way.
pub(crate) fn active() -> Vec<Arc<FlightRecorder>> {
    ACTIVE.lock().iter().filter_map(Weak::upgrade).collect()
}

fn note_panic(info: &PanicHookInfo) {
    let text = format!("panicked: {}", text_of(info));
    let own = RANK.with_borrow(|own| own.as_ref().and_then(|(run, r)| Some((run.upgrade()?, *r))));
    let rank = own.as_ref().map(|(_, rank)| *rank);
    if let Some((recorder, rank)) = own {
        recorder.end(rank, EndKind::Panic, &text);
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
