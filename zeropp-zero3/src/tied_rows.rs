//! A tied weight whose head ranks share by rows: slices update it, each its rows, from the sum of
//! the embedding's gradient and theirs, and give the embedding the new weights back. So the
//! optimizer's state of it is there once, and no rank has all of that (ADR 104).

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use zeropp_comm::groups::Groups;
use zeropp_comm::mesh::Coords;
use zeropp_comm::{CommResult, Pending};
use zeropp_core::meter::{Hold, MemoryKind, Meter};
use zeropp_core::shared_rows::{CommonPart, SharedRows};
use zeropp_core::{cpu_tensor, device, kernels};

use crate::stage::ShardedStage;
use crate::words::{Words, own_copy};

/// Tags of the two exchanges, which no other message has; the executor's tags stay below them.
const GRADIENT_TAG: u64 = u64::MAX - 3;
const PARAMETER_TAG: u64 = u64::MAX - 4;

/// The weight of an embedding that slices of a head update.
#[derive(Clone, Debug)]
pub struct TiedRows {
    /// Stage and layer of the embedding.
    pub embedding: (usize, usize),
    /// The number that each rank's slice has as a stage, of which it is the only layer.
    pub slices: usize,
    /// Which shards have which elements.
    pub rows: Arc<SharedRows>,
}

/// The exchanges of one rank.
pub(crate) struct RowExchange<'a> {
    pub(crate) tied: &'a TiedRows,
    pub(crate) groups: &'a Groups,
    pub(crate) zero1: bool,
    pub(crate) meter: &'a Arc<Meter>,
}

/// A shard of this rank's: of the embedding or of its slice.
struct OwnShard {
    values: Tensor<1>,
    /// Its first element within the weight.
    start: usize,
}

impl OwnShard {
    fn part(&self, part: &CommonPart) -> Tensor<1> {
        let Range { start, end } = part.elements;
        self.values.clone().slice([start - self.start..end - self.start])
    }
}

/// Parts on their way to other ranks.
#[derive(Default)]
struct Sending {
    messages: Vec<Pending<()>>,
    bytes: u64,
}

impl Sending {
    /// Waits for them. Returns their bytes.
    fn wait(self) -> CommResult<u64> {
        self.messages.into_iter().try_for_each(Pending::wait)?;
        Ok(self.bytes)
    }
}

/// A part that this rank has or gets, and where it begins in the shard that it is for.
struct Arriving {
    values: Pending<Tensor<1>>,
    at: usize,
}

impl RowExchange<'_> {
    /// Adds to the gradients of slices those of the embedding, which has none afterwards. Returns
    /// bytes that this rank sent.
    ///
    /// # Errors
    /// A message's error.
    pub(crate) fn sum_gradients(&self, stages: &mut [ShardedStage]) -> CommResult<u64> {
        let [embedding, slice] = self.places(stages);
        let grad = |at: (usize, usize)| stages[at.0].layers[at.1].grad.as_ref();
        if embedding.and_then(grad).is_none() && slice.and_then(grad).is_none() {
            return Ok(0);
        }
        let _messages = self.hold_messages();
        let in_file = |at: Option<(usize, usize)>| at.and_then(grad).and_then(Words::out);
        let read = [embedding, slice].into_iter().filter_map(in_file).map(|of| of.words());
        let _read = self.meter.hold(MemoryKind::Optimizer, 4 * read.sum::<usize>() as u64);
        let whole = embedding.and_then(grad).map(Words::tensor);
        check_file(stages)?;
        let whole = whole.map(|values| OwnShard { values, start: self.whole_start() });
        let given = if whole.is_some() { self.slices_of() } else { Vec::new() };
        let wanted = if slice.is_some() { self.wholes_of() } else { Vec::new() };
        let start = self.slice_start();
        let (sent, parts) = self.exchanged(whole.as_ref(), &given, &wanted, start, GRADIENT_TAG);
        if let Some((s, l)) = slice {
            let layer = &mut stages[s].layers[l];
            let sum = layer.take_grad().expect("the slice's is reduced where the embedding's is");
            let sum = sum.into_tensor();
            layer.set_grad(joined(sum, parts, true)?, self.meter);
            check_file(stages)?;
        }
        let sent = sent.wait()?;
        if let Some((s, l)) = embedding {
            drop(stages[s].layers[l].take_grad());
        }
        Ok(sent)
    }

    /// Gives the embedding the slices' weights, after their update. Returns bytes that this rank
    /// sent.
    ///
    /// # Errors
    /// A message's or a gather's error.
    pub(crate) fn return_parameters(&self, stages: &mut [ShardedStage]) -> CommResult<u64> {
        let [embedding, slice] = self.places(stages);
        if embedding.is_none() && slice.is_none() {
            return Ok(0);
        }
        let messages = self.hold_messages();
        let in_file = |(s, l): &(usize, usize)| stages[*s].layers[*l].param.out().is_some();
        let read = [embedding, slice].into_iter().flatten().filter(in_file);
        let read = read.map(|(s, l)| 4 * stages[s].owned_range(l).1 as u64).sum();
        let read = self.meter.hold(MemoryKind::Optimizer, read);
        let slice = slice.map(|(s, l)| {
            let (start, len) = stages[s].owned_range(l);
            let values = stages[s].layers[l].param.start_read(start..start + len).wait();
            OwnShard { values, start: self.slice_start() }
        });
        check_file(stages)?;
        let given = if slice.is_some() { self.wholes_of() } else { Vec::new() };
        let wanted = if embedding.is_some() { self.slices_of() } else { Vec::new() };
        let start = self.whole_start();
        let (sent, parts) = self.exchanged(slice.as_ref(), &given, &wanted, start, PARAMETER_TAG);
        let updated = match embedding {
            Some((s, l)) => {
                let (_, len) = stages[s].owned_range(l);
                let layer = &mut stages[s].layers[l];
                let shard = layer.param.len();
                let none = Tensor::zeros([1], &layer.param.device());
                let device = std::mem::replace(&mut layer.param, Words::Here(none)).device();
                let own = joined(Tensor::zeros([len], &device), parts, false)?;
                Some((s, l, own, shard))
            }
            None => None,
        };
        let sent = sent.wait()?;
        drop((messages, slice));
        let Some((s, l, own, shard)) = updated else { return Ok(sent) };
        let mut counted = read;
        let param = match self.zero1 {
            true => {
                drop(counted);
                let bytes = 4 * (own.dims()[0] + shard) as u64;
                counted = self.meter.hold(MemoryKind::Optimizer, bytes);
                // What is gathered is shared, and parameters are written in place.
                device::copy(&self.groups.replica.all_gather(own).wait()?)
            }
            false => own,
        };
        stages[s].layers[l].return_param(param, counted, self.meter);
        Ok(sent)
    }

    /// Where in `stages` embedding and slice are: the stage's place in them, and the layer's in it.
    fn places(&self, stages: &[ShardedStage]) -> [Option<(usize, usize)>; 2] {
        let place = |(stage, layer): (usize, usize)| {
            Some((stages.iter().position(|s| s.index() == stage)?, layer))
        };
        [self.tied.embedding, (self.tied.slices, 0)].map(place)
    }

    /// Which of the shards this rank updates, or, of the embedding, gets.
    fn piece(&self) -> usize {
        let (d, k) = (self.groups.zero3.rank(), &self.groups.replica);
        if self.zero1 { d * k.size() + k.rank() } else { d }
    }

    fn rank(&self) -> usize {
        self.groups.coords.pp
    }

    fn whole_start(&self) -> usize {
        self.tied.rows.of_whole(self.piece()).start
    }

    fn slice_start(&self) -> usize {
        self.tied.rows.of_slice(self.rank(), self.piece()).start
    }

    fn slices_of(&self) -> Vec<CommonPart> {
        self.tied.rows.slices_of(self.piece())
    }

    fn wholes_of(&self) -> Vec<CommonPart> {
        self.tied.rows.wholes_of(self.rank(), self.piece())
    }

    /// Counts all messages of an exchange, those that this rank sends and those that it gets.
    fn hold_messages(&self) -> Hold {
        let bytes = self.tied.rows.message_bytes(self.rank(), self.piece());
        self.meter.hold(MemoryKind::Optimizer, bytes)
    }

    fn is_here(&self, part: &CommonPart) -> bool {
        (part.rank, part.piece) == (self.rank(), self.piece())
    }

    /// The world's rank with that shard: without ZeRO-1 one of this replica.
    fn peer(&self, part: &CommonPart) -> usize {
        let dp = self.groups.mesh.dp;
        let (zero3, dp) = match self.zero1 {
            true => (part.piece / dp, part.piece % dp),
            false => (part.piece, self.groups.coords.dp),
        };
        self.groups.mesh.rank(Coords { pp: part.rank, zero3, dp })
    }

    /// Sends others the parts `given` of `shard`, which this rank has where there are any, and
    /// takes the parts `wanted` of a shard that begins at `start` of the weight, from other ranks
    /// or from `shard`. All ranks come to these messages in one order, senders with small numbers
    /// first, as NCCL asks (ADR 31).
    fn exchanged(
        &self,
        shard: Option<&OwnShard>,
        given: &[CommonPart],
        wanted: &[CommonPart],
        start: usize,
        tag: u64,
    ) -> (Sending, Vec<Arriving>) {
        let world = &self.groups.world;
        let mut sending = Sending::default();
        let mut arriving = Vec::with_capacity(wanted.len());
        let mut wanted: Vec<_> = wanted.iter().map(|part| (self.peer(part), part)).collect();
        wanted.sort_by_key(|(from, _)| *from);
        let mut arrive = |(from, part): &(usize, &CommonPart)| {
            let values = match shard.filter(|_| self.is_here(part)) {
                Some(shard) => Pending::ready(Ok(shard.part(part))),
                None => world.recv(*from, tag, part.elements.len(), DType::F32),
            };
            arriving.push(Arriving { values, at: part.elements.start - start });
        };
        let before = wanted.partition_point(|(from, _)| *from < world.rank());
        wanted[..before].iter().for_each(&mut arrive);
        let mut given: Vec<_> = given.iter().map(|part| (self.peer(part), part)).collect();
        given.sort_by_key(|(to, _)| *to);
        for (to, part) in given.into_iter().filter(|(_, part)| !self.is_here(part)) {
            let own = own_copy(&shard.expect("it is of this rank").part(part));
            sending.messages.push(world.send(to, tag, own));
            sending.bytes += 4 * part.elements.len() as u64;
        }
        wanted[before..].iter().for_each(arrive);
        (sending, arriving)
    }
}

/// The first fault of the rank's file: before others see what was read.
fn check_file(stages: &[ShardedStage]) -> CommResult<()> {
    stages.first().map_or(Ok(()), ShardedStage::check_file)
}

/// `all` with the parts that arrive, put in their places or added.
fn joined(all: Tensor<1>, parts: Vec<Arriving>, adds: bool) -> CommResult<Tensor<1>> {
    let here = all.device();
    if cpu_tensor::on_cpu(&all).is_none() {
        return parts.into_iter().try_fold(all, |all, Arriving { values, at }| {
            let part = device::on(&here, values.wait()?);
            let range = at..at + part.dims()[0];
            let part = if adds { part + all.clone().slice([range.clone()]) } else { part };
            Ok(all.slice_assign([range], part))
        });
    }
    let mut all = cpu_tensor::into_vec(all);
    for Arriving { values, at } in parts {
        let part = values.wait()?;
        let part = cpu_tensor::on_cpu(&part).expect("on the CPU, as its shard");
        let place = &mut all[at..at + part.as_slice().len()];
        match adds {
            // To the bit the embedding's plus the head's.
            true => kernels::add(place, part.as_slice()),
            false => place.copy_from_slice(part.as_slice()),
        }
    }
    let n = all.len();
    Ok(cpu_tensor::from_vec(all, [n]))
}
