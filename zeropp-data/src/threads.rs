//! Starting threads, which a system may refuse: a limit on processes (`ulimit -u`, a cgroup's
//! `pids.max`), or no room for a stack. What it refuses for a moment is asked for again.

use std::io::{self, ErrorKind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle, sleep};
use std::time::Duration;

/// The first pause before a thread is asked for again; each is twice the one before.
const PAUSE: Duration = Duration::from_millis(2);
/// The last pause: half a second in all.
const PAUSE_MAX: Duration = Duration::from_millis(256);

/// Help where threads are refused.
pub const REFUSED_HELP: &str = "raise ulimit -u or -v, or the cgroup's pids.max";

type Job = Box<dyn FnOnce() + Send>;

/// Starts a thread of this name, with the system's usual stack.
///
/// # Errors
/// The system refuses it, for half a second on end.
pub fn start<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    start_as(|| Builder::new().name(name.into()), body)
}

/// Starts a thread that `builder` describes.
///
/// # Errors
/// As [`start`].
pub fn start_as<T: Send + 'static>(
    builder: impl Fn() -> Builder,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let body = Arc::new(Mutex::new(Some(body)));
    asked_again(|| {
        let body = body.clone();
        builder().spawn(move || taken(&body)())
    })
}

/// Starts a thread of this name in a scope.
///
/// # Errors
/// As [`start`].
pub fn start_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    body: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    let body = Arc::new(Mutex::new(Some(body)));
    asked_again(|| {
        let body = body.clone();
        Builder::new().name(name.into()).spawn_scoped(scope, move || taken(&body)())
    })
}

/// The body of a thread that has started: no other thread has it.
fn taken<F>(body: &Mutex<Option<F>>) -> F {
    let body = body.lock().unwrap_or_else(PoisonError::into_inner).take();
    body.expect("one thread is started")
}

fn asked_again<H>(mut spawn: impl FnMut() -> io::Result<H>) -> io::Result<H> {
    let mut pause = PAUSE;
    loop {
        match spawn() {
            Err(e) if e.kind() == ErrorKind::WouldBlock && pause <= PAUSE_MAX => {
                sleep(pause);
                pause *= 2;
            }
            started => return started,
        }
    }
}

/// A thread that does one piece of work after another. It ends with the last that it was given
/// before this was dropped.
#[derive(Debug)]
pub struct BackgroundThread(Sender<Job>);

impl BackgroundThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// As [`start`].
    pub fn start(name: &str) -> io::Result<BackgroundThread> {
        let (jobs, given) = channel::<Job>();
        start(name, move || given.into_iter().for_each(|job| job()))?;
        Ok(BackgroundThread(jobs))
    }

    /// Has the thread do `job` after what it was given before. Where one of those has panicked, no
    /// thread is left, and the job is dropped.
    pub fn give(&self, job: impl FnOnce() + Send + 'static) {
        let _ = self.0.send(Box::new(job));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn momentary_refusals_are_retried() {
        for (refusals, starts) in [(0, true), (1, true), (7, true), (99, false)] {
            let mut asked = 0;
            let started = asked_again(|| {
                asked += 1;
                if asked > refusals { Ok(()) } else { Err(ErrorKind::WouldBlock.into()) }
            });
            assert_eq!((started.is_ok(), asked), (starts, (refusals + 1).min(9)), "{refusals}");
        }
        let mut asked = 0;
        let other = asked_again(|| -> io::Result<()> {
            asked += 1;
            Err(ErrorKind::InvalidInput.into())
        });
        assert_eq!((other.is_err(), asked), (true, 1), "another error stays one");
    }

    #[test]
    fn a_worker_does_its_jobs_in_order_and_ends() {
        let (tx, rx) = channel();
        let worker = BackgroundThread::start("worker").unwrap();
        for i in 0..100 {
            let tx = tx.clone();
            worker.give(move || tx.send(i).unwrap());
        }
        drop((worker, tx));
        assert!(rx.into_iter().eq(0..100));
    }

    #[test]
    fn threads_of_a_scope_may_borrow() {
        let text = String::from("kept");
        let len = std::thread::scope(|scope| {
            start_scoped(scope, "borrows", || text.len()).unwrap().join().unwrap()
        });
        assert_eq!((len, start("owns", move || text).unwrap().join().unwrap()), (4, "kept".into()));
    }
}
