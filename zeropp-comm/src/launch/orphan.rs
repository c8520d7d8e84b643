//! Processes that end with the one that has started them.

use std::process::Command;

/// Has the command get SIGTERM, at which a run saves and stops, should the thread that starts it
/// end, as by a kill of this process. On Linux alone.
#[cfg(target_os = "linux")]
pub fn end_with_this_process(command: &mut Command) {
    use std::io;
    use std::os::unix::process::CommandExt;
    let own = std::process::id();
    let ask = move || {
        // SAFETY: a system call about this process, with two numbers.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // One that was killed before that has sent nothing.
        if std::os::unix::process::parent_id() != own {
            return Err(io::ErrorKind::Interrupted.into());
        }
        Ok(())
    };
    // SAFETY: between fork and exec it makes two system calls, and allocates nothing.
    unsafe { command.pre_exec(ask) };
}

/// Nothing: only Linux can.
#[cfg(not(target_os = "linux"))]
pub fn end_with_this_process(_: &mut Command) {}
