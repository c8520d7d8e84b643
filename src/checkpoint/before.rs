//! A run before this one that still saves into the same folder: a job that was asked to end, and is
//! started again at once.

use std::time::Duration;

use tracing::warn;
use zeropp_checkpoint::Holder;
use zeropp_comm::launch::host_name;
use zeropp_comm::patience::Deadline;
use zeropp_core::metrics::wall_time;
use zeropp_zero3::checkpoint::Store;

use crate::Error;
use crate::config::{Config, EngineKind, Resume};

/// Between two looks whether the folder is free.
const LOOK: Duration = Duration::from_millis(100);

/// This process, as who has a folder.
pub(crate) fn this_run() -> Holder {
    Holder { pid: std::process::id(), host: host_name(), since: wall_time() }
}

/// Waits until no other run saves into the folder, if this one goes on from what is there.
///
/// # Errors
/// One still does after the time for starting, or in a run that does not go on.
pub(crate) fn await_end(store: &Store, config: &Config) -> Result<(), Error> {
    let Err(taken) = store.check_free() else { return Ok(()) };
    if config.resume == Resume::No {
        return Err(taken.into());
    }
    // The other processes wait for this one meanwhile, and for as long.
    let part = if config.engine == EngineKind::Threads { 1.0 } else { 0.5 };
    let limit = Duration::from_secs_f64(config.start_timeout_s * part);
    let folder = store.folder().display();
    let who = || store.holder().map_or_else(String::new, |holder| in_words(&holder));
    let (before, limit_s) = (who(), limit.as_secs_f64());
    warn!("save = {folder}: another run is saving there{before}; this one waits up to {limit_s} s");
    let deadline = Deadline::after(limit);
    while !deadline.is_over() {
        if store.check_free().is_ok() {
            return Ok(());
        }
        std::thread::sleep(LOOK);
    }
    let (folder, waited_s) = (store.folder().to_path_buf(), limit.as_secs_f64());
    Err(Error::RunBefore { folder, who: who(), waited_s })
}

fn in_words(holder: &Holder) -> String {
    let Holder { pid, host, since } = holder;
    let s = (wall_time() - since).max(0.0).round();
    format!(" (process {pid} on {host}, for {s} s)")
}
