//! Notices when the whole process stood still: stopped by a signal, swapped out, or on a machine
//! that slept.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use zeropp_comm::flight::now_ns;
use zeropp_core::threads::start;
use zeropp_failures::Pause;

/// How often the process shows that it is alive.
const BEAT: Duration = Duration::from_millis(200);
/// A beat that comes this late tells of a pause.
const PAUSE_NS: u64 = 1_000_000_000;

/// A thread that looks at the clock; it ends when this is dropped.
pub(super) struct Watch {
    last_ns: Arc<AtomicU64>,
    _stop: Sender<()>,
}

impl Watch {
    /// Starts to watch, and tells `seen` with every beat whether there was a pause before it. None
    /// where the system grants no thread.
    pub(super) fn start(mut seen: impl FnMut(Option<Pause>) + Send + 'static) -> Option<Watch> {
        let last_ns = Arc::new(AtomicU64::new(now_ns()));
        let (stop, stopped) = channel::<()>();
        let last = last_ns.clone();
        let body = move || {
            while stopped.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout) {
                let to_ns = now_ns();
                let from_ns = last.swap(to_ns, Ordering::Relaxed);
                let paused = to_ns.saturating_sub(from_ns) >= PAUSE_NS;
                seen(paused.then_some(Pause { from_ns, to_ns }));
            }
        };
        start("flight", body).ok()?;
        Some(Watch { last_ns, _stop: stop })
    }

    /// The pause that has just ended, where the thread did not get round to tell of it.
    pub(super) fn pausing(&self) -> Option<Pause> {
        let pause = Pause { from_ns: self.last_ns.load(Ordering::Relaxed), to_ns: now_ns() };
        (pause.to_ns.saturating_sub(pause.from_ns) >= PAUSE_NS).then_some(pause)
    }
}
