//! One rank's end of a group.

use std::sync::Arc;

use burn::tensor::Tensor;
use parking_lot::Mutex;

use super::request::Ticket;
use super::{
    Awaited, CollectiveInput, Command, Engine, Envelope, Group, Join, MailAddress, OpOutput,
    OpRequest, PostedReceive, RankLiveness, Shared, Slot,
};
use crate::front::{Front, GroupMember};
use crate::patience::Timeout;
use crate::signature::{Operation, Signature};
use crate::stats::{HeldMemory, Traffic};
use crate::subgroup::SplitRequest;
use crate::{AllBytes, CommError, CommResult, Communicator, Pending};

/// The communicator of this rank for one group.
pub(crate) struct ProgressCommunicator<E: Engine> {
    group: Arc<Group>,
    liveness: Arc<RankLiveness<E>>,
    sequence: Mutex<u64>,
    traffic: Traffic,
}

impl<E: Engine> ProgressCommunicator<E> {
    pub(crate) fn new(group: Arc<Group>, liveness: Arc<RankLiveness<E>>) -> Self {
        Self { group, liveness, sequence: Mutex::new(0), traffic: Traffic::default() }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared<E>> {
        &self.liveness.0
    }

    /// Takes part in the group's next collective; `open` turns what comes out into the result.
    pub(crate) fn join<T: 'static>(
        &self,
        signature: Signature,
        input: CollectiveInput<E>,
        open: impl FnOnce(OpOutput<E>, &OpRequest<E>) -> CommResult<T> + Send + 'static,
    ) -> Pending<T> {
        if let Err(error) = self.healthy() {
            return Pending::ready(Err(error));
        }
        let (group, slot) = (self.group.id, Arc::new(Slot::default()));
        // Under the lock, the numbers go to the communication thread in order.
        let mut next = self.sequence.lock();
        let sequence = *next;
        *next += 1;
        let join = Join { group, sequence, signature, input, slot: slot.clone() };
        let sent = self.shared().commands.send(Command::Join(join));
        drop(next);
        if sent.is_err() {
            return Pending::ready(Err(self.ended()));
        }
        self.in_flight(Awaited::Collective { group, sequence, signature }, slot, open)
    }

    fn in_flight<T: 'static>(
        &self,
        what: Awaited,
        slot: Arc<Slot<E>>,
        open: impl FnOnce(OpOutput<E>, &OpRequest<E>) -> CommResult<T> + Send + 'static,
    ) -> Pending<T> {
        let (shared, group) = (self.shared().clone(), self.group.clone());
        Pending::in_flight(Box::new(Ticket {
            request: OpRequest { shared, group, what, slot },
            open,
        }))
    }

    fn ended(&self) -> CommError {
        self.shared().error().unwrap_or_else(|| CommError::Unavailable {
            engine: E::NAME.into(),
            reason: "the communication thread has ended".into(),
        })
    }
}

impl<E: Engine> Front for ProgressCommunicator<E> {
    fn member(&self) -> GroupMember<'_> {
        GroupMember {
            name: &self.group.name,
            place: self.group.place,
            size: self.group.size(),
            world_rank: self.shared().rank,
        }
    }

    fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    fn held(&self) -> HeldMemory {
        let buffers = &self.group.buffers;
        // Messages move once they are asked for.
        HeldMemory {
            fresh_buffers: buffers.fresh(),
            early_bytes: 0,
            idle_bytes: buffers.idle_bytes(),
        }
    }

    fn timeout(&self) -> &Timeout {
        &self.shared().timeout
    }

    fn error(&self) -> Option<CommError> {
        self.shared().error()
    }

    fn fail(&self, error: CommError) {
        if self.shared().set_failure(self.shared().rank, error) {
            // The communication thread has ended if the channel is closed.
            let _ = self.shared().commands.send(Command::Fail);
        }
    }

    fn in_order(&self) -> bool {
        E::IN_ORDER
    }

    fn movable(&self, call: &Signature) -> Result<(), String> {
        E::movable(call, self.group.size())
    }

    fn exchangeable(&self, bytes: usize) -> Result<(), String> {
        E::exchangeable(bytes, self.group.size())
    }

    fn begin_together(&self, n: usize) {
        E::together(self.shared(), self.group.id, n);
    }

    fn on_buffer(&self, call: Signature, buffer: Tensor<1>) -> Pending<Tensor<1>> {
        E::collective(self, call, buffer)
    }

    fn on_bytes(&self, call: Signature, bytes: Vec<u8>) -> Pending<AllBytes> {
        self.join(call, CollectiveInput::Bytes(bytes), |output, _| match output {
            OpOutput::Bytes(all) => Ok(all),
            _ => unreachable!("the operation gives bytes"),
        })
    }

    fn post(&self, to: usize, tag: u64, buffer: Tensor<1>) -> Pending<()> {
        let signature = Signature::of(Operation::Send, &buffer);
        let address = MailAddress { group: self.group.id, from: self.group.place, tag };
        let payload = E::payload(self.shared(), buffer, to == self.group.place);
        let command = Command::Send { to, envelope: Envelope { address, signature }, payload };
        Pending::ready(self.shared().commands.send(command).map_err(|_| self.ended()))
    }

    fn fetch(&self, from: usize, tag: u64, signature: Signature) -> Pending<Tensor<1>> {
        let slot = Arc::new(Slot::default());
        let address = MailAddress { group: self.group.id, from, tag };
        let (group, at) = (self.group.clone(), slot.clone());
        let command = Command::Receive(PostedReceive { address, group, signature, slot: at });
        if self.shared().commands.send(command).is_err() {
            return Pending::ready(Err(self.ended()));
        }
        self.in_flight(Awaited::Receive(address), slot, |output, request| {
            E::open(output.buffer(), request)
        })
    }

    fn meet(&self) -> CommResult<()> {
        let signature = Signature::bare(Operation::Barrier);
        self.join(signature, CollectiveInput::Bytes(Vec::new()), |_, _| Ok(())).wait()
    }

    fn part(&self, name: &str, color: usize, key: usize) -> CommResult<Arc<dyn Communicator>> {
        let (len, most) = (name.len(), E::GROUP_NAME_MAX);
        let problem = || format!("a name of {len} bytes; use at most {most}");
        let named = if len <= most { Ok(()) } else { Err(problem()) };
        self.check(Operation::Split, named)?;
        let split_request = SplitRequest { color, key, name: name.to_owned() }.encode();
        let signature = Signature::bare(Operation::Split);
        let group =
            self.join(signature, CollectiveInput::Bytes(split_request), |output, _| match output {
                OpOutput::Group(group) => Ok(group),
                _ => unreachable!("a split gives a group"),
            });
        Ok(Arc::new(Self::new(group.wait()?, self.liveness.clone())))
    }
}
