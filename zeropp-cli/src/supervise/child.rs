//! The processes of a supervised command: a group of their own, so that all of it can be ended.

use std::io;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use zeropp_comm::launch::end_with_this_process;
use zeropp_comm::patience::{Deadline, Moment};

use super::progress::{ProgressFiles, ProgressWatch};

/// How long processes that are asked to end may take.
const END_TIME: Duration = Duration::from_secs(3);
/// How long a hung command may take to write what its ranks were at.
const RECORD_TIME: Duration = Duration::from_secs(2);
/// Longest time between two looks whether a command goes on.
const LOOK_PERIOD_MAX: Duration = Duration::from_secs(1);
/// Exit code of a command that was given wrong input.
const BAD_INPUT: i32 = 2;

/// How a command ended, with its exit code: 128 and the number of the signal that killed it.
pub(super) enum Ended {
    Well,
    /// It was asked to, by a signal.
    Stopped(u8),
    /// It was, to be started again with replicas that are there again.
    CalledBack,
    /// It would end like this again.
    BadInput(u8),
    Failed(u8),
}

/// How long a command has not gone on.
struct Hang {
    limit: Duration,
    /// When it had last gone on, as far as was seen.
    since: Moment,
    looked: Moment,
}

impl Hang {
    fn new(limit: Duration, now: Moment) -> Hang {
        Hang { limit, since: now, looked: now }
    }

    /// Whether it hangs `now`; `has_gone_on` looks whether it has since the last look, which takes
    /// time and is not done more often than the limit asks for.
    fn is_one(&mut self, now: Moment, has_gone_on: impl FnOnce() -> bool) -> bool {
        if now - self.looked < LOOK_PERIOD_MAX.min(self.limit / 10) {
            return false;
        }
        self.looked = now;
        if has_gone_on() {
            self.since = now;
        }
        now - self.since >= self.limit
    }
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
        // No one would look after it any more, and another supervisor could not begin.
        end_with_this_process(&mut command);
        let child = command.spawn();
        Ok(Child { child: child.map_err(|e| format!("{}: cannot be started ({e})", line[0]))? })
    }

    /// Waits until the command ends. Passes signals on, ends it where it hangs, and stops it where
    /// `lacks` replicas are said to be there again.
    pub(super) fn follow(
        &mut self,
        signals: &Receiver<i32>,
        watched: &ProgressFiles,
        hang: Option<Duration>,
        lacks: bool,
        period: Duration,
    ) -> Ended {
        let (mut stopped, mut called, mut hung) = (false, false, false);
        let mut look = ProgressWatch::new(watched);
        let mut hang = hang.map(|limit| Hang::new(limit, Moment::now()));
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
            let Some(hang) = hang.as_mut().filter(|_| !hung) else { continue };
            hung = hang.is_one(Moment::now(), || look.has_gone_on());
            if hung {
                super::tell(&format!("no progress for {} s: it is ended", hang.limit.as_secs()));
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
        let end = Deadline::after(END_TIME);
        while !end.is_over() {
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

/// Answer to the signals that came while no command ran.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SignalAnswer {
    Nothing,
    /// Replicas that the next command `lacks` are there again.
    CallBack,
    /// The one that stops.
    Stop(i32),
}

/// Takes the signals that wait.
pub(super) fn waiting(signals: &Receiver<i32>, lacks: bool) -> SignalAnswer {
    let all: Vec<i32> = signals.try_iter().collect();
    match all.iter().copied().find(|signal| stops(*signal)) {
        Some(signal) => SignalAnswer::Stop(signal),
        None if lacks && all.into_iter().any(calls_back) => SignalAnswer::CallBack,
        None => SignalAnswer::Nothing,
    }
}

/// The signals that this process gets, from now on.
///
/// # Errors
/// They cannot be caught.
#[cfg(unix)]
pub(super) fn signals() -> io::Result<Receiver<i32>> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
    let wanted = [SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2];
    // What nohup wants ignored stays so, for the command too: a handler would undo it there.
    let heeded = zeropp::not_ignored(&wanted);
    // But for the signal that a command which hangs has to write its records at. Shells have what
    // they start in the background ignore it, which the command would then do as well.
    let caught = heeded.iter().copied().chain([SIGQUIT]);
    let mut signals = signal_hook::iterator::Signals::new(caught)?;
    let (tx, rx) = std::sync::mpsc::channel();
    let body = move || {
        let mut passed_on = signals.forever().filter(|signal| heeded.contains(signal));
        passed_on.try_for_each(|signal| tx.send(signal))
    };
    zeropp_core::threads::start("signals", body)?;
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
    use super::*;

    #[test]
    fn a_hang_is_seen_two_looks_late_at_most() {
        for (limit, steps_end) in [(2, 1.7), (60, 47.3), (3600, 3000.2)] {
            let begin = Moment::now();
            let mut hang = Hang::new(Duration::from_secs(limit), begin);
            // A step every fifth of a second; the command is looked at as often as in a run.
            let (mut at, mut seen) = (0.0, 0.0);
            let found = loop {
                at += 0.02;
                let done = (f64::min(at, steps_end) * 5.0).floor() / 5.0;
                let now = begin + Duration::from_secs_f64(at);
                if hang.is_one(now, || std::mem::replace(&mut seen, done) != done) {
                    break at;
                }
            };
            let late = found - (steps_end + limit as f64);
            let allowed = 2.0 * f64::min(1.0, limit as f64 / 10.0);
            assert!((-0.2..allowed).contains(&late), "{limit} s: {late} s late");
        }
    }

    #[test]
    #[cfg(unix)]
    fn signals_that_wait_for_a_command_do_not_reach_it() {
        use signal_hook::consts::{SIGTERM, SIGUSR1, SIGUSR2};
        let of = |sent: &[i32], lacks| {
            let (tx, rx) = std::sync::mpsc::channel();
            sent.iter().for_each(|signal| tx.send(*signal).unwrap());
            let found = waiting(&rx, lacks);
            assert!(rx.try_recv().is_err(), "all are taken");
            found
        };
        assert_eq!(of(&[], true), SignalAnswer::Nothing);
        assert_eq!(of(&[SIGUSR1, SIGUSR1], true), SignalAnswer::Nothing);
        assert_eq!(of(&[SIGUSR1, SIGUSR2], false), SignalAnswer::Nothing);
        assert_eq!(of(&[SIGUSR1, SIGUSR2], true), SignalAnswer::CallBack);
        assert_eq!(of(&[SIGUSR2, SIGTERM, SIGUSR1], true), SignalAnswer::Stop(SIGTERM));
    }

    #[test]
    fn codes_beyond_the_signals_are_codes() {
        let codes = [1, 128, 137, 192, 205];
        let words = ["code 1", "code 128", "signal 9", "signal 64", "code 205"];
        assert_eq!(codes.map(in_words), words);
    }
}
