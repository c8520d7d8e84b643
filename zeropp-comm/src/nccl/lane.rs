//! One NCCL communicator of this rank with a queue of the device of its own, and the operations on
//! it: waiting for their buffers, being issued, in_progress.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::accelerator::{Accelerator, DeviceResult, Event, Pinned, RawStream};
use super::engine::{Output, Received, Slot};
use super::library::{Nccl, NcclComm, NcclError, NcclTransfer, UniqueId};
use crate::patience::Moment;

/// An operation that NCCL is to carry out.
pub(super) struct NcclWork {
    /// Number under which its buffers are being pinned: what it reads first, what it writes last.
    pub(super) job: u64,
    pub(super) transfer: NcclTransfer,
    pub(super) count: usize,
    pub(super) label: Label,
    pub(super) slot: Arc<Slot>,
    /// Whether the operation after it is of the same call.
    pub(super) more: bool,
}

impl NcclWork {
    /// Its description in an error.
    fn operation(&self) -> String {
        self.label.operation.clone()
    }
}

/// The description of an operation in an error.
#[derive(Clone, Debug)]
pub(super) struct Label {
    pub(super) operation: String,
    /// Its number in the group's sequence, or the tag of a message.
    pub(super) sequence: u64,
}

/// An operation on the device.
struct DeviceOperation {
    label: Label,
    /// Buffers stay where they are until the device is done with them.
    _pinned: Box<dyn std::any::Any + Send>,
    ready: Event,
    done: Arc<Event>,
    issued: Moment,
    /// When its buffers were seen to be ready: from then on only peers can keep it.
    begun: Option<Moment>,
}

/// An error on a lane.
pub(super) enum LaneError {
    Nccl(NcclError, String),
    Device(String, String),
}

/// An operation that takes too long.
pub(super) struct LateOperation {
    pub(super) label: Label,
    /// Whether it has begun, so that others are to blame.
    pub(super) begun: bool,
}

/// Buffers that are pinned, by the number of their job, until its turn.
pub(super) type PinnedJobs = HashMap<u64, DeviceResult<Pinned>>;

/// A communicator and its queue. Without a communicator it waits for the identity of one.
pub(super) struct NcclQueue {
    accelerator: Arc<dyn Accelerator>,
    stream: RawStream,
    comm: Option<NcclComm>,
    /// Whether the communicator has been ready once.
    started: bool,
    queue: VecDeque<NcclWork>,
    /// The operations of one call that NCCL is still issuing in the background.
    issuing: Vec<(NcclWork, Pinned)>,
    in_progress: VecDeque<DeviceOperation>,
}

impl NcclQueue {
    pub(super) fn new(accelerator: Arc<dyn Accelerator>) -> DeviceResult<NcclQueue> {
        let stream = accelerator.stream()?;
        Ok(NcclQueue {
            accelerator,
            stream,
            comm: None,
            started: false,
            queue: VecDeque::new(),
            issuing: Vec::new(),
            in_progress: VecDeque::new(),
        })
    }

    /// Starts the communicator.
    pub(super) fn start(
        &mut self,
        nccl: &Arc<Nccl>,
        id: UniqueId,
        size: usize,
        rank: usize,
        messages: bool,
    ) -> Result<(), NcclError> {
        self.comm = Some(nccl.start(id, size, rank, messages)?);
        Ok(())
    }

    /// Whether the communicator has been started.
    pub(super) fn has_comm(&self) -> bool {
        self.comm.is_some()
    }

    pub(super) fn push(&mut self, work: NcclWork) {
        self.queue.push_back(work);
    }

    /// Lets the call that the last operation is of end with it.
    pub(super) fn end_of_call(&mut self) {
        self.queue.back_mut().iter_mut().for_each(|work| work.more = false);
    }

    /// Whether NCCL does something in the background that must be polled.
    pub(super) fn is_starting(&self) -> bool {
        self.comm.is_some() && (!self.started || !self.issuing.is_empty())
    }

    /// Whether an operation is on the device.
    pub(super) fn is_flying(&self) -> bool {
        !self.in_progress.is_empty()
    }

    /// Whether nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.issuing.is_empty() && self.in_progress.is_empty()
    }

    /// Sequence number of the first operation that has not begun.
    pub(super) fn first_waiting(&self) -> Option<u64> {
        let in_progress = self.in_progress.iter().filter(|f| f.begun.is_none()).map(|f| &f.label);
        let issuing = self.issuing.iter().map(|(work, _)| &work.label);
        let queued = self.queue.iter().map(|work| &work.label);
        in_progress.chain(issuing).chain(queued).map(|label| label.sequence).next()
    }

    /// Carries forward what has been issued.
    pub(super) fn poll(&mut self) -> Result<(), LaneError> {
        self.finish()?;
        let Some(comm) = &self.comm else { return Ok(()) };
        let busy = !self.started || !self.issuing.is_empty() || !self.in_progress.is_empty();
        if busy && !comm.is_ready().map_err(|e| LaneError::Nccl(e, self.doing()))? {
            return Ok(());
        }
        self.started = true;
        self.fly()
    }

    /// Issues `job`, which is the first that waits here, and what is of the same call, once their
    /// buffers are pinned. Whether NCCL has taken it: until then it must be asked for again.
    pub(super) fn issue(&mut self, job: u64, pinned: &mut PinnedJobs) -> Result<bool, LaneError> {
        if let Some((work, _)) = self.issuing.first() {
            assert_eq!(work.job, job, "turns come one after the other");
            return Ok(false);
        }
        if self.queue.front().is_none_or(|work| work.job != job) {
            // `poll` has seen that NCCL has taken it, or it was of the call before.
            return Ok(true);
        }
        let Some(last) = self.queue.iter().position(|work| !work.more) else { return Ok(false) };
        let all_pinned = self.queue.iter().take(last + 1).all(|w| pinned.contains_key(&w.job));
        if self.comm.is_none() || !self.started || !all_pinned {
            return Ok(false);
        }
        for _ in 0..=last {
            let pins = pinned.remove(&self.queue[0].job).expect("looked at above");
            let pins = pins.map_err(|text| LaneError::Device(text, self.queue[0].operation()))?;
            // From here on it is under way: where something fails, `abort` finds it there.
            self.issuing.push((self.queue.pop_front().expect("looked at above"), pins));
        }
        self.call()?;
        self.fly()?;
        Ok(self.issuing.is_empty())
    }

    /// Issues the operations of a call.
    fn call(&self) -> Result<(), LaneError> {
        let comm = self.comm.as_ref().expect("started");
        for (work, pins) in &self.issuing {
            let waits = self.accelerator.wait(self.stream, pins.ready);
            waits.map_err(|text| LaneError::Device(text, work.operation()))?;
        }
        let of_call = |e| LaneError::Nccl(e, self.issuing[0].0.operation());
        let grouped = self.issuing.len() > 1;
        if grouped {
            comm.begin_group().map_err(of_call)?;
        }
        let issue = |(work, pins): &(NcclWork, Pinned)| {
            let (first, last) = (pins.addresses.first(), pins.addresses.last());
            let (source, target) = (*first.expect("a buffer"), *last.expect("a buffer"));
            // SAFETY: the stream is this lane's, of the device that the communicator was started
            // on. The buffers were made for this transfer, and `pins` keeps them there until the
            // event after the operation.
            unsafe { comm.issue(work.transfer, source, target, work.count, self.stream) }
                .map_err(|e| LaneError::Nccl(e, work.operation()))
        };
        let issued = self.issuing.iter().try_for_each(issue);
        if grouped {
            // Also after an error: else NCCL would wait for more.
            let ended = comm.end_group().map_err(of_call);
            return issued.and(ended);
        }
        issued
    }

    /// Whether the operation with this number in its group's sequence waits to be issued.
    pub(super) fn is_queued(&self, sequence: u64) -> bool {
        self.queue.iter().any(|work| work.label.sequence == sequence)
    }

    /// The operation that an error of the communicator most likely belongs to.
    fn doing(&self) -> String {
        let in_progress = self.in_progress.front().map(|f| &f.label);
        let label = in_progress.or(self.issuing.first().map(|(work, _)| &work.label));
        let label = label.or(self.queue.front().map(|work| &work.label));
        label.map_or("starting a communicator".into(), |label| label.operation.clone())
    }

    /// Marks the point after the operations that are being issued, once NCCL has taken them, and
    /// wakes their waiters.
    fn fly(&mut self) -> Result<(), LaneError> {
        let (Some((work, _)), Some(comm)) = (self.issuing.first(), &self.comm) else {
            return Ok(());
        };
        let operation = work.operation();
        if !comm.is_ready().map_err(|e| LaneError::Nccl(e, operation.clone()))? {
            return Ok(());
        }
        let raw = self.accelerator.record(self.stream);
        let raw = raw.map_err(|text| LaneError::Device(text, operation))?;
        let done = Arc::new(Event::new(self.accelerator.clone(), raw));
        for (work, pins) in self.issuing.drain(..) {
            self.in_progress.push_back(DeviceOperation {
                label: work.label,
                _pinned: pins.keep,
                ready: Event::new(self.accelerator.clone(), pins.ready),
                done: done.clone(),
                issued: Moment::now(),
                begun: None,
            });
            work.slot.put(Ok(Output::Buffer(Received::Issued(Some(done.clone())))));
        }
        Ok(())
    }

    /// Lets go of operations that are done.
    fn finish(&mut self) -> Result<(), LaneError> {
        while let Some(in_progress) = self.in_progress.front_mut() {
            let trouble = |text| LaneError::Device(text, in_progress.label.operation.clone());
            if in_progress.begun.is_none() {
                if !in_progress.ready.is_done().map_err(trouble)? {
                    break;
                }
                in_progress.begun = Some(Moment::now());
            }
            let trouble = |text| LaneError::Device(text, in_progress.label.operation.clone());
            if !in_progress.done.is_done().map_err(trouble)? {
                break;
            }
            self.in_progress.pop_front();
        }
        Ok(())
    }

    /// The first operation on the device that has been there too long. One that has not begun waits
    /// for this rank's own work, and gets twice the time: the rank that waits for it reports first.
    pub(super) fn late(&self, timeout: Duration) -> Option<LateOperation> {
        let in_progress = self.in_progress.front()?;
        let late = match in_progress.begun {
            Some(begun) => begun.elapsed() > timeout,
            None => in_progress.issued.elapsed() > timeout.saturating_mul(2),
        };
        late.then(|| LateOperation {
            label: in_progress.label.clone(),
            begun: in_progress.begun.is_some(),
        })
    }

    /// Ends all operations: those that have not been issued never are, those on the device end once
    /// the communicator that is returned is aborted. Their buffers stay pinned until the device has
    /// let go of them.
    pub(super) fn end(&mut self, fail: impl Fn(&Slot)) -> Option<NcclComm> {
        let waiting = self.queue.drain(..).map(|work| work.slot);
        waiting.for_each(|slot| fail(&slot));
        for (work, pins) in self.issuing.drain(..) {
            fail(&work.slot);
            // It may still be on the device, so its buffers are never freed.
            std::mem::forget(pins.keep);
        }
        self.comm.take()
    }

    /// Looks after operations that were aborted. Whether all are gone.
    pub(super) fn drain(&mut self) -> bool {
        // A device that reports errors now has reported them to the user already.
        let done = |f: &DeviceOperation| f.done.is_done().unwrap_or(true);
        while self.in_progress.front().is_some_and(done) {
            self.in_progress.pop_front();
        }
        self.in_progress.is_empty()
    }

    /// Starts to end an idle communicator in good order.
    pub(super) fn finalize(&self) -> Result<(), NcclError> {
        self.comm.as_ref().map_or(Ok(()), NcclComm::finalize)
    }

    /// Frees a finalized communicator. Whether it could be, or is gone.
    pub(super) fn destroy(&mut self) -> bool {
        match self.comm.as_ref().map(NcclComm::is_ready) {
            Some(Ok(false)) => return false,
            Some(Ok(true)) => self.comm.take().into_iter().for_each(NcclComm::destroy),
            Some(Err(_)) | None => drop(self.comm.take()),
        }
        true
    }
}

impl Drop for NcclQueue {
    fn drop(&mut self) {
        if self.in_progress.is_empty() {
            return self.accelerator.free_stream(self.stream);
        }
        // The device still uses these: better lost than handed to somebody else.
        self.in_progress.drain(..).for_each(std::mem::forget);
    }
}
