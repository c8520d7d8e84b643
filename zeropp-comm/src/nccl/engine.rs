//! The step between a rank's operations and NCCL, before and after its communication thread.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use burn::tensor::{DType, Tensor};

use super::accelerator::{Accelerator, DeviceResult, Event, Pinned};
use super::library::NcclTransfer;
use super::wire::{FRAME_MAX, NcclFrame};
use crate::codec::can_send;
use crate::progress::{self, Engine, OpRequest, ProgressCommunicator};
use crate::signature::{Operation, Signature, bytes_of};
use crate::{CommError, CommResult, Communicator, Pending};

/// The NCCL engine, as its communicators know it.
pub(super) struct NcclEngine {
    pub(super) accelerator: Arc<dyn Accelerator>,
    /// How long the ranks may take to find each other.
    pub(super) start_timeout: Duration,
    jobs: AtomicU64,
}

pub(super) type Shared = progress::Shared<NcclEngine>;
pub(super) type Command = progress::Command<NcclEngine>;
pub(super) type Input = progress::CollectiveInput<NcclEngine>;
pub(super) type Join = progress::Join<NcclEngine>;
pub(super) type Output = progress::OpOutput<NcclEngine>;
pub(super) type Slot = progress::Slot<NcclEngine>;
pub(super) type Wanted = progress::PostedReceive<NcclEngine>;

/// A buffer on its way into a collective.
pub(super) enum InputBuffer {
    /// Buffers for NCCL, under the number of their job.
    Work { job: u64, transfer: NcclTransfer, count: usize },
    /// No elements.
    Empty,
}

/// The content of a message.
pub(super) enum Body {
    /// A buffer for NCCL: its job's number, and its bytes.
    Work { job: u64, count: usize },
    /// No elements.
    Empty,
    /// The tensor, for a receive of the same rank.
    Own(Tensor<1>),
}

/// The result of an operation on a buffer.
pub(super) enum Received {
    /// The operation is queued on the device, and done at this event; none where nothing moves.
    Issued(Option<Arc<Event>>),
    /// A message, and when it is queued.
    Message(Room, Arc<Slot>),
}

/// Where a message comes to lie: there by the time it is queued.
pub(super) type Room = Arc<OnceLock<Tensor<1>>>;

/// An event from the device or from another rank, for the communication thread.
pub(super) enum NcclEvent {
    /// The next so many collectives of a group, on buffers, are one call of NCCL.
    Together(u64, usize),
    /// The buffers of a job are pinned, or cannot be.
    Pinned(u64, DeviceResult<Pinned>),
    /// A frame from a world rank.
    Frame(usize, NcclFrame),
    /// The connection from a world rank has ended, and why.
    Lost(usize, String),
    /// A world rank that cannot be reached, and why.
    Unreachable(usize, String),
}

impl NcclEngine {
    pub(super) fn new(accelerator: Arc<dyn Accelerator>, start_timeout: Duration) -> Self {
        Self { accelerator, start_timeout, jobs: AtomicU64::new(0) }
    }
}

impl Shared {
    /// Starts to pin buffers; the communication thread is notified of the end. Returns the number
    /// of this job.
    pub(super) fn pin(&self, tensors: Vec<Tensor<1>>) -> u64 {
        let job = self.next_job();
        self.pin_for(job, tensors);
        job
    }

    /// A number for buffers that are pinned later.
    pub(super) fn next_job(&self) -> u64 {
        self.engine.jobs.fetch_add(1, Ordering::Relaxed)
    }

    /// Starts to pin the buffers of this job.
    pub(super) fn pin_for(&self, job: u64, tensors: Vec<Tensor<1>>) {
        let commands = self.commands.clone();
        let then = Box::new(move |pinned| {
            // The communication thread has ended if the channel is closed.
            let _ = commands.send(Command::Engine(NcclEvent::Pinned(job, pinned)));
        });
        self.engine.accelerator.pin(tensors, then);
    }

    /// The device's words as an error.
    pub(super) fn device_error(&self, operation: impl Into<String>, text: String) -> CommError {
        let engine = NcclEngine::NAME.into();
        CommError::Backend { engine, operation: operation.into(), code: 0, text }
    }
}

impl Engine for NcclEngine {
    const NAME: &'static str = "nccl";
    const LIBRARY: &'static str = "NCCL";
    const GROUP_NAME_MAX: usize = 1024;
    const IN_ORDER: bool = true;

    type Buffer = InputBuffer;
    type Payload = Body;
    type Received = Received;
    type Command = NcclEvent;

    fn movable(call: &Signature, _size: usize) -> Result<(), String> {
        match call.buffer {
            // For a receive the sender's call says it.
            Some((kind, _)) if call.operation != Operation::Recv && !can_send(kind) => {
                let kind = kind.name();
                Err(format!("elements of {kind}, which cannot be sent; use f32 or bf16"))
            }
            _ => Ok(()),
        }
    }

    fn exchangeable(bytes: usize, size: usize) -> Result<(), String> {
        let most = FRAME_MAX / 2 / size;
        let problem = || format!("{bytes} bytes; use at most {most}");
        if bytes <= most { Ok(()) } else { Err(problem()) }
    }

    fn collective(
        front: &ProgressCommunicator<Self>,
        call: Signature,
        buffer: Tensor<1>,
    ) -> Pending<Tensor<1>> {
        let (shared, size) = (front.shared(), front.size());
        let (kind, len) = (buffer.dtype(), buffer.dims()[0]);
        let room = |len, kind| shared.engine.accelerator.room(len, kind);
        let wide = |buffer: Tensor<1>| Some(buffer.cast(DType::F32));
        let (source, result, transfer, count) = match call.operation {
            Operation::AllGather => {
                let count = bytes_of(&buffer);
                (Some(buffer), room(len * size, kind), NcclTransfer::AllGather, count)
            }
            Operation::ReduceScatter => {
                let part = len / size;
                (wide(buffer), room(part, DType::F32), NcclTransfer::ReduceScatter, part)
            }
            Operation::AllReduce => {
                (wide(buffer), room(len, DType::F32), NcclTransfer::AllReduce, len)
            }
            _ => {
                let root = call.root.expect("a broadcast names its root");
                let count = bytes_of(&buffer);
                let result = if call.root == Some(front.rank()) { buffer } else { room(len, kind) };
                (None, result, NcclTransfer::Broadcast { root }, count)
            }
        };
        let input = if len == 0 {
            InputBuffer::Empty
        } else {
            let job = shared.pin(source.into_iter().chain([result.clone()]).collect());
            InputBuffer::Work { job, transfer, count }
        };
        front.join(call, Input::Buffer(input), move |output, request| {
            // Sums are made in f32 and rounded to the buffers' type once.
            follow(request, output, result).map(|sum| match sum.dtype() == kind {
                true => sum,
                false => sum.cast(kind),
            })
        })
    }

    fn together(shared: &Shared, group: u64, n: usize) {
        // The communication thread has ended if the channel is closed.
        let _ = shared.commands.send(Command::Engine(NcclEvent::Together(group, n)));
    }

    fn payload(shared: &Shared, buffer: Tensor<1>, to_itself: bool) -> Body {
        let count = bytes_of(&buffer);
        if to_itself {
            Body::Own(buffer)
        } else if count == 0 {
            Body::Empty
        } else {
            Body::Work { job: shared.pin(vec![buffer]), count }
        }
    }

    fn before_wait(request: &OpRequest<Self>) -> CommResult<()> {
        request.shared.engine.accelerator.start().map_err(|text| device_error(request, text))
    }

    fn open(message: Received, request: &OpRequest<Self>) -> CommResult<Tensor<1>> {
        let Received::Message(room, issued) = message else {
            unreachable!("a receive gives a message")
        };
        let issued = request.wait(&issued)?;
        let tensor = Arc::into_inner(room).and_then(OnceLock::into_inner);
        follow(request, issued, tensor.expect("made before it is issued, for this receive"))
    }
}

fn device_error(request: &OpRequest<NcclEngine>, text: String) -> CommError {
    let operation = format!("{}: {}", request.group.name, request.what.operation());
    request.shared.device_error(operation, text)
}

/// Lets the caller's later work on `tensor` come after the operation that gave it.
fn follow(
    request: &OpRequest<NcclEngine>,
    output: Output,
    tensor: Tensor<1>,
) -> CommResult<Tensor<1>> {
    let Received::Issued(event) = output.buffer() else { unreachable!("an operation on a buffer") };
    if let Some(event) = event {
        let joined = request.shared.engine.accelerator.join(&tensor, event);
        joined.map_err(|text| device_error(request, text))?;
        // An aborted operation is over as well, with nothing in the buffer.
        request.shared.error().map_or(Ok(()), Err)?;
    }
    Ok(tensor)
}
