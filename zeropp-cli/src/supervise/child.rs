//! The processes of a supervised command: a group of their own, so that all of it can be ended.

use std::io;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::progress::Watched;

/// How long processes that are told to end may take.
const END_TIME: Duration = Duration::from_secs(3);
/// How long a hung command may take to write what its ranks were at.
const RECORD_TIME: Duration = Duration::from_secs(2);
/// What a command ends with that was given wrong input.
const BAD_INPUT: i32 = 2;

/// How a command ended, with its exit code: 128 and the number of the signal that killed it.
pub(super) enum Ended {
    Well,
    /// It was told to, by a signal.
    Stopped(u8),
    /// It was, to be started again with replicas that are there again.
    CalledBack,
    /// It would end like this again.
    BadInput(u8),
    Failed(u8),
}

/// A command under way.
pub(super) struct Child {
    child: std::process::Child,
}

impl Child {
    /// Starts the command, and tells it the folder for copies in memory where there is one.
    ///
    /// # Errors
    /// It cannot be started, in words.
    pub(super) fn start(line: &[String], copies: Option<&Path>) -> Result<Child, String> {
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).stdin(Stdio::null());
        command.envs(copies.map(|folder| (super::COPIES_VARIABLE, folder)));
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let child = command.spawn();
        Ok(Child { child: child.map_err(|e| format!("{}: cannot be started ({e})", line[0]))? })
    }

    /// Waits until the command ends. Passes signals on, ends it where it hangs, and stops it where
    /// `lacks` replicas are said to be there again.
    pub(super) fn follow(
        &mut self,
        signals: &Receiver<i32>,
        (watched, hang): (&Watched, Option<Duration>),
        (lacks, period): (bool, Duration),
    ) -> Ended {
        let (mut stopped, mut called, mut hung) = (false, false, false);
        let (mut sign, mut since) = (watched.sign(), Instant::now());
        loop {
            match self.child.try_wait() {
                Ok(None) => {}
                Ok(Some(status)) if called && !stopped && !hung && !status.success() => {
                    return Ended::CalledBack;
                }
                Ok(Some(status)) => return ended(status, stopped, hung),
                Err(_) => return Ended::Failed(1),
            }
            match signals.recv_timeout(period) {
                Ok(signal) if calls_back(signal) => {
                    if lacks && !called {
                        called = true;
                        super::tell("replicas are there again: the run stops after this step");
                        self.send("TERM");
                    }
                }
                Ok(signal) => {
                    stopped |= stops(signal);
                    self.send(&signal.to_string());
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(period),
            }
            let Some(limit) = hang else { continue };
            // Looking is cheap, and still need not be done all the time.
            if since.elapsed() < limit {
                continue;
            }
            let now = watched.sign();
            if now != sign {
                (sign, since) = (now, Instant::now());
            } else if !hung {
                hung = true;
                super::tell(&format!("no progress for {} s: it is ended", limit.as_secs()));
                self.send("QUIT");
                std::thread::sleep(RECORD_TIME);
                self.send("KILL");
            }
        }
    }

    /// Ends the processes that the command has left behind.
    pub(super) fn end_rest(&self) {
        if !self.send("0") {
            return;
        }
        self.send("TERM");
        let begin = Instant::now();
        while begin.elapsed() < END_TIME {
            std::thread::sleep(Duration::from_millis(50));
            if !self.send("0") {
                return;
            }
        }
        self.send("KILL");
    }

    /// Sends a signal to all processes of the command; false where there are none. Signal 0 only
    /// looks.
    fn send(&self, signal: &str) -> bool {
        // The shell's own `kill` knows groups everywhere.
        let text = format!("kill -s {signal} -- -{}", self.child.id());
        let mut shell = Command::new("sh");
        shell.args(["-c", &text]).stdin(Stdio::null()).stderr(Stdio::null());
        shell.status().is_ok_and(|status| status.success())
    }
}

fn ended(status: ExitStatus, stopped: bool, hung: bool) -> Ended {
    #[cfg(unix)]
    let killed = std::os::unix::process::ExitStatusExt::signal(&status).map(|n| 128 + n);
    #[cfg(not(unix))]
    let killed = None;
    let number = status.code().or(killed).unwrap_or(1);
    let code = u8::try_from(number).unwrap_or(1);
    match status.code() {
        Some(0) => Ended::Well,
        _ if hung => Ended::Failed(code),
        _ if stopped => Ended::Stopped(code),
        Some(BAD_INPUT) => Ended::BadInput(code),
        _ => Ended::Failed(code),
    }
}

/// A code as people know it.
pub(super) fn in_words(code: u8) -> String {
    // mpirun has codes of its own beyond the signals.
    match code.checked_sub(128).filter(|n| (1..=64).contains(n)) {
        Some(signal) => format!("signal {signal}"),
        None => format!("code {code}"),
    }
}

/// Whether a signal is to end the run, as opposed to have it save or start with more replicas.
#[cfg(unix)]
pub(super) fn stops(signal: i32) -> bool {
    signal != signal_hook::consts::SIGUSR1 && !calls_back(signal)
}

/// Whether a signal says that replicas are there again.
#[cfg(unix)]
fn calls_back(signal: i32) -> bool {
    signal == signal_hook::consts::SIGUSR2
}

#[cfg(not(unix))]
fn calls_back(_: i32) -> bool {
    false
}

#[cfg(not(unix))]
pub(super) fn stops(_: i32) -> bool {
    true
}

/// The signals that this process gets, from now on.
///
/// # Errors
/// They cannot be caught.
#[cfg(unix)]
pub(super) fn signals() -> io::Result<Receiver<i32>> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
    let wanted = [SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2];
    let mut signals = signal_hook::iterator::Signals::new(wanted)?;
    let (tx, rx) = std::sync::mpsc::channel();
    let body = move || signals.forever().try_for_each(|signal| tx.send(signal));
    std::thread::Builder::new().name("signals".into()).spawn(body)?;
    Ok(rx)
}

/// None: signals are left alone here.
///
/// # Errors
/// None.
#[cfg(not(unix))]
pub(super) fn signals() -> io::Result<Receiver<i32>> {
    Ok(std::sync::mpsc::channel().1)
}

#[cfg(test)]
mod tests {
    use super::in_words;

    #[test]
    fn codes_beyond_the_signals_are_codes() {
        let codes = [1, 128, 137, 192, 205];
        let words = ["code 1", "code 128", "signal 9", "signal 64", "code 205"];
        assert_eq!(codes.map(in_words), words);
    }
}
