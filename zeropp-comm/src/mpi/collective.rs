//! One collective: who has joined, what MPI does for it, and what becomes of it.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};

use super::comms::GroupComms;
use super::engine::{Input, Output, Slot};
use super::payload::{Payload, room, unpack};
use super::sys::{MpiError, Transfer, TransferMemory, parts};
use super::wire::{Header, HeaderShare, INLINE_MAX};
use crate::progress::Group;
use crate::signature::{Operation, Signature};
use crate::subgroup::SplitRequest;
use crate::{AllBytes, CommError, kernels};

/// An all-reduce of at most this many bytes gathers all buffers and sums them on every rank: one
/// round trip instead of two.
const GATHERED_SUM_BYTES: usize = 16 << 10;

/// One collective of a group.
pub(super) struct MpiCollective {
    pub(super) headers: Vec<Option<Header>>,
    /// Place whose header came first: the one that others are compared with.
    pub(super) opener: usize,
    pub(super) in_progress: Option<InProgress>,
    /// Whether the header has been sent to the parent in the tree, and to the children.
    pub(super) reported_up: bool,
    pub(super) reported_down: bool,
}

impl MpiCollective {
    pub(super) fn new(size: usize, opener: usize) -> MpiCollective {
        let headers = vec![None; size];
        MpiCollective {
            headers,
            opener,
            in_progress: None,
            reported_up: false,
            reported_down: false,
        }
    }

    /// Places of which no header has come so far.
    pub(super) fn not_joined(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.headers.len()).filter(|place| self.headers[*place].is_none())
    }

    /// The first joined place, from the opener on, whose signature is not `mine`.
    pub(super) fn differs(&self, mine: &Signature) -> Option<&Header> {
        let opener = self.headers[self.opener].as_ref();
        opener.into_iter().chain(self.headers.iter().flatten()).find(|h| h.signature != *mine)
    }
}

/// This rank's part of a collective under way.
pub(super) struct InProgress {
    pub(super) signature: Signature,
    pub(super) slot: Arc<Slot>,
    /// Bytes of an exchange that did not fit the header.
    bytes: Vec<u8>,
    /// The buffer, until all ranks have joined; none where the headers carry it.
    payload: Option<Payload>,
    device: Device,
    transfer: Option<Transfer>,
    stage: MpiPhase,
}

/// Data moves only once all ranks have joined and agree: Open MPI writes past the end of a buffer
/// that is too short for what another rank sends.
#[derive(Clone, Copy, PartialEq)]
enum MpiPhase {
    /// Not all ranks have joined.
    Joining,
    /// The first transfer is under way.
    First,
    /// A second transfer, of what the first one gave, is under way.
    Late,
}

/// The resources that no earlier collective of the group may still need, so that it is this one's
/// turn.
#[derive(Clone, Copy)]
pub(super) struct Turn {
    /// A first transfer.
    pub(super) first: bool,
    /// A late one.
    pub(super) late: bool,
}

/// How far a collective got.
pub(super) enum CollectiveProgress {
    Waiting,
    Done(Output),
    /// All split_requests for sub-groups are known, and it is the split's turn.
    Split,
}

impl InProgress {
    /// This rank's part of a collective in which no data has moved yet.
    pub(super) fn new(signature: Signature, input: Input, slot: Arc<Slot>) -> InProgress {
        let (bytes, payload, device) = match input {
            Input::Bytes(bytes) => (bytes, None, Device::flex()),
            Input::Buffer(payload) => {
                let device = payload.device();
                (Vec::new(), (!payload.is_small()).then_some(payload), device)
            }
        };
        let (transfer, stage) = (None, MpiPhase::Joining);
        InProgress { signature, slot, bytes, payload, device, transfer, stage }
    }

    /// Posts the first transfer.
    fn post(&self, comms: &GroupComms, payload: Payload) -> Result<Transfer, MpiError> {
        let (group, comm) = (&comms.group, comms.main);
        let (kind, len, size) = (payload.kind, payload.len, comms.group.size());
        let source = payload.memory;
        match self.signature.operation {
            Operation::Broadcast => {
                let root = self.signature.root.expect("a broadcast names its root");
                let (source, target) = match root == group.place {
                    true => (Some(source), None),
                    false => (None, Some(room(group, kind, len))),
                };
                Transfer::broadcast(comm, root, kind, source, target)
            }
            Operation::AllReduce if !self.in_parts(len, kind) => {
                let target = room(group, kind, len * size);
                Transfer::all_gather(comm, len, kind, source, target)
            }
            Operation::AllReduce | Operation::ReduceScatter => {
                let lens = parts(len, size);
                let mine = lens[group.place];
                let target = room(group, kind, mine * size);
                Transfer::all_to_all(comm, &lens, mine, kind, source, target)
            }
            _ => {
                let target = room(group, kind, len * size);
                Transfer::all_gather(comm, len, kind, source, target)
            }
        }
    }

    /// Whether an all-reduce sums a part on every rank and then gathers the parts.
    fn in_parts(&self, len: usize, kind: DType) -> bool {
        len * kind.size() > GATHERED_SUM_BYTES
    }

    /// Whether MPI has data to move, for which it wants to be asked often.
    pub(super) fn is_moving(&self) -> bool {
        self.transfer.is_some()
    }

    /// Whether the first transfer may still have to be posted.
    pub(super) fn may_post(&self) -> bool {
        self.stage == MpiPhase::Joining
    }

    /// Whether a late transfer may still have to be posted.
    pub(super) fn may_be_late(&self) -> bool {
        let kinds =
            [Operation::AllReduce, Operation::Exchange, Operation::Gather, Operation::Split];
        self.stage != MpiPhase::Late && kinds.contains(&self.signature.operation)
    }

    /// Gives MPI a chance, and takes the next step if it is time.
    pub(super) fn advance(
        &mut self,
        comms: &GroupComms,
        headers: &[Option<Header>],
        turn: Turn,
    ) -> Result<CollectiveProgress, MpiError> {
        if self.stage == MpiPhase::Joining {
            if !turn.first || headers.iter().any(Option::is_none) {
                return Ok(CollectiveProgress::Waiting);
            }
            if let Some(payload) = self.payload.take() {
                self.transfer = Some(self.post(comms, payload)?);
            }
            self.stage = MpiPhase::First;
        }
        if let Some(transfer) = &mut self.transfer
            && !transfer.test()?
        {
            return Ok(CollectiveProgress::Waiting);
        }
        match self.stage {
            MpiPhase::Late => Ok(CollectiveProgress::Done(self.after_late(comms, headers))),
            _ => self.after_first(comms, headers, turn.late),
        }
    }

    /// The memory that a root read or the completed transfer wrote, or the bytes that the headers
    /// hold.
    fn landed(&mut self, group: &Group, headers: &[Option<Header>]) -> TransferMemory {
        if let Some(transfer) = self.transfer.take() {
            let (source, target) = transfer.into_memory();
            return target.or(source).expect("a transfer has memory");
        }
        let (kind, len) = self.signature.buffer.expect("a collective on a buffer");
        let all = shares(headers).map(|share| share.inline.as_slice());
        let bytes: Vec<u8> = match self.signature.operation {
            Operation::Broadcast => {
                let root = self.signature.root.expect("a broadcast names its root");
                all.skip(root).take(1).flatten().copied().collect()
            }
            Operation::ReduceScatter => {
                let part = len / group.size() * kind.size();
                all.flat_map(|bytes| &bytes[group.place * part..][..part]).copied().collect()
            }
            _ => all.flatten().copied().collect(),
        };
        if kind != DType::F32 {
            return TransferMemory::Bytes(bytes);
        }
        let mut buffer = group.buffers.lend(bytes.len() / kind.size());
        let slice = buffer.as_mut_slice().expect("a lent buffer has one owner");
        bytemuck::cast_slice_mut::<f32, u8>(slice).copy_from_slice(&bytes);
        TransferMemory::Pooled(buffer)
    }

    fn after_first(
        &mut self,
        comms: &GroupComms,
        headers: &[Option<Header>],
        in_turn: bool,
    ) -> Result<CollectiveProgress, MpiError> {
        let group = &comms.group;
        let (kind, len) = self.signature.buffer.unwrap_or((DType::U8, 0));
        let output = match self.signature.operation {
            Operation::Barrier => Output::Bytes(AllBytes::default()),
            Operation::AllGather | Operation::Broadcast => {
                let landed = self.landed(group, headers);
                Output::Buffer(unpack(group, landed, kind, &self.device))
            }
            Operation::ReduceScatter => {
                let landed = self.landed(group, headers);
                Output::Buffer(self.sum(group, landed, kind, len / group.size()))
            }
            Operation::AllReduce if !self.in_parts(len, kind) => {
                let landed = self.landed(group, headers);
                Output::Buffer(self.sum(group, landed, kind, len))
            }
            _ if !in_turn => return Ok(CollectiveProgress::Waiting),
            Operation::AllReduce => {
                let lens = parts(len, group.size());
                let landed = self.landed(group, headers);
                let sum = Payload::new(self.sum(group, landed, kind, lens[group.place]));
                let target = room(group, kind, len);
                let late = comms.late;
                let parts = Transfer::all_gather_parts(late, &lens, kind, sum.memory, target)?;
                return Ok(self.go_late(parts));
            }
            Operation::Exchange | Operation::Gather => {
                let lens: Vec<usize> = shares(headers).map(|share| share.len).collect();
                let gets = self.signature.root.is_none_or(|root| root == group.place);
                if lens.iter().any(|len| *len > INLINE_MAX) {
                    let room = if gets { lens.iter().sum() } else { 0 };
                    let target = TransferMemory::Bytes(vec![0; room]);
                    let source = TransferMemory::Bytes(std::mem::take(&mut self.bytes));
                    let late = comms.late;
                    let all = match self.signature.root {
                        Some(root) => Transfer::gather_parts(late, root, &lens, source, target)?,
                        None => Transfer::all_gather_parts(late, &lens, DType::U8, source, target)?,
                    };
                    return Ok(self.go_late(all));
                }
                match gets {
                    true => Output::Bytes(shares(headers).map(|s| s.inline.clone()).collect()),
                    false => Output::Bytes(AllBytes::default()),
                }
            }
            Operation::Split => return Ok(CollectiveProgress::Split),
            Operation::Send | Operation::Recv => unreachable!("not a collective"),
        };
        Ok(CollectiveProgress::Done(output))
    }

    fn go_late(&mut self, transfer: Transfer) -> CollectiveProgress {
        self.transfer = Some(transfer);
        self.stage = MpiPhase::Late;
        CollectiveProgress::Waiting
    }

    fn after_late(&mut self, comms: &GroupComms, headers: &[Option<Header>]) -> Output {
        let landed = self.landed(&comms.group, headers);
        match (self.signature.buffer, landed) {
            (Some((kind, _)), memory) => {
                Output::Buffer(unpack(&comms.group, memory, kind, &self.device))
            }
            (None, TransferMemory::Bytes(all)) if all.is_empty() => {
                Output::Bytes(AllBytes::default())
            }
            (None, TransferMemory::Bytes(all)) => {
                let mut rest = all.as_slice();
                let part = |share: &HeaderShare| {
                    let (part, tail) = rest.split_at(share.len);
                    rest = tail;
                    part.to_vec()
                };
                Output::Bytes(shares(headers).map(part).collect())
            }
            (None, _) => unreachable!("an exchange is of bytes"),
        }
    }

    /// Sums what came in from every rank, `len` elements each, in rank order in `f32`.
    fn sum(&self, group: &Group, landed: TransferMemory, kind: DType, len: usize) -> Tensor<1> {
        let size = group.size();
        match landed {
            TransferMemory::Pooled(mut all) => {
                let whole = &*all.as_mut_slice().expect("a lent buffer has one owner");
                let pieces: Vec<&[f32]> = (0..size).map(|i| &whole[i * len..][..len]).collect();
                let sum = group.buffers.make(len, |out| kernels::sum_in_order(out, &pieces));
                group.buffers.give_back(all);
                kernels::on(&self.device, &sum)
            }
            memory => {
                let all = unpack(group, memory, kind, &self.device);
                let piece = |i: usize| all.clone().slice(i * len..(i + 1) * len);
                let pieces: Vec<Tensor<1>> = (0..size).map(piece).collect();
                kernels::sum_tensors(&pieces, &self.device, 0..len)
            }
        }
    }
}

/// The shares that the ranks which have joined brought.
fn shares(headers: &[Option<Header>]) -> impl Iterator<Item = &HeaderShare> {
    headers.iter().flatten().map(|header| &header.brought)
}

/// Why a split failed.
pub(super) enum SplitError {
    Mpi(MpiError),
    Comm(CommError),
}

impl From<MpiError> for SplitError {
    fn from(error: MpiError) -> Self {
        SplitError::Mpi(error)
    }
}

/// Makes this rank's sub-group. Blocks until all ranks of the group are here, which have all
/// joined.
pub(super) fn split(
    comms: &GroupComms,
    headers: &[Option<Header>],
) -> Result<GroupComms, SplitError> {
    let group = &comms.group;
    let sequence = headers.iter().flatten().map(|h| h.sequence).next().unwrap_or(0);
    let split_request =
        |share: &HeaderShare| SplitRequest::decode(&share.inline).expect("written by encode");
    let split_requests: Vec<SplitRequest> = shares(headers).map(split_request).collect();
    let new = group.sub_group(sequence, &split_requests).map_err(SplitError::Comm)?;
    // MPI wants small colors and keys: the color's number among all, and the place in the group.
    let mut colors: Vec<usize> =
        split_requests.iter().map(|split_request| split_request.color).collect();
    colors.sort_unstable();
    colors.dedup();
    let mine = split_requests[group.place].color;
    let color = colors.binary_search(&mine).expect("mine is among them");
    let main = comms.late.split(color, new.place)?;
    let late = main.duplicate()?;
    Ok(GroupComms { group: new, main, late })
}
