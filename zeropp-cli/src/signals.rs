//! Signals of the system that would end any command without a word.

/// From now on a write beyond the largest size of a file (`ulimit -f`) is an error like any other,
/// reported where it is written, and does not end the process by SIGXFSZ. And memory that was
/// mapped from a file which was cut since ends it with a message, and records of its ranks (ADR
/// 17).
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

    /// Catches SIGBUS. Rust's own handler is put aside, not called first: it would bring back the
    /// system's default, and a second thread that touches the lost file would end the process
    /// before the records are written.
    pub(super) fn catch() {
        // SAFETY: an all-zero `sigaction` is a valid one, whose fields are set below. The handler
        // allocates nothing, takes no lock that code which touches mapped memory may hold, and
        // does not come back. It runs on the stack for signals that Rust gives each thread.
        // Where it cannot be set, the signal ends the process as before.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as extern "C" fn(libc::c_int) as libc::sighandler_t;
            action.sa_flags = libc::SA_ONSTACK;
            libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
        }
    }

    extern "C" fn handle(_signal: libc::c_int) {
        zeropp::end_on_lost_file(say)
    }

    /// Writes to standard error, without allocating anything.
    fn say(text: &str) {
        // What cannot be written cannot be helped.
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
}
