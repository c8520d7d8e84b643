//! One rank's end of a group.

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Tensor};
use crossbeam_channel::bounded;
use parking_lot::Mutex;

use super::collective::{Input, Parcel};
use super::driver::{Command, Late};
use super::group::{Group, Joined};
use super::inquest::INQUEST_MAX;
use super::mail::{Address, Wanted};
use super::shared::{Presence, Shared};
use super::slot::{Output, Slot};
use super::wire::INLINE_MAX;
use crate::comm::codec::can_send;
use crate::comm::signature::{Operation, Signature, bytes_of};
use crate::comm::stats::Traffic;
use crate::comm::subgroup::Wish;
use crate::comm::{CommError, CommResult, CommStats, Communicator, InFlight, Pending, checks};
use crate::device::{take_over, take_to_read};

/// Most elements in one operation, over all ranks: MPI counts in C's `int`.
const ELEMENTS_MAX: usize = i32::MAX as usize;

/// Between two questions for missing ranks.
const ASK_AGAIN: Duration = Duration::from_millis(20);

/// The communicator of this rank for one group in the MPI engine.
pub(super) struct MpiCommunicator {
    group: Arc<Group>,
    presence: Arc<Presence>,
    sequence: Mutex<u64>,
    traffic: Traffic,
}

impl MpiCommunicator {
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
        open: fn(Output) -> T,
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
        let what = Late::Collective { group, sequence };
        self.in_flight(what, signature.to_string(), slot, open)
    }

    fn in_flight<T: 'static>(
        &self,
        what: Late,
        operation: String,
        slot: Arc<Slot>,
        open: fn(Output) -> T,
    ) -> Pending<T> {
        let (shared, group) = (self.shared().clone(), self.group.clone());
        Pending::in_flight(Box::new(Ticket { shared, group, what, operation, slot, open }))
    }

    fn ended(&self) -> CommError {
        self.shared().error().unwrap_or_else(|| CommError::Unavailable {
            engine: "mpi".into(),
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
        if let Err(error) = self.check(operation, checks::collective(&signature, self.size())) {
            return Pending::ready(Err(error));
        }
        let passes = root.is_none_or(|root| root == self.group.place);
        let bytes = if passes { bytes_of(&buffer) } else { 0 };
        self.traffic.record(operation, self.size(), bytes);
        if self.size() == 1 {
            return Pending::ready(self.healthy().map(|()| buffer));
        }
        let total = buffer.dims()[0].saturating_mul(match operation {
            Operation::AllGather => self.size(),
            _ => 1,
        });
        if let Err(error) = self.check(operation, fits(buffer.dtype(), total)) {
            return Pending::ready(Err(error));
        }
        let open = if operation == Operation::AllGather { open_gathered } else { open_buffer };
        self.join(signature, Input::Buffer(Parcel::new(buffer)), open)
    }
}

/// Buffers that MPI cannot carry.
fn fits(kind: DType, total: usize) -> Result<(), String> {
    if !can_send(kind) {
        return Err(format!(
            "elements of {}, which MPI cannot carry; use f32 or bf16",
            kind.name()
        ));
    }
    if total > ELEMENTS_MAX {
        return Err(format!(
            "{total} elements over all ranks; MPI counts to {ELEMENTS_MAX}: use smaller layers or \
             more pipeline ranks"
        ));
    }
    Ok(())
}

fn open_buffer(output: Output) -> Tensor<1> {
    take_over(buffer_of(output))
}

fn open_gathered(output: Output) -> Tensor<1> {
    take_to_read(buffer_of(output))
}

fn buffer_of(output: Output) -> Tensor<1> {
    match output {
        Output::Buffer(tensor) => tensor,
        _ => unreachable!("a collective on buffers gives buffers"),
    }
}

impl Communicator for MpiCommunicator {
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
        let total = bytes.len().saturating_mul(self.size());
        if let Err(error) = self.check(Operation::Exchange, fits(DType::U8, total)) {
            return Pending::ready(Err(error));
        }
        let open = |output| match output {
            Output::Bytes(all) => all,
            _ => unreachable!("an exchange gives bytes"),
        };
        self.join(Signature::bare(Operation::Exchange), Input::Bytes(bytes), open)
    }

    fn send(&self, to: usize, tag: u64, buffer: Tensor<1>) -> Pending<()> {
        let signature = Signature::of(Operation::Send, &buffer);
        let fits = || fits(buffer.dtype(), buffer.dims()[0]);
        let checked = checks::rank("receiver", to, self.size()).and_then(|()| fits());
        let checked = self.healthy().and_then(|()| self.check(signature.operation, checked));
        if let Err(error) = checked {
            return Pending::ready(Err(error));
        }
        self.traffic.record(Operation::Send, self.size(), bytes_of(&buffer));
        let address = Address { group: self.group.id, from: self.group.place, tag };
        let to = self.group.members[to];
        let command = Command::Send { to, address, parcel: Parcel::new(buffer), signature };
        Pending::ready(self.shared().commands.send(command).map_err(|_| self.ended()))
    }

    fn recv(&self, from: usize, tag: u64, len: usize, dtype: DType) -> Pending<Tensor<1>> {
        let checked = checks::rank("sender", from, self.size()).and_then(|()| fits(dtype, len));
        let checked = self.healthy().and_then(|()| self.check(Operation::Recv, checked));
        if let Err(error) = checked {
            return Pending::ready(Err(error));
        }
        let slot = Arc::new(Slot::default());
        let address = Address { group: self.group.id, from, tag };
        let wanted = Wanted {
            group: self.group.clone(),
            from: self.group.members[from],
            kind: dtype,
            len,
            slot: slot.clone(),
        };
        if self.shared().commands.send(Command::Receive { address, wanted }).is_err() {
            return Pending::ready(Err(self.ended()));
        }
        self.in_flight(Late::Receive(address), Operation::Recv.to_string(), slot, open_buffer)
    }

    fn barrier(&self) -> CommResult<()> {
        self.join(Signature::bare(Operation::Barrier), Input::Nothing, |_| ()).wait()
    }

    fn split(&self, name: &str, color: usize, key: usize) -> CommResult<Arc<dyn Communicator>> {
        let wish = Wish { color, key, name: name.to_owned() }.encode();
        if wish.len() > INLINE_MAX {
            let problem =
                format!("a name of {} bytes; use at most {}", name.len(), INLINE_MAX - 16);
            self.invalid(Operation::Split, problem)?;
        }
        let open = |output| match output {
            Output::Group(joined) => joined,
            _ => unreachable!("a split gives a group"),
        };
        let signature = Signature::bare(Operation::Split);
        let joined = self.join(signature, Input::Bytes(wish), open).wait()?;
        Ok(Arc::new(Self::new(joined, self.presence.clone())))
    }

    fn abort(&self, reason: &str) {
        let rank = self.shared().rank;
        self.fail(CommError::Aborted { rank, reason: reason.to_owned() });
    }

    fn failure(&self) -> Option<CommError> {
        self.shared().error()
    }

    fn stats(&self) -> CommStats {
        self.traffic.snapshot(self.group.buffers.fresh())
    }
}

/// A rank's claim on a result.
struct Ticket<T> {
    shared: Arc<Shared>,
    group: Arc<Group>,
    what: Late,
    operation: String,
    slot: Arc<Slot>,
    open: fn(Output) -> T,
}

impl<T> InFlight<T> for Ticket<T> {
    fn is_done(&mut self) -> bool {
        self.slot.is_done() || self.shared.error().is_some()
    }

    fn wait_until(&mut self, deadline: Instant) -> bool {
        self.slot.look_until(deadline) || self.is_done()
    }

    fn missing(&mut self) -> Vec<usize> {
        let deadline = Instant::now() + INQUEST_MAX;
        while !self.is_done() && Instant::now() < deadline {
            let (answer, missing) = bounded(1);
            let slot = self.slot.clone();
            let late = Command::Expired { what: self.what, slot, answer: Some(answer) };
            if self.shared.commands.send(late).is_err() {
                break;
            }
            // Nobody answers while another operation is looked into.
            match missing.recv_deadline(deadline) {
                Ok(missing) => return missing,
                Err(_) => std::thread::sleep(ASK_AGAIN),
            }
        }
        Vec::new()
    }

    fn wait(self: Box<Self>) -> CommResult<T> {
        let timeout = self.shared.options.timeout;
        if let Some(result) = self.slot.wait(Instant::now().checked_add(timeout)) {
            return result.map(self.open);
        }
        let slot = self.slot.clone();
        let late = Command::Expired { what: self.what, slot, answer: None };
        let asked = self.shared.commands.send(late).is_ok();
        let answer = asked.then(|| self.slot.wait(Some(Instant::now() + INQUEST_MAX))).flatten();
        answer.unwrap_or_else(|| Err(self.unexplained())).map(self.open)
    }
}

impl<T> Ticket<T> {
    /// The communication thread itself does not come back from a call to MPI.
    fn unexplained(&self) -> CommError {
        let sequence = match self.what {
            Late::Collective { sequence, .. } => sequence,
            Late::Receive(address) => address.tag,
        };
        let error = CommError::Timeout {
            group: self.group.name.clone(),
            operation: format!("{} (MPI does not return)", self.operation),
            sequence,
            after_s: self.shared.options.timeout.as_secs_f64(),
            missing: Vec::new(),
        };
        self.shared.set_failure(self.shared.rank, error);
        self.shared.error().expect("set above")
    }
}
