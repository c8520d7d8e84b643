//! One rank's end of a group.

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Tensor};
use parking_lot::Mutex;

use super::driver::{Body, Command, Input};
use super::inquest::{INQUEST_MAX, Late};
use super::library::Transfer;
use super::links::FRAME_MAX;
use super::mail::{Address, Wanted};
use super::shared::{Group, Joined, Output, Presence, Shared, Slot};
use crate::comm::codec::can_send;
use crate::comm::signature::{Operation, Signature, bytes_of};
use crate::comm::stats::Traffic;
use crate::comm::subgroup::Wish;
use crate::comm::{CommError, CommResult, CommStats, Communicator, InFlight, Pending, checks};

/// Longest name of a group, in bytes.
const NAME_MAX: usize = 1024;

/// The communicator of this rank for one group in the NCCL engine.
pub(super) struct NcclCommunicator {
    group: Arc<Group>,
    presence: Arc<Presence>,
    sequence: Mutex<u64>,
    traffic: Traffic,
}

impl NcclCommunicator {
    pub(super) fn new(Joined(group): Joined, presence: Arc<Presence>) -> Self {
        Self { group, presence, sequence: Mutex::new(0), traffic: Traffic::default() }
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.presence.0
    }

    fn healthy(&self) -> CommResult<()> {
        self.shared().error().map_or(Ok(()), Err)
    }

    /// Fails the world with a call that cannot be carried out.
    fn invalid(&self, operation: Operation, problem: String) -> CommResult<()> {
        self.healthy()?;
        let error = CommError::Invalid {
            group: self.group.name.clone(),
            rank: self.shared().rank,
            operation: operation.to_string(),
            problem,
        };
        self.fail(error.clone());
        Err(error)
    }

    fn fail(&self, error: CommError) {
        if self.shared().set_failure(self.shared().rank, error) {
            // The communication thread has ended if nobody listens.
            let _ = self.shared().commands.send(Command::Fail);
        }
    }

    fn check(&self, operation: Operation, checked: Result<(), String>) -> CommResult<()> {
        checked.or_else(|problem| self.invalid(operation, problem))
    }

    /// Takes part in the group's next collective.
    fn join<T: 'static>(
        &self,
        signature: Signature,
        input: Input,
        open: impl FnOnce(Output, &Ending) -> CommResult<T> + Send + 'static,
    ) -> Pending<T> {
        if let Err(error) = self.healthy() {
            return Pending::ready(Err(error));
        }
        let slot = Arc::new(Slot::default());
        let group = self.group.id;
        // Under the lock, the numbers go to the communication thread in order.
        let mut next = self.sequence.lock();
        let sequence = *next;
        *next += 1;
        let command = Command::Join { group, sequence, signature, input, slot: slot.clone() };
        let sent = self.shared().commands.send(command);
        drop(next);
        if sent.is_err() {
            return Pending::ready(Err(self.ended()));
        }
        let what = What::Collective { sequence, operation: signature.to_string() };
        self.in_flight(what, slot, open)
    }

    fn in_flight<T: 'static>(
        &self,
        what: What,
        slot: Arc<Slot>,
        open: impl FnOnce(Output, &Ending) -> CommResult<T> + Send + 'static,
    ) -> Pending<T> {
        let (shared, group) = (self.shared().clone(), self.group.clone());
        let ending = Ending { shared, group, what };
        Pending::in_flight(Box::new(Ticket { ending, slot, open: Box::new(open) }))
    }

    fn ended(&self) -> CommError {
        self.shared().error().unwrap_or_else(|| CommError::Unavailable {
            engine: "nccl".into(),
            reason: "the communication thread has ended".into(),
        })
    }

    /// A collective on a buffer; with a root, only the root passes one in.
    fn on_buffer(
        &self,
        operation: Operation,
        buffer: Tensor<1>,
        root: Option<usize>,
    ) -> Pending<Tensor<1>> {
        let signature = Signature { root, ..Signature::of(operation, &buffer) };
        let checked = checks::collective(&signature, self.size()).and_then(|()| movable(&buffer));
        if let Err(error) = self.check(operation, checked) {
            return Pending::ready(Err(error));
        }
        let passes = root.is_none_or(|root| root == self.group.place);
        let bytes = if passes { bytes_of(&buffer) } else { 0 };
        self.traffic.record(operation, self.size(), bytes);
        if self.size() == 1 {
            return Pending::ready(self.healthy().map(|()| buffer));
        }
        let (kind, len) = (buffer.dtype(), buffer.dims()[0]);
        let room = |len, kind| self.shared().accelerator.room(len, kind);
        let wide = |buffer: Tensor<1>| Some(buffer.cast(DType::F32));
        let (source, result, transfer, count) = match operation {
            Operation::AllGather => {
                let result = room(len * self.size(), kind);
                (Some(buffer), result, Transfer::AllGather, bytes)
            }
            Operation::ReduceScatter => {
                let part = len / self.size();
                (wide(buffer), room(part, DType::F32), Transfer::ReduceScatter, part)
            }
            Operation::AllReduce => (wide(buffer), room(len, DType::F32), Transfer::AllReduce, len),
            _ => {
                let root = root.expect("a broadcast names its root");
                let count = bytes_of(&buffer);
                let result = if passes { buffer } else { room(len, kind) };
                (None, result, Transfer::Broadcast { root }, count)
            }
        };
        let input = if len == 0 {
            Input::Empty
        } else {
            let job = self.shared().next_job();
            self.shared().pin(job, source.into_iter().chain([result.clone()]).collect());
            Input::Work { job, transfer, count }
        };
        self.join(signature, input, move |output, ending| {
            // Sums are made in f32 and rounded to the buffers' type once.
            ending.follow(output, result).map(|sum| match sum.dtype() == kind {
                true => sum,
                false => sum.cast(kind),
            })
        })
    }
}

/// Buffers that cannot travel.
fn movable(buffer: &Tensor<1>) -> Result<(), String> {
    let kind = buffer.dtype();
    let problem = || format!("elements of {}, which cannot be sent; use f32 or bf16", kind.name());
    if can_send(kind) { Ok(()) } else { Err(problem()) }
}

impl Communicator for NcclCommunicator {
    fn name(&self) -> &str {
        &self.group.name
    }

    fn rank(&self) -> usize {
        self.group.place
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn all_gather(&self, shard: Tensor<1>) -> Pending<Tensor<1>> {
        self.on_buffer(Operation::AllGather, shard, None)
    }

    fn reduce_scatter(&self, full: Tensor<1>) -> Pending<Tensor<1>> {
        self.on_buffer(Operation::ReduceScatter, full, None)
    }

    fn all_reduce(&self, buffer: Tensor<1>) -> Pending<Tensor<1>> {
        self.on_buffer(Operation::AllReduce, buffer, None)
    }

    fn broadcast(&self, root: usize, buffer: Tensor<1>) -> Pending<Tensor<1>> {
        self.on_buffer(Operation::Broadcast, buffer, Some(root))
    }

    fn exchange(&self, bytes: Vec<u8>) -> Pending<Vec<Vec<u8>>> {
        self.traffic.record(Operation::Exchange, self.size(), bytes.len());
        let most = FRAME_MAX / 2 / self.size();
        let problem = || format!("{} bytes; use at most {most}", bytes.len());
        let checked = if bytes.len() <= most { Ok(()) } else { Err(problem()) };
        if let Err(error) = self.check(Operation::Exchange, checked) {
            return Pending::ready(Err(error));
        }
        let signature = Signature::bare(Operation::Exchange);
        self.join(signature, Input::Bytes(bytes), |output, _| match output {
            Output::Bytes(all) => Ok(all),
            _ => unreachable!("an exchange gives bytes"),
        })
    }

    fn send(&self, to: usize, tag: u64, buffer: Tensor<1>) -> Pending<()> {
        let signature = Signature::of(Operation::Send, &buffer);
        let checked = checks::rank("receiver", to, self.size()).and_then(|()| movable(&buffer));
        let checked = self.healthy().and_then(|()| self.check(signature.operation, checked));
        if let Err(error) = checked {
            return Pending::ready(Err(error));
        }
        let count = bytes_of(&buffer);
        self.traffic.record(Operation::Send, self.size(), count);
        let body = if to == self.group.place {
            Body::Own(buffer)
        } else if count == 0 {
            Body::Empty
        } else {
            let job = self.shared().next_job();
            self.shared().pin(job, vec![buffer]);
            Body::Work { job, count }
        };
        let command = Command::Send { group: self.group.id, to, tag, signature, body };
        Pending::ready(self.shared().commands.send(command).map_err(|_| self.ended()))
    }

    fn recv(&self, from: usize, tag: u64, len: usize, dtype: DType) -> Pending<Tensor<1>> {
        let checked = checks::rank("sender", from, self.size());
        let checked = self.healthy().and_then(|()| self.check(Operation::Recv, checked));
        if let Err(error) = checked {
            return Pending::ready(Err(error));
        }
        let slot = Arc::new(Slot::default());
        let address = Address { group: self.group.id, from, tag };
        let signature = Signature::with(Operation::Recv, dtype, len);
        let wanted = Wanted { group: self.group.clone(), signature, slot: slot.clone() };
        if self.shared().commands.send(Command::Receive { address, wanted }).is_err() {
            return Pending::ready(Err(self.ended()));
        }
        self.in_flight(What::Receive(address), slot, |output, ending| match output {
            Output::Message(tensor, issued) => {
                let output = ending.wait(&issued)?;
                ending.follow(output, tensor)
            }
            _ => unreachable!("a receive gives a message"),
        })
    }

    fn barrier(&self) -> CommResult<()> {
        let signature = Signature::bare(Operation::Barrier);
        self.join(signature, Input::Bytes(Vec::new()), |_, _| Ok(())).wait()
    }

    fn split(&self, name: &str, color: usize, key: usize) -> CommResult<Arc<dyn Communicator>> {
        if name.len() > NAME_MAX {
            let problem = format!("a name of {} bytes; use at most {NAME_MAX}", name.len());
            self.invalid(Operation::Split, problem)?;
        }
        let wish = Wish { color, key, name: name.to_owned() }.encode();
        let signature = Signature::bare(Operation::Split);
        let joined = self.join(signature, Input::Bytes(wish), |output, _| match output {
            Output::Group(joined) => Ok(joined),
            _ => unreachable!("a split gives a group"),
        });
        Ok(Arc::new(Self::new(joined.wait()?, self.presence.clone())))
    }

    fn abort(&self, reason: &str) {
        let rank = self.shared().rank;
        self.fail(CommError::Aborted { rank, reason: reason.to_owned() });
    }

    fn failure(&self) -> Option<CommError> {
        self.shared().error()
    }

    fn stats(&self) -> CommStats {
        self.traffic.snapshot(0)
    }
}

/// Which operation is waited for.
enum What {
    Collective { sequence: u64, operation: String },
    Receive(Address),
}

/// What it takes to bring an operation to its end.
struct Ending {
    shared: Arc<Shared>,
    group: Arc<Group>,
    what: What,
}

type Open<T> = Box<dyn FnOnce(Output, &Ending) -> CommResult<T> + Send>;

/// A rank's claim on a result.
struct Ticket<T> {
    ending: Ending,
    slot: Arc<Slot>,
    open: Open<T>,
}

impl<T> InFlight<T> for Ticket<T> {
    fn is_done(&mut self) -> bool {
        self.slot.is_done() || self.ending.shared.error().is_some()
    }

    fn wait_until(&mut self, deadline: Instant) -> bool {
        self.slot.look_until(deadline) || self.is_done()
    }

    fn wait(self: Box<Self>) -> CommResult<T> {
        let output = self.ending.wait(&self.slot)?;
        (self.open)(output, &self.ending)
    }
}

impl Ending {
    /// Sleeps until an operation has been issued, or its result has come.
    fn wait(&self, slot: &Arc<Slot>) -> CommResult<Output> {
        let timeout = self.shared.options.timeout;
        if let Some(result) = slot.wait(Instant::now().checked_add(timeout)) {
            return result;
        }
        let late = match &self.what {
            What::Receive(address) => Late::Receive(*address),
            What::Collective { sequence, operation } => Late::Collective {
                group: self.group.id,
                sequence: *sequence,
                operation: operation.clone(),
            },
        };
        let command = Command::Expired { what: late, slot: slot.clone() };
        let asked = self.shared.commands.send(command).is_ok();
        let answer = asked.then(|| slot.wait(Some(Instant::now() + INQUEST_MAX))).flatten();
        answer.unwrap_or_else(|| Err(self.unexplained()))
    }

    /// Lets the caller's later work on `tensor` come after the operation that gave it.
    fn follow(&self, output: Output, tensor: Tensor<1>) -> CommResult<Tensor<1>> {
        let Output::Issued(event) = output else { unreachable!("an operation on a buffer") };
        if let Some(event) = event {
            let joined = self.shared.accelerator.join(&tensor, event);
            joined.map_err(|text| self.shared.device_error(self.operation(), text))?;
            // An aborted operation is over as well, with nothing in the buffer.
            self.shared.error().map_or(Ok(()), Err)?;
        }
        Ok(tensor)
    }

    fn operation(&self) -> String {
        match &self.what {
            What::Collective { operation, .. } => format!("{}: {operation}", self.group.name),
            What::Receive(_) => format!("{}: {}", self.group.name, Operation::Recv),
        }
    }

    /// The communication thread itself does not come back from a call to NCCL.
    fn unexplained(&self) -> CommError {
        let (operation, sequence) = match &self.what {
            What::Collective { sequence, operation } => (operation.clone(), *sequence),
            What::Receive(address) => (Operation::Recv.to_string(), address.tag),
        };
        let error = CommError::Timeout {
            group: self.group.name.clone(),
            operation: format!("{operation} (NCCL does not return)"),
            sequence,
            after_s: self.shared.options.timeout.as_secs_f64(),
            missing: Vec::new(),
        };
        self.shared.set_failure(self.shared.rank, error);
        self.shared.error().expect("set above")
    }
}

/// How long a world's end may take beyond its timeout.
pub(super) const END_PATIENCE: Duration = Duration::from_secs(10);
