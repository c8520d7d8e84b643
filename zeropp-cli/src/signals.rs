//! Signals of the system that would end any command without a word.

/// From now on a write beyond the largest size of a file (`ulimit -f`) is an error like any other,
/// told where it is written, and does not end the process by SIGXFSZ. And memory that was mapped
/// from a file which was cut since ends it with a message, and records of its ranks (ADR 79).
#[cfg(unix)]
pub(crate) fn prepare() {
    use std::sync::Arc;
    // Where it cannot be caught, it ends the process as it did.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    bus::catch();
}

#[cfg(not(unix))]
pub(crate) fn prepare() {}

#[cfg(unix)]
mod bus {
    use std::io::Write;

    /// Catches SIGBUS.
    pub(super) fn catch() {
        // SAFETY: what the handler calls allocates nothing, takes no lock that code which touches
        // mapped memory may hold, and does not come back.
        let _ = unsafe {
            signal_hook::low_level::register(signal_hook::consts::SIGBUS, || {
                zeropp::end_on_lost_file(say)
            })
        };
    }

    /// Writes to standard error, without allocating anything.
    fn say(text: &str) {
        // What cannot be told cannot be helped.
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
}
