//! A rank's request on a result, and what becomes of one that does not come.

use std::sync::Arc;
use std::time::Duration;

use super::{Command, Engine, Group, INQUEST_MAX, MailAddress, OpOutput, Shared, Slot};
use crate::patience::Deadline;
use crate::signature::{Operation, Signature};
use crate::{CommError, CommResult, InFlight};

/// Which operation is waited for.
#[derive(Clone, Copy)]
pub(crate) enum Awaited {
    Collective { group: u64, sequence: u64, signature: Signature },
    Receive(MailAddress),
}

impl Awaited {
    /// The group's number.
    pub(crate) fn group(&self) -> u64 {
        match self {
            Awaited::Collective { group, .. } => *group,
            Awaited::Receive(address) => address.group,
        }
    }

    /// The operation in words.
    pub(crate) fn operation(&self) -> String {
        match self {
            Awaited::Collective { signature, .. } => signature.to_string(),
            Awaited::Receive(_) => Operation::Recv.to_string(),
        }
    }

    /// A collective's number in the group's sequence, a receive's tag.
    pub(crate) fn sequence(&self) -> u64 {
        match self {
            Awaited::Collective { sequence, .. } => *sequence,
            Awaited::Receive(address) => address.tag,
        }
    }
}

/// The parts that bring an operation to its end.
pub(crate) struct OpRequest<E: Engine> {
    pub(crate) shared: Arc<Shared<E>>,
    pub(crate) group: Arc<Group>,
    pub(crate) what: Awaited,
    pub(crate) slot: Arc<Slot<E>>,
}

impl<E: Engine> OpRequest<E> {
    /// Whether the result is there, or will not come.
    pub(crate) fn is_done(&self) -> bool {
        self.slot.is_done() || self.shared.error().is_some()
    }

    /// Sleeps until there is a result at `slot`, this request's or a later part's of its operation.
    pub(crate) fn wait(&self, slot: &Arc<Slot<E>>) -> CommResult<OpOutput<E>> {
        let timeout = self.shared.timeout.get();
        if let Some(result) = slot.wait(Deadline::after(timeout)) {
            return result;
        }
        let command = Command::Expired { what: self.what, slot: slot.clone() };
        let asked = self.shared.commands.send(command).is_ok();
        let answer = asked.then(|| slot.wait(Deadline::after(INQUEST_MAX))).flatten();
        answer.unwrap_or_else(|| Err(self.unexplained(timeout)))
    }

    /// The communication thread itself does not come back from a call to the library.
    fn unexplained(&self, timeout: Duration) -> CommError {
        let error = CommError::Timeout {
            group: self.group.name.clone(),
            operation: format!("{} ({} does not return)", self.what.operation(), E::LIBRARY),
            sequence: self.what.sequence(),
            after_s: timeout.as_secs_f64(),
            missing: Vec::new(),
        };
        self.shared.set_failure(self.shared.rank, error);
        self.shared.error().expect("set above")
    }
}

/// A request, and what turns its result into the rank's.
pub(super) struct Ticket<E: Engine, F> {
    pub(super) request: OpRequest<E>,
    pub(super) open: F,
}

impl<E, T, F> InFlight<T> for Ticket<E, F>
where
    E: Engine,
    F: FnOnce(OpOutput<E>, &OpRequest<E>) -> CommResult<T> + Send,
{
    fn is_done(&mut self) -> bool {
        self.request.is_done()
    }

    fn wait_until(&mut self, deadline: Deadline) -> bool {
        self.request.slot.look_until(deadline) || self.request.is_done()
    }

    fn missing(&mut self) -> Vec<usize> {
        E::missing(&self.request)
    }

    fn wait(self: Box<Self>) -> CommResult<T> {
        E::before_wait(&self.request)?;
        let output = self.request.wait(&self.request.slot)?;
        (self.open)(output, &self.request)
    }
}
