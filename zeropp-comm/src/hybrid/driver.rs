//! The thread that carries collectives between processes on while the ranks compute.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, TryRecvError};
use zeropp_core::threads::{REFUSED_HELP, start as start_thread};

use super::engine::HybridProcess;
use super::in_progress::HybridInProgress;
use crate::{CommError, CommResult, THREADS};

/// Looks without a pause after something has happened, then a pause each.
const EAGER_LOOKS: u32 = 20;
/// Pause between looks while an operation is under way.
const BUSY_PAUSE: Duration = Duration::from_micros(50);
/// Pause between looks for a failure while there is none.
const WATCH_PAUSE: Duration = Duration::from_millis(50);

/// Starts the thread. It ends once no sender is left.
///
/// # Errors
/// The system grants no thread.
pub(super) fn start(
    arriving: Receiver<Arc<HybridInProgress>>,
    engine: Weak<HybridProcess>,
) -> CommResult<()> {
    let body = move || run(&arriving, &engine);
    let refused = |e| CommError::Unavailable {
        engine: "mixed".into(),
        reason: format!("no thread can be started ({e}); {REFUSED_HELP}"),
    };
    start_thread(&format!("{THREADS}-mixed"), body).map(drop).map_err(refused)
}

fn run(arriving: &Receiver<Arc<HybridInProgress>>, engine: &Weak<HybridProcess>) {
    let mut all_in_progress: Vec<Arc<HybridInProgress>> = Vec::new();
    let mut idle = 0;
    loop {
        let known = all_in_progress.len();
        loop {
            match arriving.try_recv() {
                Ok(in_progress) => all_in_progress.push(in_progress),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        let mut moved = all_in_progress.len() > known;
        all_in_progress.retain(|in_progress| {
            moved |= in_progress.poll();
            !in_progress.is_over()
        });
        idle = if moved { 0 } else { idle + 1 };
        if !all_in_progress.is_empty() && idle <= EAGER_LOOKS {
            std::thread::yield_now();
            continue;
        }
        let pause = if all_in_progress.is_empty() { WATCH_PAUSE } else { BUSY_PAUSE };
        match arriving.recv_timeout(pause) {
            Ok(in_progress) => all_in_progress.push(in_progress),
            Err(RecvTimeoutError::Timeout) if all_in_progress.is_empty() => {
                match engine.upgrade() {
                    Some(engine) => engine.watch(),
                    None => return,
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
