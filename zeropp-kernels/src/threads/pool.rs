//! Helper threads that take part in one piece of work at a time.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle};

/// How often a thread looks again before it sleeps, with a pause of the processor in between: some
/// 30 µs, as long as most gaps between two kernels.
const LOOKS: usize = 1000;

/// The work that all threads run at the same time, each until nothing is left to do.
type Work<'a> = dyn Fn() + Sync + 'a;

/// Work that may have ended for all that its type says: [`Pool::run`] sees to it.
#[derive(Clone, Copy)]
struct Erased(*const Work<'static>);

// SAFETY: the work is `Sync`, and every thread that follows the pointer is waited for.
unsafe impl Send for Erased {}

#[derive(Default)]
struct PoolState {
    /// A thread is in [`Pool::run`]: longer than there is work to take part in, as it waits for
    /// helpers that are still at theirs.
    in_use: bool,
    /// The work that threads may take part in.
    work: Option<Erased>,
    /// Helpers that sleep.
    asleep: usize,
    panic: Option<Box<dyn Any + Send>>,
    ended: bool,
}

#[derive(Default)]
struct PoolShared {
    state: Mutex<PoolState>,
    /// Grows with every piece of work, and at the end.
    round: AtomicUsize,
    /// Helpers that take part. Grows under the lock only, while there is work.
    active: AtomicUsize,
    begun: Condvar,
    finished: Condvar,
    /// [`LOOKS`], or none where the threads are more than the cores.
    looks: usize,
    /// How often a thread has looked in vain.
    #[cfg(test)]
    looked: AtomicUsize,
}

impl PoolShared {
    fn lock(&self) -> MutexGuard<'_, PoolState> {
        // Nothing that panics runs under the lock.
        self.state.lock().expect("whole, as nothing panics that holds it")
    }

    /// Waits a little while for `done`.
    fn look_for(&self, done: impl Fn() -> bool) {
        for _ in 0..self.looks {
            if done() {
                return;
            }
            #[cfg(test)]
            self.looked.fetch_add(1, Ordering::Relaxed);
            std::hint::spin_loop();
        }
    }

    /// A helper's life: takes part in the work of each round that it comes to in time.
    fn help(&self) {
        let mut seen = 0;
        loop {
            self.look_for(|| self.round.load(Ordering::Acquire) != seen);
            let mut state = self.lock();
            while self.round.load(Ordering::Acquire) == seen {
                state.asleep += 1;
                state = self.begun.wait(state).expect("as in `lock`");
                state.asleep -= 1;
            }
            if state.ended {
                return;
            }
            seen = self.round.load(Ordering::Acquire);
            let Some(work) = state.work else { continue };
            self.active.fetch_add(1, Ordering::AcqRel);
            drop(state);
            // SAFETY: the work is alive until it is taken back and no helper is active any more;
            // it was there under the lock under which this one became active.
            let result = catch_unwind(AssertUnwindSafe(|| unsafe { (*work.0)() }));
            let mut state = self.lock();
            if let Err(panic) = result {
                state.panic.get_or_insert(panic);
            }
            if self.active.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.finished.notify_all();
            }
        }
    }
}

/// The helpers of one thread.
pub(super) struct Pool {
    shared: Arc<PoolShared>,
    helpers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// Starts `helpers` threads, fewer where the system gives no more. `eager` ones look for work
    /// for a while before they sleep. Each calls `begin` first, with its number from 1.
    pub(super) fn new(
        helpers: usize,
        eager: bool,
        begin: impl Fn(usize) + Send + Sync + 'static,
    ) -> Self {
        let looks = if eager { LOOKS } else { 0 };
        let shared = Arc::new(PoolShared { looks, ..PoolShared::default() });
        let begin = Arc::new(begin);
        let start = |number| {
            let (shared, begin) = (shared.clone(), begin.clone());
            let body = move || {
                begin(number);
                shared.help();
            };
            Builder::new().name("kernels".into()).spawn(body).ok()
        };
        let helpers = (1..=helpers).map_while(start).collect();
        Self { shared, helpers }
    }

    /// Threads that work, the calling one among them.
    pub(super) fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Runs `work` on this thread and, at the same time, on every helper that comes in time.
    ///
    /// Meant for one thread at a time, and not from within `work`.
    ///
    /// # Panics
    /// Panics as the work does, on whichever thread; not before all have left it. Also while
    /// another thread has work here.
    pub(super) fn run(&self, work: &Work<'_>) {
        let shared = &*self.shared;
        let work_here: *const Work<'_> = work;
        // SAFETY: only the lifetime changes; below, the work is taken back, and all helpers that
        // got it have left it, before this function returns or unwinds.
        let erased =
            unsafe { std::mem::transmute::<*const Work<'_>, *const Work<'static>>(work_here) };
        let mut state = shared.lock();
        if state.in_use {
            // Not with the lock: who runs the work there is must be able to wait for its helpers.
            drop(state);
            panic!("these threads are installed on another thread, and at work there");
        }
        state.in_use = true;
        state.work = Some(Erased(erased));
        shared.round.fetch_add(1, Ordering::AcqRel);
        let is_awaited = state.asleep > 0;
        drop(state);
        if is_awaited {
            shared.begun.notify_all();
        }
        let result = catch_unwind(AssertUnwindSafe(work));
        shared.lock().work = None;
        shared.look_for(|| shared.active.load(Ordering::Acquire) == 0);
        let mut state = shared.lock();
        while shared.active.load(Ordering::Acquire) > 0 {
            state = shared.finished.wait(state).expect("as in `lock`");
        }
        let helpers_panic = state.panic.take();
        state.in_use = false;
        drop(state);
        if let Some(panic) = result.err().or(helpers_panic) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.ended = true;
        // Under the lock: a helper that has not seen it yet would sleep past the only call.
        self.shared.round.fetch_add(1, Ordering::AcqRel);
        drop(state);
        self.shared.begun.notify_all();
        for helper in self.helpers.drain(..) {
            // What it might have panicked with was reported by `run`.
            let _ = helper.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::time::{Duration, Instant};

    use super::*;

    /// Also once the first thread has done its own part, and waits for a helper.
    #[test]
    fn a_second_thread_is_refused_until_the_last_helper_is_done() {
        let pool = Pool::new(1, false, |_| ());
        let (together, begun, refused) = (Barrier::new(2), Barrier::new(2), Barrier::new(2));
        let first = std::thread::current().id();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| {
                begun.wait();
                while pool.shared.lock().work.is_some() {
                    std::thread::yield_now();
                }
                let run = AssertUnwindSafe(|| pool.run(&|| ()));
                let result = catch_unwind(run);
                refused.wait();
                let panic = result.unwrap_err();
                assert!(panic.downcast_ref::<&str>().unwrap().contains("another thread"));
            });
            pool.run(&|| {
                together.wait();
                if std::thread::current().id() != first {
                    begun.wait();
                    refused.wait();
                }
            });
            second.join().unwrap();
        });
        pool.run(&|| ());
    }

    #[test]
    fn only_eager_threads_look_for_work_before_they_sleep() {
        for eager in [false, true] {
            let pool = Pool::new(2, eager, |_| ());
            let together = Barrier::new(3);
            for _ in 0..20 {
                pool.run(&|| {
                    together.wait();
                });
            }
            let shared = pool.shared.clone();
            let looked = || shared.looked.load(Ordering::Relaxed);
            let begin = Instant::now();
            while eager && looked() == 0 && begin.elapsed() < Duration::from_secs(20) {
                std::thread::yield_now();
            }
            drop(pool);
            assert_eq!(looked() > 0, eager, "{} looks", looked());
        }
    }
}
