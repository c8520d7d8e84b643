//! Stopping a run from outside of its ranks: by the program, or by a signal to any of its
//! processes.
//!
//! A request is only noted here. The ranks exchange it with the records of each step, so all of
//! them end after the same one, saved where there is a folder.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

pub(crate) use zeropp_checkpoint::step_end::StopRequest;

/// Stops the run of a [`Trainer`](crate::Trainer), from any thread; clones are of the same run.
#[derive(Clone, Debug, Default)]
pub struct Stopper(Arc<StopFlags>);

#[derive(Debug, Default)]
struct StopFlags {
    /// Steps are under way: a request will be read.
    running: AtomicBool,
    stop: AtomicBool,
    /// The signal that asked for it, or 0.
    signal: AtomicI32,
    save: AtomicBool,
}

impl Stopper {
    /// All ranks end after the step under way, or the next one. A run that saves is saved there.
    pub fn stop(&self) {
        self.0.stop.store(true, Ordering::SeqCst);
    }

    /// A run that saves is saved after the step under way, or the next one, and goes on.
    pub fn save(&self) {
        self.0.save.store(true, Ordering::SeqCst);
    }

    /// Whether steps are under way, so that a request is read at the end of one.
    pub(crate) fn is_running(&self) -> bool {
        self.0.running.load(Ordering::SeqCst)
    }

    /// Stops for a signal.
    pub(crate) fn stop_for(&self, signal: i32) {
        self.0.signal.store(signal, Ordering::SeqCst);
        self.stop();
    }

    /// Whether a signal has asked this run to end.
    pub(crate) fn is_signalled(&self) -> bool {
        self.0.signal.load(Ordering::SeqCst) != 0
    }

    /// This process's request. A save is requested once: the first rank that reads it passes it on.
    pub(crate) fn receive(&self) -> StopRequest {
        let save = self.0.save.swap(false, Ordering::SeqCst);
        if self.0.stop.load(Ordering::SeqCst) {
            let signal = self.0.signal.load(Ordering::SeqCst);
            return StopRequest::Stop(u8::try_from(signal).unwrap_or(0));
        }
        if save { StopRequest::Save } else { StopRequest::GoOn }
    }

    /// The first step is about to begin.
    pub(crate) fn begin(&self) {
        self.0.running.store(true, Ordering::SeqCst);
    }

    /// The run is over: what was wished of it does not hold for another one.
    pub(crate) fn end(&self) {
        self.0.running.store(false, Ordering::SeqCst);
        self.0.stop.store(false, Ordering::SeqCst);
        self.0.signal.store(0, Ordering::SeqCst);
        self.0.save.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_to_save_is_passed_on_once_and_all_are_forgotten_with_the_run() {
        let stopper = Stopper::default();
        assert_eq!(stopper.receive(), StopRequest::GoOn);
        stopper.clone().save();
        assert_eq!(
            (stopper.receive(), stopper.receive()),
            (StopRequest::Save, StopRequest::GoOn),
            "once"
        );
        stopper.save();
        stopper.stop_for(15);
        assert_eq!(
            (stopper.receive(), stopper.receive()),
            (StopRequest::Stop(15), StopRequest::Stop(15))
        );
        stopper.end();
        assert_eq!(stopper.receive(), StopRequest::GoOn);
    }
}
