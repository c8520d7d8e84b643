//! The step between a rank's operations and MPI, before and after its communication thread.

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor};
use crossbeam_channel::{Sender, bounded};

use super::payload::Payload;
use super::wire::INLINE_MAX;
use crate::codec::can_send;
use crate::patience::{Deadline, received};
use crate::progress::{self, Awaited, Engine, INQUEST_MAX, OpRequest, ProgressCommunicator};
use crate::signature::{Operation, Signature};
use crate::{CommResult, Pending};
use zeropp_core::device::{take_over, take_to_read};

/// Most elements in one operation, over all ranks: MPI counts in C's `int`.
const ELEMENTS_MAX: usize = i32::MAX as usize;

/// Between two questions for missing ranks.
const ASK_AGAIN: Duration = Duration::from_millis(20);

/// The MPI engine, as its communicators know it.
pub(super) struct MpiEngine {
    /// Where messages are to arrive.
    pub(super) device: Device,
}

pub(super) type Shared = progress::Shared<MpiEngine>;
pub(super) type Command = progress::Command<MpiEngine>;
pub(super) type Input = progress::CollectiveInput<MpiEngine>;
pub(super) type Join = progress::Join<MpiEngine>;
pub(super) type Output = progress::OpOutput<MpiEngine>;
pub(super) type Slot = progress::Slot<MpiEngine>;
pub(super) type Wanted = progress::PostedReceive<MpiEngine>;

/// Asks for the ranks that an operation waits for, and fails nothing.
pub(super) struct WhoIsMissing {
    pub(super) what: Awaited,
    pub(super) slot: Arc<Slot>,
    pub(super) answer: Sender<Vec<usize>>,
}

impl Engine for MpiEngine {
    const NAME: &'static str = "mpi";
    const LIBRARY: &'static str = "MPI";
    /// A split's header has room for the name, a color and a key.
    const GROUP_NAME_MAX: usize = INLINE_MAX - 16;

    type Buffer = Payload;
    type Payload = Payload;
    type Received = Tensor<1>;
    type Command = WhoIsMissing;

    fn movable(call: &Signature, size: usize) -> Result<(), String> {
        let Some((kind, len)) = call.buffer else { return Ok(()) };
        match call.operation {
            Operation::Send | Operation::Recv => fits(kind, len),
            // Nothing moves.
            _ if size == 1 => Ok(()),
            Operation::AllGather => fits(kind, len.saturating_mul(size)),
            _ => fits(kind, len),
        }
    }

    fn exchangeable(bytes: usize, size: usize) -> Result<(), String> {
        fits(DType::U8, bytes.saturating_mul(size))
    }

    fn collective(
        front: &ProgressCommunicator<Self>,
        call: Signature,
        buffer: Tensor<1>,
    ) -> Pending<Tensor<1>> {
        let gathers = call.operation == Operation::AllGather;
        front.join(call, Input::Buffer(Payload::new(buffer)), move |output, _| {
            let tensor = output.buffer();
            Ok(if gathers { take_to_read(tensor) } else { take_over(tensor) })
        })
    }

    fn payload(_: &Shared, buffer: Tensor<1>, _to_itself: bool) -> Payload {
        Payload::new(buffer)
    }

    fn open(message: Tensor<1>, _: &OpRequest<Self>) -> CommResult<Tensor<1>> {
        Ok(take_over(message))
    }

    fn missing(request: &OpRequest<Self>) -> Vec<usize> {
        let deadline = Deadline::after(INQUEST_MAX);
        while !request.is_done() && !deadline.is_over() {
            let (answer, missing) = bounded(1);
            let question = WhoIsMissing { what: request.what, slot: request.slot.clone(), answer };
            if request.shared.commands.send(Command::Engine(question)).is_err() {
                break;
            }
            // No rank answers while another operation is being examined.
            match received(deadline, &missing) {
                Some(Ok(missing)) => return missing,
                _ => std::thread::sleep(ASK_AGAIN),
            }
        }
        Vec::new()
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
