//! An update that is done beside the next step, and the parameters that it is to give.

use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use burn::tensor::{Device, Tensor};
use parking_lot::{Condvar, Mutex};
use zeropp_comm::CommResult;

use crate::state_file::failed;

/// What an update has left to do.
pub(crate) trait Work: Send {
    /// The stage that is updated next, among the rank's.
    fn stage(&self) -> Option<usize>;
    /// Begins to read what is updated next.
    fn read_ahead(&mut self);
    /// Updates some of that stage, and begins to read what comes next where its stage `may` be.
    fn step(&mut self, may: &dyn Fn(usize) -> bool);
    /// Waits for what goes out.
    fn settle(&self);
}

/// Where an update gives a layer's parameters.
pub(crate) type Giver = Arc<OnceLock<Tensor<1>>>;

/// Parameters that are there when their update is done.
#[derive(Clone)]
pub(crate) struct Due {
    given: Giver,
    pub(crate) words: usize,
    pub(crate) device: Device,
    /// The layer's stage among the rank's.
    stage: usize,
    update: Arc<UnderWay>,
}

/// The update. Stages are updated in the order of their first gathers, each no earlier than the one
/// before is asked for: what else is copied then has room beside it.
#[derive(Default)]
pub(crate) struct UnderWay {
    /// What is left, where no thread does it: it is done when it is asked for.
    work: Mutex<Option<Box<dyn Work>>>,
    /// The last stage that may be updated by now.
    allowed: Mutex<usize>,
    moved: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Due {
    pub(crate) fn new(
        words: usize,
        device: Device,
        stage: usize,
        update: &Arc<UnderWay>,
    ) -> (Due, Giver) {
        let given = Giver::default();
        (Due { given: given.clone(), words, device, stage, update: update.clone() }, given)
    }

    pub(crate) fn wait(&self) -> &Tensor<1> {
        self.update.reach(self.stage);
        self.given.wait()
    }

    pub(crate) fn into_tensor(self) -> Tensor<1> {
        self.wait();
        Arc::try_unwrap(self.given)
            .map_or_else(|given| given.wait().clone(), |given| given.into_inner().expect("there"))
    }
}

impl UnderWay {
    /// Begins `work`, on a thread of its own or by those who ask for it.
    ///
    /// # Errors
    /// A thread that is refused.
    pub(crate) fn start(
        self: &Arc<Self>,
        mut work: Box<dyn Work>,
        by_thread: bool,
    ) -> CommResult<()> {
        if !by_thread {
            work.read_ahead();
            *self.work.lock() = Some(work);
            return Ok(());
        }
        let update = self.clone();
        let run = move || {
            while let Some(stage) = work.stage() {
                update.wait_for(stage);
                work.step(&|stage| stage <= *update.allowed.lock());
            }
            work.settle();
        };
        let thread = std::thread::Builder::new().name("update".into()).spawn(run);
        *self.thread.lock() = Some(thread.map_err(|e| failed(&e))?);
        Ok(())
    }

    /// Lets the stage after this one be updated, too.
    pub(crate) fn let_on(&self, stage: usize) {
        let mut allowed = self.allowed.lock();
        *allowed = stage.saturating_add(1).max(*allowed);
        self.moved.notify_all();
    }

    fn wait_for(&self, stage: usize) {
        let mut allowed = self.allowed.lock();
        self.moved.wait_while(&mut allowed, |allowed| *allowed < stage);
    }

    /// A stage is asked for: it is updated where no thread does that.
    fn reach(&self, stage: usize) {
        self.let_on(stage);
        if let Some(work) = &mut *self.work.lock() {
            while work.stage().is_some_and(|next| next <= stage) {
                work.step(&|_| true);
            }
        }
    }

    /// Waits for what has gone out, where no thread does it and all is updated.
    pub(crate) fn settle(&self) {
        if let Some(work) = &*self.work.lock()
            && work.stage().is_none()
        {
            work.settle();
        }
    }

    /// Returns once all is done.
    pub(crate) fn finish(&self) {
        self.reach(usize::MAX);
        if let Some(work) = self.work.lock().take() {
            work.settle();
        }
        if let Some(thread) = self.thread.lock().take() {
            // What one that has panicked leaves says so.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_stage_is_updated_once_the_one_before_is_asked_for() {
        let update = Arc::new(UnderWay::default());
        let (sender, begun) = channel();
        let paced = update.clone();
        let thread = std::thread::spawn(move || {
            for stage in 0..4 {
                paced.wait_for(stage);
                sender.send(stage).unwrap();
            }
        });
        let next = || begun.recv_timeout(Duration::from_millis(20)).ok();
        assert_eq!((begun.recv().ok(), next()), (Some(0), None));
        update.reach(0);
        assert_eq!((begun.recv().ok(), next()), (Some(1), None));
        update.finish();
        assert_eq!((begun.recv().ok(), begun.recv().ok()), (Some(2), Some(3)));
        thread.join().unwrap();
    }
}
