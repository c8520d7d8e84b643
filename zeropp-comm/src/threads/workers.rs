//! The threads that copy and sum, so that the ranks' own threads can compute meanwhile.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::THREADS;
use crate::sync::{Condvar, Mutex, thread};

/// A piece of work. It must not panic: the code that makes one catches panics.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

struct WorkerQueue {
    state: Mutex<JobQueue>,
    bell: Condvar,
}

#[derive(Default)]
struct JobQueue {
    jobs: VecDeque<Job>,
    closed: bool,
}

/// A fixed set of threads that take jobs in the order they were submitted, and sleep in between.
/// They end, after the jobs they still have, when this is dropped.
pub(crate) struct Workers {
    queue: Arc<WorkerQueue>,
    count: usize,
}

impl Workers {
    /// Starts `count` threads, or as many as the system grants.
    pub(super) fn start(count: usize) -> Self {
        let queue = Arc::new(WorkerQueue { state: Mutex::default(), bell: Condvar::new() });
        let started = (0..count).map_while(|i| {
            let queue = queue.clone();
            let thread = thread::Builder::new().name(format!("{THREADS}-{i}"));
            thread.spawn(move || queue.work()).ok()
        });
        let count = started.count();
        Self { queue, count }
    }

    /// Number of threads; with none, callers do their work themselves.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Hands `job` to the next free thread; runs it here where there are none.
    pub(crate) fn submit(&self, job: Job) {
        if self.count == 0 {
            return job();
        }
        self.queue.state.lock().jobs.push_back(job);
        self.queue.bell.notify_one();
    }
}

impl Drop for Workers {
    // The threads are not joined: the last owner of the world may be a job on one of them.
    fn drop(&mut self) {
        self.queue.state.lock().closed = true;
        self.queue.bell.notify_all();
    }
}

impl WorkerQueue {
    fn work(&self) {
        while let Some(job) = self.next() {
            job();
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.closed {
                return None;
            }
            self.bell.wait(&mut state);
        }
    }
}
